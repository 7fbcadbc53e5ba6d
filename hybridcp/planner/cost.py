"""Price of one layout: forward and backward seconds of one attention layer, from its schedule.

A pass is an All-to-All in, R ring steps, an All-to-All out. A step computes one block while the
next travels: it takes the longer of the two. A ring moves in step, so each step waits for the
position that computes longest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from hybridcp.layout import Layout
from hybridcp.planner.kernel_time import accumulate_seconds, kernel_seconds, merge_seconds
from hybridcp.planner.links import (
    LinkLoads,
    all_to_all_seconds,
    hop_seconds,
    link_loads,
    outermost_crossed,
)
from hybridcp.planner.problem import Problem
from hybridcp.planner.traffic import (
    HeadCounts,
    all_to_all_dout_bytes,
    all_to_all_dqkv_bytes,
    all_to_all_out_bytes,
    all_to_all_qkv_bytes,
    dkv_block_bytes,
    head_counts,
    kv_block_bytes,
    ring_backward_bytes,
    ring_forward_bytes,
)
from hybridcp.planner.work import RingWork
from hybridcp.sharding import Sharding


@dataclass(frozen=True, slots=True)
class PassTime:
    """Seconds of one pass, by what the rank waits for.

    Attributes:
        compute_s: attention kernels and merges.
        ring_exposed_s: ring hops, as far as they do not fit under compute.
        all_to_all_s: both All-to-Alls with packing and unpacking.
        hop_s: the longest single ring hop, exposed or not.
        hop_margin: compute ÷ ring transfer over the whole pass; infinite without a ring.
    """

    compute_s: float
    ring_exposed_s: float
    all_to_all_s: float
    hop_s: float
    hop_margin: float

    @property
    def total_s(self) -> float:
        """All that the rank waits for."""
        return self.compute_s + self.ring_exposed_s + self.all_to_all_s


@dataclass(frozen=True, slots=True)
class SentBytes:
    """Bytes that one rank sends; each of the rank that sends most of it."""

    all_to_all_forward: int
    all_to_all_backward: int
    ring_forward: int
    ring_backward: int


@dataclass(frozen=True, slots=True)
class Price:
    """All that the planner knows of one layout.

    Attributes:
        all_to_all_level: outermost level that the All-to-All crosses, or None.
        ring_level: outermost level that ring hops cross, or None.
        busiest_share: pairs of the busiest ring position ÷ mean.
    """

    forward: PassTime
    backward: PassTime
    sent: SentBytes
    all_to_all_level: str | None
    ring_level: str | None
    busiest_share: float


def price(
    problem: Problem, layout: Layout, sharding: Sharding, work: RingWork, pairs: int
) -> Price:
    """Price one layout.

    Args:
        problem: the question.
        layout: what to price.
        sharding: of the layout and the problem's seq_len.
        work: the steps of that sharding under the problem's mask.
        pairs: (query, key) pairs that the mask allows.
    """
    cluster = problem.cluster
    loads = link_loads(layout, cluster)
    heads = head_counts(problem.heads, problem.kv_heads, layout.ulysses_degree)
    sent = all_to_all_sends(problem, sharding)
    return Price(
        forward=_forward(problem, sharding, work, loads, heads, sent["qkv"], sent["out"]),
        backward=_backward(problem, sharding, work, loads, heads, sent["dout"], sent["dqkv"]),
        sent=sent_bytes(problem, sharding),
        all_to_all_level=outermost_crossed(loads.all_to_all, cluster),
        ring_level=outermost_crossed(loads.ring, cluster),
        busiest_share=work.busiest_pairs() * layout.ring_degree / pairs if pairs else 1.0,
    )


def ring_steps_seconds(
    compute_s: Sequence[float], hop_s: Sequence[float], overlap_fraction: float
) -> PassTime:
    """Ring steps whose hops run while they compute, without All-to-All.

    Step t: compute_t + max(0, hop_t - overlap · compute_t); with full overlap the longer of both.
    """
    exposed = sum(
        max(0.0, hop - overlap_fraction * compute)
        for compute, hop in zip(compute_s, hop_s, strict=True)
    )
    compute, hops = sum(compute_s), sum(hop_s)
    margin = compute / hops if hops else float("inf")
    return PassTime(compute, exposed, 0.0, max(hop_s, default=0.0), margin)


def sent_bytes(problem: Problem, sharding: Sharding) -> SentBytes:
    """What the rank that sends most sends in each pass."""

    def most(*formulas: Callable[[Problem, Sharding, int, int], int]) -> int:
        return max(sum(f(problem, sharding, r, u) for f in formulas) for r, u in _ranks(sharding))

    return SentBytes(
        all_to_all_forward=most(all_to_all_qkv_bytes, all_to_all_out_bytes),
        all_to_all_backward=most(all_to_all_dout_bytes, all_to_all_dqkv_bytes),
        ring_forward=most(ring_forward_bytes),
        ring_backward=most(ring_backward_bytes),
    )


def all_to_all_sends(problem: Problem, sharding: Sharding) -> dict[str, int]:
    """Bytes of each All-to-All, of the rank that sends most."""
    ranks = _ranks(sharding)
    formulas = {
        "qkv": all_to_all_qkv_bytes,
        "out": all_to_all_out_bytes,
        "dout": all_to_all_dout_bytes,
        "dqkv": all_to_all_dqkv_bytes,
    }
    return {
        name: max(formula(problem, sharding, r, u) for r, u in ranks)
        for name, formula in formulas.items()
    }


def packing_seconds(problem: Problem, sent_bytes: float, ulysses_degree: int) -> float:
    """Packing before and unpacking after an All-to-All: each reads and writes all U parts."""
    if ulysses_degree == 1:
        return 0.0
    packed = sent_bytes * ulysses_degree / (ulysses_degree - 1)
    return 4 * packed / (problem.cluster.gpu.memory_bandwidth_gb_per_s * 1e9)


def _forward(
    problem: Problem,
    sharding: Sharding,
    work: RingWork,
    loads: LinkLoads,
    heads: HeadCounts,
    *sent_bytes: int,
) -> PassTime:
    @cache
    def seconds(kind: int) -> float:
        bands = work.kinds[kind]
        return kernel_seconds(bands, problem, heads.queries, backward=False) + merge_seconds(
            bands, problem, heads.queries
        )

    degree = sharding.ring_degree
    compute = [max(map(seconds, kinds)) for kinds in work.kinds_at]
    block = kv_block_bytes(problem, _largest_block(sharding), max(heads.keys))
    hop = hop_seconds(loads, problem.cluster, block)
    hops = [hop] * (degree - 1) + [0.0]
    return _with_all_to_all(problem, sharding, loads, compute, hops, sent_bytes)


def _backward(
    problem: Problem,
    sharding: Sharding,
    work: RingWork,
    loads: LinkLoads,
    heads: HeadCounts,
    *sent_bytes: int,
) -> PassTime:
    degree = sharding.ring_degree
    rows, keys = _largest_block(sharding), max(heads.keys)

    @cache
    def seconds(kind: int, gradient_arrives: bool) -> float:
        bands = work.kinds[kind]
        arriving = rows if gradient_arrives else 0
        return kernel_seconds(bands, problem, heads.queries, backward=True) + accumulate_seconds(
            bands, problem, heads.queries, keys, arriving
        )

    # Backward visits distances in reverse (schedule.py): step t is distance R - 1 - t.
    compute = [
        max(seconds(kind, t > 0) for kind in kinds)
        for t, kinds in enumerate(reversed(work.kinds_at))
    ]
    block = kv_block_bytes(problem, rows, keys)
    gradient = dkv_block_bytes(problem, rows, keys)
    # The gradient of step t - 1 travels during step t, beside the keys and values for step t + 1.
    messages = [(block if t < degree - 2 else 0) + (gradient if t else 0) for t in range(degree)]
    hop = cache(lambda message: hop_seconds(loads, problem.cluster, message))
    hops = [hop(message) for message in messages]
    return _with_all_to_all(problem, sharding, loads, compute, hops, sent_bytes)


def _with_all_to_all(
    problem: Problem,
    sharding: Sharding,
    loads: LinkLoads,
    compute: list[float],
    hops: list[float],
    sent_bytes: tuple[int, ...],
) -> PassTime:
    ring = ring_steps_seconds(compute, hops, problem.cluster.overlap_fraction)
    degree = sharding.ulysses_degree
    all_to_all = sum(
        all_to_all_seconds(loads, problem.cluster, sent, degree)
        + packing_seconds(problem, sent, degree)
        for sent in sent_bytes
    )
    return PassTime(ring.compute_s, ring.ring_exposed_s, all_to_all, ring.hop_s, ring.hop_margin)


def _largest_block(sharding: Sharding) -> int:
    return max(sharding.ring_len(r) for r in range(sharding.ring_degree))


def _ranks(sharding: Sharding) -> list[tuple[int, int]]:
    """(ring_rank, ulysses_rank) of ranks that between them send every amount that is sent.

    What a rank sends depends on the lengths of its ring position and its neighbours alone, so
    one position for each combination of these is enough.
    """
    degree = sharding.ring_degree
    lengths = [sharding.ring_len(r) for r in range(degree)]
    unlike = {(lengths[r - 1], lengths[r], lengths[(r + 1) % degree]): r for r in range(degree)}
    return [(r, u) for r in unlike.values() for u in range(sharding.ulysses_degree)]
