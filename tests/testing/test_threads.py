"""Ranks as threads: real transfers on every group of a layout, and failures with coordinates."""

import threading

import pytest
import torch

from hybridcp.layout import Layout
from hybridcp.testing import DistributedTestError, run_threads

LAYOUT_16 = Layout(ulysses_degree=4, ring_degree=4)


def coordinates(groups):
    return groups.ring.rank, groups.ulysses.rank, groups.ring.size, groups.ulysses.size


def pass_on(groups, hops):
    """Which ring ranks' blocks came by, and from which Ulysses rank."""
    ring = groups.ring
    block = torch.tensor([ring.rank, groups.ulysses.rank])
    seen = []
    for _ in range(hops):
        arriving = torch.empty_like(block)
        ahead, behind = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
        ring.exchange([(block, ahead)], [(arriving, behind)], tag=0).wait()
        block = arriving
        seen.append(tuple(block.tolist()))
    return seen


def swap(groups):
    """All-to-All: rank u sends u + 1 elements to everyone."""
    ulysses = groups.ulysses
    mine = ulysses.rank + 1
    sent = torch.full((mine * ulysses.size,), 10.0 * groups.ring.rank + ulysses.rank)
    sizes = [u + 1 for u in range(ulysses.size)]
    received = torch.empty(sum(sizes))
    ulysses.all_to_all(received, sent, sizes, [mine] * ulysses.size)
    return received


def fail_at(groups, ring_rank, ulysses_rank):
    if (groups.ring.rank, groups.ulysses.rank) == (ring_rank, ulysses_rank):
        raise KeyError("the real reason")
    pass_on(groups, 3)
    swap(groups)


def hang_at(groups, event, ring_rank):
    if groups.ring.rank == ring_rank:
        event.wait()


def gradient(groups, x):
    x = x.clone().requires_grad_()
    (x * groups.ring.rank).sum().backward()
    return x.grad


@pytest.mark.parametrize("order", ["ulysses_inner", "ring_inner"])
def test_results_come_in_the_order_of_ranks(order):
    layout = Layout(ulysses_degree=3, ring_degree=2, order=order)
    results = run_threads(coordinates, layout)
    assert results == [(*layout.coordinates(rank), 2, 3) for rank in range(6)]


def test_one_rank_has_no_groups():
    assert run_threads(coordinates, Layout(ulysses_degree=1, ring_degree=1)) == [(0, 0, 1, 1)]


def test_ring_exchange_on_16_ranks():
    for rank, seen in enumerate(run_threads(pass_on, LAYOUT_16, 3)):
        r, u = LAYOUT_16.coordinates(rank)
        assert seen == [((r - hop) % 4, u) for hop in (1, 2, 3)]


def test_all_to_all_on_16_ranks():
    for rank, received in enumerate(run_threads(swap, LAYOUT_16)):
        r, _ = LAYOUT_16.coordinates(rank)
        assert received.tolist() == [10 * r + u for u in range(4) for _ in range(u + 1)]


def test_backward_runs_in_every_thread():
    layout = Layout(ulysses_degree=1, ring_degree=4)
    for rank, grad in enumerate(run_threads(gradient, layout, torch.ones(3))):
        assert grad.tolist() == [rank] * 3


def test_reports_the_coordinates_of_the_failing_rank_first():
    with pytest.raises(DistributedTestError) as caught:
        run_threads(fail_at, LAYOUT_16, 2, 1)
    first, *others = caught.value.failures
    assert first.where == "rank 9 (ring_rank=2, ulysses_rank=1)"
    assert first.summary == "KeyError: 'the real reason'" and "in fail_at" in first.details
    assert others and all(failure.consequence for failure in others)


def test_gives_up_on_a_hanging_rank():
    event = threading.Event()
    try:
        with pytest.raises(DistributedTestError) as caught:
            run_threads(hang_at, Layout(ulysses_degree=2, ring_degree=2), event, 1, timeout=0.5)
    finally:
        event.set()
    assert [failure.rank for failure in caught.value.failures] == [2, 3]
    for failure in caught.value.failures:
        assert failure.summary.startswith("not done in 0.5 s")
        assert "in hang_at" in failure.details


def test_leaves_the_number_of_compute_threads_alone():
    before = torch.get_num_threads()
    run_threads(coordinates, Layout(ulysses_degree=1, ring_degree=2))
    assert torch.get_num_threads() == before
