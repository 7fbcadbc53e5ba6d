"""Enumerate every layout of P ranks, reject with a reason, price the rest, rank them.

Two layouts whose times differ by less than the model's error are a tie; among ties the more
robust comes first.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf, log2
from typing import get_args

from hybridcp.layout import Layout, Order
from hybridcp.planner.cost import Price, price
from hybridcp.planner.memory import Memory, attention_memory
from hybridcp.planner.problem import Problem
from hybridcp.planner.work import RingWork, ring_work
from hybridcp.schedule import Schedule
from hybridcp.sharding import SHARDING_NAMES, Sharding, ShardingName

MODEL_ERROR = 0.05
"""Relative error below which no difference is claimed. Published speeds of one attention kernel
on one GPU differ by up to 9 % between sources, so smaller errors cannot be shown."""

INT32_ELEMENTS = 1 << 31

MOST_BALANCED_POSITIONS = 256
"""Longest ring for which a balanced sharding is searched: its cost grows with the square of R."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that fits, with its price.

    Attributes:
        layout: what `HybridAttention` runs.
        price: times and bytes.
        memory: peak bytes of attention on one rank.
        warnings: what to know before choosing it.
        ulysses_inside: the All-to-All stays inside the innermost level.
        tie: not slower than the fastest by more than the model's error.
    """

    layout: Layout
    price: Price
    memory: Memory
    warnings: tuple[str, ...]
    ulysses_inside: bool
    tie: bool = False

    @property
    def total_s(self) -> float:
        """Seconds of forward and backward of one attention layer."""
        return self.price.forward.total_s + self.price.backward.total_s


@dataclass(frozen=True, slots=True)
class Rejected:
    """A split of the ranks that cannot run.

    Attributes:
        reason: "heads" or "memory".
        text: the reason with its numbers.
    """

    ulysses_degree: int
    ring_degree: int
    reason: str
    text: str


def search(problem: Problem) -> tuple[list[Candidate], list[Rejected]]:
    """All layouts of a problem, best first, and the splits that cannot run."""
    candidates: list[Candidate] = []
    rejected: list[Rejected] = []
    pairs = problem.mask.pairs(problem.seq_len, problem.seq_len)
    for ulysses_degree in divisors(problem.ranks):
        ring_degree = problem.ranks // ulysses_degree
        reason = _heads_reason(problem, ulysses_degree)
        if reason:
            rejected.append(Rejected(ulysses_degree, ring_degree, "heads", reason))
            continue
        memory, sharding_work = _prepared(problem, ulysses_degree, ring_degree)
        room = int(problem.cluster.gpu.memory_gib * (1 << 30))
        if memory.peak_bytes > room:
            rejected.append(
                Rejected(
                    ulysses_degree,
                    ring_degree,
                    "memory",
                    f"attention alone needs {memory.peak_bytes / 2**30:.1f} GiB a rank, the GPU "
                    f"has {problem.cluster.gpu.memory_gib:g} GiB",
                )
            )
            continue
        for layout in layouts(ulysses_degree, ring_degree):
            if layout.sharding not in sharding_work:
                continue
            sharding, work = sharding_work[layout.sharding]
            cost = price(problem, layout, sharding, work, pairs)
            warnings = tuple(_warnings(problem, layout, sharding, cost))
            inside = cost.all_to_all_level in (None, problem.cluster.levels[0].name)
            candidates.append(Candidate(layout, cost, memory, warnings, inside))
    return rank(candidates), rejected


def divisors(number: int) -> list[int]:
    """Divisors in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def layouts(ulysses_degree: int, ring_degree: int) -> list[Layout]:
    """Every layout of these degrees; choices that make no difference are left at their default."""
    orders: tuple[Order, ...] = get_args(Order)
    shardings: tuple[ShardingName, ...] = SHARDING_NAMES
    default = Layout(ulysses_degree=ulysses_degree, ring_degree=ring_degree)
    if ring_degree == 1:
        shardings = (default.sharding,)
    if ring_degree == 1 or ulysses_degree == 1:
        orders = (default.order,)
    return [
        default.model_copy(update={"order": order, "sharding": sharding})
        for order in orders
        for sharding in shardings
    ]


def rank(candidates: list[Candidate]) -> list[Candidate]:
    """Best first. Those within the model's error of the fastest are ties, sorted by robustness.

    The rest follow in the same way: the fastest of them, with those that the model cannot tell
    from it, and so on.
    """
    ranked: list[Candidate] = []
    rest = candidates
    while rest:
        limit = min(c.total_s for c in rest) * (1 + MODEL_ERROR)
        alike = [replace(c, tie=not ranked) for c in rest if c.total_s <= limit]
        rest = [c for c in rest if c.total_s > limit]
        ranked += sorted(alike, key=_robustness)
    return ranked


def _robustness(candidate: Candidate) -> tuple[object, ...]:
    """Sort key among times that are alike: first what loses least on a slower cluster.

    Ulysses inside the innermost level first, since its All-to-All is never hidden; then zigzag,
    which is level for causal layers too; then the ring that hides best, in powers of two; then
    the default order and the least exposed communication.
    """
    forward, backward = candidate.price.forward, candidate.price.backward
    margin = min(forward.hop_margin, backward.hop_margin)
    exposed = sum(p.ring_exposed_s + p.all_to_all_s for p in (forward, backward))
    layout = candidate.layout
    return (
        not candidate.ulysses_inside,
        layout.sharding != "zigzag",
        -round(log2(margin)) if 0 < margin < inf else -margin,
        layout.order != "ulysses_inner",
        exposed,
    )


def _prepared(
    problem: Problem, ulysses_degree: int, ring_degree: int
) -> tuple[Memory, dict[ShardingName, tuple[Sharding, RingWork]]]:
    """What the orders of one split have in common: memory, and each sharding that is offered.

    Balanced is left out where it comes to the same as a simpler sharding, and in long rings.
    """
    prepared: dict[ShardingName, tuple[Sharding, RingWork]] = {}
    seen: set[Sharding] = set()
    for layout in layouts(ulysses_degree, ring_degree):
        name = layout.sharding
        if name in prepared or (name == "balanced" and ring_degree > MOST_BALANCED_POSITIONS):
            continue
        sharding = layout.shard(problem.seq_len, problem.mask)
        if name != "balanced" or sharding not in seen:
            seen.add(sharding)
            prepared[name] = (sharding, ring_work(Schedule(sharding, problem.mask)))
    first, _ = next(iter(prepared.values()))
    return attention_memory(problem, first), prepared


def _heads_reason(problem: Problem, ulysses_degree: int) -> str:
    if ulysses_degree > problem.heads:
        return f"more than {problem.heads} heads"
    if problem.heads % ulysses_degree:
        return f"does not divide {problem.heads} heads"
    return ""


def _warnings(problem: Problem, layout: Layout, sharding: Sharding, cost: Price) -> Iterator[str]:
    cluster = problem.cluster
    fast = cluster.levels[0]
    if cost.all_to_all_level not in (None, fast.name):
        yield (
            f"All-to-All crosses {cost.all_to_all_level}: a Ulysses group of "
            f"{layout.ulysses_degree} ranks does not lie inside one {fast.name}"
        )
    rows = max(sharding.ring_len(r) for r in range(layout.ring_degree))
    queries = rows * problem.heads // layout.ulysses_degree * problem.head_dim * problem.batch
    if queries >= INT32_ELEMENTS:
        yield (
            f"q has {queries} elements a rank, 2^31 or more: attention kernels that index with "
            "32 bits fail or are wrong there; use more ranks or a smaller batch"
        )
    chunks = layout.ulysses_degree * layout.ring_degree
    chunks *= 2 if layout.sharding == "zigzag" and layout.ring_degree > 1 else 1
    if problem.seq_len < chunks:
        yield f"{problem.seq_len} tokens are fewer than the {chunks} chunks: some stay empty"
