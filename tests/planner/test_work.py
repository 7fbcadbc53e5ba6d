"""Steps as the planner keeps them against those of the schedule."""

import random

import pytest

from hybridcp.layout import Layout
from hybridcp.masks import causal, documents, full, sliding_window
from hybridcp.planner.work import is_uniform, ring_work, sampled_positions
from hybridcp.schedule import Schedule

MASKS = {
    "causal": lambda n: causal(),
    "full": lambda n: full(),
    "window": lambda n: sliding_window(n // 5, 0),
    "two-sided": lambda n: sliding_window(3, n // 7),
    "open-left": lambda n: sliding_window(-1, 2),
    "documents": lambda n: causal() & documents([n // 3, n - n // 3]),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
def test_kinds_are_the_steps_of_the_schedule(mask, sharding):
    rng = random.Random(0)
    for _ in range(30):
        degree, tokens = rng.randint(1, 9), rng.randint(3, 90)
        layout = Layout(ulysses_degree=1, ring_degree=degree, sharding=sharding)
        schedule = Schedule(layout.shard(tokens), MASKS[mask](tokens))
        work = ring_work(schedule)
        assert list(work.positions) == list(range(degree))
        for r, kinds in work.positions.items():
            forward = [step.bands for step in schedule.forward_steps(r)]
            assert [work.kinds[kind] for kind in kinds] == forward
            backward = [step.bands for step in schedule.backward_steps(r)]
            assert [work.kinds[kind] for kind in reversed(kinds)] == backward


def test_a_causal_zigzag_ring_has_three_kinds_of_step():
    layout = Layout(ulysses_degree=1, ring_degree=64)
    work = ring_work(Schedule(layout.shard(1 << 16), causal()))
    assert len(work.kinds) == 3
    assert work.busiest_pairs() * 64 == (1 << 16) * ((1 << 16) + 1) // 2


def test_long_rings_are_sampled():
    assert sampled_positions(64) == list(range(64))
    sample = sampled_positions(257)
    assert len(sample) == 16
    assert (sample[0], sample[-1]) == (0, 256)


def test_uniform_masks():
    assert all(is_uniform(MASKS[name](100)) for name in MASKS if name != "documents")
    assert not is_uniform(MASKS["documents"](100))
