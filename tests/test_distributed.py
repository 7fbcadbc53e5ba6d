"""Meshes and transfers: any axis of any mesh, any ring size, groups without global rank 0."""

import pytest
import torch
import torch.distributed as dist

from hybridcp import HybridAttention, Layout, ShardedSequence, causal, init_mesh
from hybridcp.distributed import resolve_groups
from hybridcp.testing import run_threads
from tests.attention.cases import Case, run_case


def _world_ranks(layout):
    groups = resolve_groups(layout, init_mesh(layout, device_type="cpu"))
    rank = dist.get_rank()
    coordinates = (groups.ring.rank, groups.ulysses.rank)
    assert layout.rank_of(*coordinates) == rank and layout.coordinates(rank) == coordinates
    return (
        dist.get_process_group_ranks(groups.ring.group),
        dist.get_process_group_ranks(groups.ulysses.group),
    )


@pytest.mark.parametrize(
    ("order", "rings", "ulysses"),
    [
        ("ulysses_inner", [[0, 2], [1, 3]] * 2, [[0, 1]] * 2 + [[2, 3]] * 2),
        ("ring_inner", [[0, 1]] * 2 + [[2, 3]] * 2, [[0, 2], [1, 3]] * 2),
    ],
)
def test_order_says_which_axis_has_consecutive_ranks(run_distributed, order, rings, ulysses):
    layout = Layout(ulysses_degree=2, ring_degree=2, order=order)
    assert run_distributed(_world_ranks, 4, layout) == list(zip(rings, ulysses, strict=True))


def _double_ring_ranks(layout):
    ring = resolve_groups(layout, init_mesh(layout, device_type="cpu")).ring
    assert ring.rank == layout.coordinates(dist.get_rank())[0]
    return [dist.get_process_group_ranks(level.group) for level in (ring.outer, ring.inner)]


@pytest.mark.parametrize(
    ("order", "outer", "inner"),
    [
        ("ulysses_inner", [0, 4], [0, 2]),
        ("ring_inner", [0, 2], [0, 1]),
    ],
)
def test_a_double_ring_has_two_levels(run_distributed, order, outer, inner):
    """Eight ranks: two inner rings of two positions, of two Ulysses ranks each."""
    layout = Layout(ulysses_degree=2, ring_degree=4, inner_ring_size=2, order=order)
    assert run_distributed(_double_ring_ranks, 8, layout)[0] == [outer, inner]


def _data_parallel(layout, names, sizes):
    """Each replica has its own data; its cp group may not hold global rank 0."""
    world = dist.init_device_mesh("cpu", sizes, mesh_dim_names=names)
    mesh = init_mesh(layout, world)
    replica = world.get_local_rank("dp") if "dp" in names else 0
    case = Case(26, causal(), kv_heads=2, seed=replica)
    return case, run_case(layout, mesh, case)


@pytest.mark.parametrize(
    ("degrees", "names", "sizes"),
    [
        ((2, 2), ("dp", "cp"), (2, 4)),
        ((1, 2), ("dp", "cp"), (2, 2)),
        ((2, 1), ("dp", "cp"), (2, 2)),
        ((2, 2), ("cp", "dp"), (4, 2)),
        ((2, 1), ("dp", "cp", "tp"), (2, 2, 2)),
        ((1, 1), ("dp", "cp"), (2, 1)),
    ],
    ids=str,
)
def test_the_cp_axis_of_a_mesh_is_split(run_distributed, degrees, names, sizes):
    layout = Layout(ulysses_degree=degrees[0], ring_degree=degrees[1])
    world_size = torch.Size(sizes).numel()
    for case, actual in run_distributed(_data_parallel, world_size, layout, names, sizes):
        case.check(actual)


@pytest.mark.parametrize("sizes", [(2, 4), (1, 8)], ids=str)
def test_the_cp_axis_becomes_a_double_ring(run_distributed, sizes):
    layout = Layout(ulysses_degree=sizes[1] // 4, ring_degree=4, inner_ring_size=2)
    for case, actual in run_distributed(_data_parallel, 8, layout, ("dp", "cp"), sizes):
        case.check(actual)


def _count_groups(layout):
    """Building modules and sequences creates no further groups."""
    mesh = init_mesh(layout, device_type="cpu")
    before = len(dist.distributed_c10d._world.pg_map)
    for _ in range(3):
        attention = HybridAttention(layout, mesh)
        seq = ShardedSequence(layout, mesh, seq_len=8).with_mask(causal())
    assert attention.groups.ring.group is seq.groups.ring.group
    return len(dist.distributed_c10d._world.pg_map) - before


def test_groups_are_made_once(run_distributed):
    layout = Layout(ulysses_degree=2, ring_degree=2)
    assert run_distributed(_count_groups, 4, layout) == [0] * 4


def _pass_on(groups, layout, elements, dtype):
    """Two exchanges with the same neighbour at once, then the same the other way."""
    ring = groups.ring
    after, before = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
    sent = [torch.full((elements,), ring.rank + part, dtype=dtype) for part in (0.25, 0.5)]
    received = [torch.empty_like(x) for x in sent]
    for to, source in ((after, before), (before, after)):
        exchanges = [
            ring.exchange([(x, to)], [(y, source)], tag=tag)
            for tag, (x, y) in enumerate(zip(sent, received, strict=True))
        ]
        for exchange in reversed(exchanges):
            exchange.wait()
        for part, y in zip((0.25, 0.5), received, strict=True):
            assert torch.equal(y, torch.full_like(y, source + part))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("elements", [0, 1, 1 << 22])
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_two_exchanges_in_flight_do_not_mix(degree, elements, dtype):
    """Also where both neighbours are the same rank, and with messages above any eager limit."""
    layout = Layout(ulysses_degree=1, ring_degree=degree)
    run_threads(_pass_on, layout, layout, elements, dtype, timeout=40)
