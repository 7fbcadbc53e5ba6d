"""Time on the links: where neighbours of a layout are in the cluster, and what crosses what.

Context-parallel ranks are consecutive: rank p is in node p // 8 of an 8-rank node. A message
crosses the innermost level whose group holds both its ends. Ranks that share a link share its
bandwidth; levels work at the same time, so the slowest decides.
"""

from collections import Counter
from dataclasses import dataclass

from hybridcp.layout import Layout
from hybridcp.planner.cluster import Cluster


@dataclass(frozen=True, slots=True)
class LinkLoads:
    """Messages over the busiest link of each level, inner to outer, when all ranks take part.

    Attributes:
        ring: of one hop, each rank to the next ring position.
        all_to_all: of one All-to-All, each rank to every other of its Ulysses group.
    """

    ring: tuple[int, ...]
    all_to_all: tuple[int, ...]


def link_loads(layout: Layout, cluster: Cluster) -> LinkLoads:
    """Count the messages of a layout over the links of a cluster."""
    levels = range(len(cluster.levels))
    ring: list[Counter[int]] = [Counter() for _ in levels]
    all_to_all: list[Counter[int]] = [Counter() for _ in levels]
    for rank in range(layout.cp_degree):
        if layout.ring_degree > 1:
            ring_rank, ulysses_rank = layout.coordinates(rank)
            to = layout.rank_of((ring_rank + 1) % layout.ring_degree, ulysses_rank)
            level = crossed_level(cluster, rank, to)
            ring[level][rank // cluster.levels[level].ranks_per_link] += 1
        for level, peers in enumerate(ulysses_peers(layout, cluster, rank)):
            all_to_all[level][rank // cluster.levels[level].ranks_per_link] += peers
    return LinkLoads(
        ring=tuple(max(counts.values(), default=0) for counts in ring),
        all_to_all=tuple(max(counts.values(), default=0) for counts in all_to_all),
    )


def crossed_level(cluster: Cluster, a: int, b: int) -> int:
    """Index of the innermost level whose group holds ranks a and b."""
    sizes = cluster.group_sizes
    return next(i for i, size in enumerate(sizes) if size is None or a // size == b // size)


def ulysses_peers(layout: Layout, cluster: Cluster, rank: int) -> list[int]:
    """How many of a rank's Ulysses peers are across each level.

    The group is `first + stride · j`, j < U; those in the same block of `size` ranks are counted
    by division.
    """
    ring_rank, _ = layout.coordinates(rank)
    first = layout.rank_of(ring_rank, 0)
    stride = 1 if layout.order == "ulysses_inner" else layout.ring_degree
    inside = 1
    peers = []
    for size in cluster.group_sizes:
        within = layout.ulysses_degree
        if size is not None:
            start = rank // size * size
            low = max(0, -((first - start) // stride))
            high = min(layout.ulysses_degree, -((first - start - size) // stride))
            within = high - low
        peers.append(within - inside)
        inside = within
    return peers


def hop_seconds(loads: LinkLoads, cluster: Cluster, message_bytes: float) -> float:
    """One ring hop in which every rank sends `message_bytes` on, or 0 if there is nothing to send.

    Slowest level: messages on its busiest link · bytes ÷ (bandwidth · p2p_efficiency), and the
    longest latency of those crossed.
    """
    if message_bytes <= 0:
        return 0.0
    efficiencies = [level.p2p_efficiency for level in cluster.levels]
    return _slowest(loads.ring, efficiencies, cluster, message_bytes)


def all_to_all_seconds(
    loads: LinkLoads, cluster: Cluster, sent_bytes: float, ulysses_degree: int
) -> float:
    """One All-to-All in which every rank sends `sent_bytes` in all, the same to each peer.

    The same formula with all_to_all_efficiency and messages of sent_bytes ÷ (U - 1).
    """
    if ulysses_degree == 1 or sent_bytes <= 0:
        return 0.0
    efficiencies = [level.all_to_all_efficiency for level in cluster.levels]
    return _slowest(loads.all_to_all, efficiencies, cluster, sent_bytes / (ulysses_degree - 1))


def outermost_crossed(loads: tuple[int, ...], cluster: Cluster) -> str | None:
    """Name of the outermost level that messages cross, or None if nothing is sent."""
    crossed = [level.name for level, load in zip(cluster.levels, loads, strict=True) if load]
    return crossed[-1] if crossed else None


def _slowest(
    loads: tuple[int, ...], efficiencies: list[float], cluster: Cluster, message_bytes: float
) -> float:
    transfer = latency = 0.0
    for load, efficiency, level in zip(loads, efficiencies, cluster.levels, strict=True):
        if load:
            speed = level.bandwidth_gb_per_s * 1e9 * efficiency
            transfer = max(transfer, load * message_bytes / speed)
            latency = max(latency, level.latency_us * 1e-6)
    return transfer + latency
