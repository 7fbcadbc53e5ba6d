"""Link loads against listing every message."""

from collections import Counter
from itertools import permutations

import pytest

from hybridcp.layout import Layout
from hybridcp.planner.cluster import load_cluster
from hybridcp.planner.links import (
    all_to_all_seconds,
    crossed_level,
    hop_seconds,
    link_loads,
    outermost_crossed,
    ulysses_peers,
)


def listed(messages, cluster):
    loads = [Counter() for _ in cluster.levels]
    for source, to in messages:
        group, level = 1, 0
        for level, part in enumerate(cluster.levels):  # noqa: B007
            group = group * part.size if part.size else 10**9
            if source // group == to // group:
                break
        loads[level][source // cluster.levels[level].ranks_per_link] += 1
    return tuple(max(load.values(), default=0) for load in loads)


@pytest.mark.parametrize("name", ["h100-8", "l20-8"])
@pytest.mark.parametrize("order", ["ulysses_inner", "ring_inner"])
@pytest.mark.parametrize(
    ("ulysses", "ring"), [(1, 8), (8, 1), (2, 4), (4, 2), (3, 2), (1, 1), (16, 3), (4, 6), (5, 7)]
)
def test_loads_by_listing(name, order, ulysses, ring):
    cluster = load_cluster(name)
    if cluster.group_sizes[-1] and ulysses * ring > cluster.group_sizes[-1]:
        pytest.skip("larger than the cluster")
    layout = Layout(ulysses_degree=ulysses, ring_degree=ring, order=order)
    hops = [
        (layout.rank_of(r, u), layout.rank_of((r + 1) % ring, u))
        for r in range(ring)
        for u in range(ulysses)
        if ring > 1
    ]
    exchanges = [
        (layout.rank_of(r, a), layout.rank_of(r, b))
        for r in range(ring)
        for a, b in permutations(range(ulysses), 2)
    ]
    loads = link_loads(layout, cluster)
    assert loads.ring == listed(hops, cluster)
    assert loads.all_to_all == listed(exchanges, cluster)
    for rank in range(layout.cp_degree):
        assert sum(ulysses_peers(layout, cluster, rank)) == ulysses - 1


def test_ulysses_inner_stays_inside_a_node():
    cluster = load_cluster("h100-8")
    inside = link_loads(Layout(ulysses_degree=8, ring_degree=32), cluster)
    assert inside.all_to_all == (7, 0)
    assert inside.ring == (0, 1)
    across = link_loads(Layout(ulysses_degree=16, ring_degree=16), cluster)
    assert across.all_to_all == (7, 8)
    assert outermost_crossed(across.all_to_all, cluster) == "network"
    assert outermost_crossed((0, 0), cluster) is None


def test_crossed_level():
    cluster = load_cluster("l20-8")
    assert [cluster.levels[crossed_level(cluster, 0, b)].name for b in (1, 2, 3, 4, 7)] == [
        "switch",
        "socket",
        "socket",
        "node",
        "node",
    ]


def test_seconds():
    cluster = load_cluster("h100-8")
    loads = link_loads(Layout(ulysses_degree=8, ring_degree=2), cluster)
    level = cluster.levels[1]
    expected = 1e9 / (level.bandwidth_gb_per_s * 1e9 * level.p2p_efficiency)
    assert hop_seconds(loads, cluster, 1e9) == pytest.approx(expected + level.latency_us * 1e-6)
    level = cluster.levels[0]
    expected = 1e9 / (level.bandwidth_gb_per_s * 1e9 * level.all_to_all_efficiency)
    assert all_to_all_seconds(loads, cluster, 1e9, 8) == pytest.approx(
        expected + level.latency_us * 1e-6
    )
    assert hop_seconds(loads, cluster, 0) == 0
    assert all_to_all_seconds(loads, cluster, 1e9, 1) == 0


def test_shared_links_share_their_bandwidth():
    """All four GPUs of a socket send to the other: the link between carries 4 · 4 messages."""
    cluster = load_cluster("l20-8")
    loads = link_loads(Layout(ulysses_degree=8, ring_degree=1), cluster)
    assert loads.all_to_all == (1, 4, 16)
    assert link_loads(Layout(ulysses_degree=1, ring_degree=8), cluster).ring == (1, 1, 1)
    assert link_loads(Layout(ulysses_degree=2, ring_degree=4), cluster).ring == (0, 2, 2)
