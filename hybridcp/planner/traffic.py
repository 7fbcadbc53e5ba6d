"""Bytes that each rank sends, exactly: one formula a function.

N tokens, P = U · R ranks, B batch, H query heads, K key/value heads, D head dim. One rank holds
L tokens, its ring position S (with equal shards L = N/P, S = N/R). What a rank keeps for itself
is not counted.
"""

from dataclasses import dataclass

from hybridcp.planner.problem import ACCUMULATOR_BYTES, Problem
from hybridcp.sharding import Sharding


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """Heads of each Ulysses rank.

    Attributes:
        queries: H/U, the same for each rank.
        keys: for each rank, the key/value heads that its query heads use.
    """

    queries: int
    keys: tuple[int, ...]


def head_counts(heads: int, kv_heads: int, ulysses_degree: int) -> HeadCounts:
    """Heads of each Ulysses rank, for U that divides H.

    Rank u computes query heads [u · H/U, (u + 1) · H/U), and query head h uses key/value head
    h // (H/K): a consecutive range, so its size is last - first + 1. Their sum is max(K, U)
    where K and U divide one another, and a little more where a group is cut.
    """
    each = heads // ulysses_degree
    group = heads // kv_heads
    firsts = (u * each for u in range(ulysses_degree))
    return HeadCounts(each, tuple((q + each - 1) // group - q // group + 1 for q in firsts))


def all_to_all_qkv_bytes(
    problem: Problem, sharding: Sharding, ring_rank: int, ulysses_rank: int
) -> int:
    """One rank's sends of q, k and v to its Ulysses group (also: received as dq, dk, dv).

    To each other rank u: its own L rows of the heads that u computes, H/U + 2 · keys[u]. With
    equal shards and K' = max(K, U): N/P · (H + 2K') · (U - 1)/U · D elements.
    """
    counts = head_counts(problem.heads, problem.kv_heads, sharding.ulysses_degree)
    rows = sharding.rank_lens(ring_rank)[ulysses_rank]
    others = sharding.ulysses_degree - 1
    heads = others * counts.queries + 2 * (sum(counts.keys) - counts.keys[ulysses_rank])
    return rows * heads * problem.head_dim * problem.batch * problem.item_bytes


def all_to_all_out_bytes(
    problem: Problem, sharding: Sharding, ring_rank: int, ulysses_rank: int
) -> int:
    """One rank's sends of out back to its Ulysses group.

    Its H/U heads of the S - L rows that others hold: N/P · H · (U - 1)/U · D elements with equal
    shards.
    """
    rows = sharding.ring_len(ring_rank) - sharding.rank_lens(ring_rank)[ulysses_rank]
    heads = problem.heads // sharding.ulysses_degree
    return rows * heads * problem.head_dim * problem.batch * problem.item_bytes


def all_to_all_dout_bytes(
    problem: Problem, sharding: Sharding, ring_rank: int, ulysses_rank: int
) -> int:
    """One rank's sends of dout: its L rows of the H - H/U heads that others compute."""
    rows = sharding.rank_lens(ring_rank)[ulysses_rank]
    heads = problem.heads - problem.heads // sharding.ulysses_degree
    return rows * heads * problem.head_dim * problem.batch * problem.item_bytes


def all_to_all_dqkv_bytes(
    problem: Problem, sharding: Sharding, ring_rank: int, ulysses_rank: int
) -> int:
    """One rank's sends of dq, dk and dv: its H/U + 2 · keys[u] heads of the S - L other rows."""
    counts = head_counts(problem.heads, problem.kv_heads, sharding.ulysses_degree)
    rows = sharding.ring_len(ring_rank) - sharding.rank_lens(ring_rank)[ulysses_rank]
    heads = counts.queries + 2 * counts.keys[ulysses_rank]
    return rows * heads * problem.head_dim * problem.batch * problem.item_bytes


def kv_block_bytes(problem: Problem, rows: int, keys: int) -> int:
    """Keys and values of `rows` tokens and `keys` key/value heads: one ring message."""
    return 2 * rows * keys * problem.head_dim * problem.batch * problem.item_bytes


def dkv_block_bytes(problem: Problem, rows: int, keys: int) -> int:
    """The gradient of such a block; it travels in float32."""
    return 2 * rows * keys * problem.head_dim * problem.batch * ACCUMULATOR_BYTES


def ring_forward_bytes(
    problem: Problem, sharding: Sharding, ring_rank: int, ulysses_rank: int
) -> int:
    """One rank's ring sends of the forward pass: every block but that of ring_rank + 1.

    2 · (R - 1) · N/R · K'/U · D elements with equal shards.
    """
    degree = sharding.ring_degree
    if degree == 1:
        return 0
    rows = sharding.seq_len - sharding.ring_len((ring_rank + 1) % degree)
    counts = head_counts(problem.heads, problem.kv_heads, sharding.ulysses_degree)
    return kv_block_bytes(problem, rows, counts.keys[ulysses_rank])


def ring_backward_bytes(
    problem: Problem, sharding: Sharding, ring_rank: int, ulysses_rank: int
) -> int:
    """One rank's ring sends of the backward pass.

    Keys and values: R - 2 hops, every block but its own and that of ring_rank - 1, which arrive
    last. Gradients, float32: R - 1 hops, of every block but its own.
    """
    degree = sharding.ring_degree
    if degree == 1:
        return 0
    gradient_rows = sharding.seq_len - sharding.ring_len(ring_rank)
    rows = gradient_rows - sharding.ring_len((ring_rank - 1) % degree)
    counts = head_counts(problem.heads, problem.kv_heads, sharding.ulysses_degree)
    keys = counts.keys[ulysses_rank]
    return kv_block_bytes(problem, rows, keys) + dkv_block_bytes(problem, gradient_rows, keys)
