"""Who holds which tokens: ascending global ranges for each ring position and each rank.

A ring position is one Ulysses group: its `ulysses_degree` ranks together hold the position's
tokens, each an even share of the ascending list. 16 tokens, ring_degree 2, ulysses_degree 2:

                          contiguous               zigzag
    ring 0, ulysses 0     0  1  2  3               0  1  2  3
    ring 0, ulysses 1     4  5  6  7              12 13 14 15
    ring 1, ulysses 0     8  9 10 11               4  5  6  7
    ring 1, ulysses 1    12 13 14 15               8  9 10 11

`balanced` (`hybridcp.balance`) levels the work of any mask; it alone depends on the mask.
Zigzag (DualChunkSwap, head-tail) gives ring position r the chunks r and 2R - 1 - r of 2R, so
each ring position has the same causal work. It is cut over the ring alone: a zigzag over all
ranks would be wrong for `ulysses_degree > 1`. Nothing needs to divide: chunk sizes differ by
at most one token, no token is padded, and a rank may hold none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from hybridcp.errors import LayoutError

ShardingName = Literal["contiguous", "zigzag", "balanced"]
SHARDING_NAMES: tuple[ShardingName, ...] = get_args(ShardingName)


class TokenRange(NamedTuple):
    """Global token positions `start <= i < stop`."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Sharding:
    """Which global token ranges each ring position holds, ascending, and their split over U ranks.

    Attributes:
        seq_len: N, number of global tokens.
        ulysses_degree: U, ranks that share one ring position.
        ring_ranges: for each ring position its ranges, ascending, none empty, none touching.

    Raises:
        LayoutError: the ranges do not hold each of the N tokens exactly once.
    """

    seq_len: int
    ulysses_degree: int
    ring_ranges: tuple[tuple[TokenRange, ...], ...]

    def __post_init__(self) -> None:
        for ranges in self.ring_ranges:
            ascend = all(a.stop < b.start for a, b in pairwise(ranges))
            if not ascend or any(piece.size < 1 for piece in ranges):
                shown = [tuple(piece) for piece in ranges]
                raise LayoutError(
                    f"ranges of a ring position must hold tokens and ascend with gaps, got {shown}"
                )
        held = sorted(piece for ranges in self.ring_ranges for piece in ranges)
        edges = [TokenRange(0, 0), *held, TokenRange(self.seq_len, self.seq_len)]
        for before, after in pairwise(edges):
            if before.stop != after.start:
                raise LayoutError(
                    f"each of the {self.seq_len} tokens must be held exactly once, but "
                    f"{tuple(before)} is followed by {tuple(after)}"
                )

    @property
    def ring_degree(self) -> int:
        """R, number of ring positions."""
        return len(self.ring_ranges)

    def ring_len(self, ring_rank: int) -> int:
        """Number of tokens of one ring position (of its whole Ulysses group)."""
        return sum(piece.size for piece in self.ring_ranges[ring_rank])

    def local_rows(self, ring_rank: int) -> Iterator[tuple[TokenRange, int]]:
        """Each global range of one ring position with the local row where it begins."""
        row = 0
        for piece in self.ring_ranges[ring_rank]:
            yield piece, row
            row += piece.size

    def rank_lens(self, ring_rank: int) -> tuple[int, ...]:
        """Number of tokens of each Ulysses rank of one ring position."""
        cuts = self._cuts(ring_rank)
        return tuple(b - a for a, b in pairwise(cuts))

    def rank_ranges(self, ring_rank: int, ulysses_rank: int) -> tuple[TokenRange, ...]:
        """The global token ranges of one rank, ascending."""
        cuts = self._cuts(ring_rank)
        start, stop = cuts[ulysses_rank], cuts[ulysses_rank + 1]
        found = []
        for piece, row in self.local_rows(ring_rank):
            first = max(start - row, 0)
            last = min(stop - row, piece.size)
            if first < last:
                found.append(TokenRange(piece.start + first, piece.start + last))
        return tuple(found)

    def _cuts(self, ring_rank: int) -> list[int]:
        return even_cuts(self.ring_len(ring_rank), self.ulysses_degree)


def even_cuts(length: int, parts: int) -> list[int]:
    """`parts + 1` cut points of `[0, length)`; part sizes differ by at most one."""
    return [i * length // parts for i in range(parts + 1)]


def contiguous(seq_len: int, ring_degree: int, ulysses_degree: int) -> Sharding:
    """Ring position r holds the r-th of R consecutive ranges."""
    cuts = even_cuts(seq_len, ring_degree)
    return sharding_of(seq_len, ulysses_degree, [[(a, b)] for a, b in pairwise(cuts)])


def zigzag(seq_len: int, ring_degree: int, ulysses_degree: int) -> Sharding:
    """Ring position r holds chunks r and 2R - 1 - r of 2R: equal causal work for each."""
    cuts = even_cuts(seq_len, 2 * ring_degree)
    chunks = list(pairwise(cuts))
    pairs = [[chunks[r], chunks[2 * ring_degree - 1 - r]] for r in range(ring_degree)]
    return sharding_of(seq_len, ulysses_degree, pairs)


def make_sharding(
    name: ShardingName, *, seq_len: int, ring_degree: int, ulysses_degree: int
) -> Sharding:
    """The sharding of that name, if it depends on sizes alone.

    Raises:
        LayoutError: an unknown name, `seq_len` below 1, a degree below 1, or `balanced`, which
            needs a mask (`Layout.shard`).
    """
    if name not in SHARDING_NAMES:
        raise LayoutError(f"unknown sharding {name!r}; there are {', '.join(SHARDING_NAMES)}")
    check_sizes(seq_len, ring_degree, ulysses_degree)
    if name == "balanced":
        raise LayoutError(
            "a balanced sharding depends on the mask: pass it, layout.shard(seq_len, mask)"
        )
    make = {"contiguous": contiguous, "zigzag": zigzag}[name]
    return make(seq_len, ring_degree, ulysses_degree)


def check_sizes(seq_len: int, ring_degree: int, ulysses_degree: int) -> None:
    """Raise unless each size is a whole number ≥ 1.

    Raises:
        LayoutError: the size and its value.
    """
    for what, value in (
        ("seq_len", seq_len),
        ("ring_degree", ring_degree),
        ("ulysses_degree", ulysses_degree),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise LayoutError(f"{what} must be a whole number ≥ 1, got {value!r}")


def sharding_of(
    seq_len: int, ulysses_degree: int, ring_ranges: Sequence[Sequence[tuple[int, int]]]
) -> Sharding:
    """The sharding in which ring position r holds `ring_ranges[r]`, in any order, some empty."""
    joined = tuple(tuple(joined_ranges(ranges)) for ranges in ring_ranges)
    return Sharding(seq_len, ulysses_degree, joined)


def joined_ranges(ranges: Sequence[tuple[int, int]]) -> list[TokenRange]:
    """The same tokens, ascending, without empty ranges, neighbours joined into one."""
    found: list[TokenRange] = []
    for start, stop in sorted(ranges):
        if start == stop:
            continue
        if found and found[-1].stop == start:
            found[-1] = TokenRange(found[-1].start, stop)
        else:
            found.append(TokenRange(start, stop))
    return found
