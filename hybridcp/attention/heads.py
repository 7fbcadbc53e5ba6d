"""Which heads each Ulysses rank computes, and which key/value heads it needs for them.

Rank u computes the u-th of U consecutive ranges of query heads, whose sizes differ by one where
U does not divide H. Query head h uses key/value head h // (H/K), so the rank needs a consecutive
range of key/value heads. With K < U a key/value head goes to exactly the ranks that use it; it is
never repeated before it travels.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import gcd

from hybridcp.layout import Layout
from hybridcp.sharding import even_cuts


@dataclass(frozen=True)
class HeadSplit:
    """H query heads and K key/value heads over U Ulysses ranks.

    Raises:
        LayoutError: K does not divide H, or U is above H.
    """

    layout: Layout
    heads: int
    kv_heads: int

    def __post_init__(self) -> None:
        self.layout.check_heads(self.heads, self.kv_heads)

    @cached_property
    def q_ranges(self) -> tuple[range, ...]:
        """Query heads of each Ulysses rank."""
        cuts = even_cuts(self.heads, self.layout.ulysses_degree)
        return tuple(range(a, b) for a, b in pairwise(cuts))

    @cached_property
    def kv_ranges(self) -> tuple[range, ...]:
        """Key/value heads that each Ulysses rank needs."""
        group = self.heads // self.kv_heads
        return tuple(range(q[0] // group, q[-1] // group + 1) for q in self.q_ranges)

    def kernel_kv_heads(self, ulysses_rank: int) -> tuple[int, ...] | None:
        """Local key/value heads in the order a grouped-query kernel wants, or None for 0, 1, 2, ….

        A kernel serves each key/value head to equally many query heads. Where the cut between
        ranks falls inside a group (12 query heads, 3 key/value heads, U = 2: rank 0 has four
        query heads of the first and two of the second), the head is named several times.
        """
        group = self.heads // self.kv_heads
        queries, keys = self.q_ranges[ulysses_rank], self.kv_ranges[ulysses_rank]
        uses = [sum(h // group == k for h in queries) for k in keys]
        if len(set(uses)) == 1:
            return None
        each = gcd(*uses)
        return tuple(i for i, count in enumerate(uses) for _ in range(count // each))
