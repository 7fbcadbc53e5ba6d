from itertools import product

import pytest

from hybridcp.layout import Layout
from hybridcp.planner.cluster import load_cluster
from hybridcp.planner.cost import price, ring_steps_seconds
from hybridcp.planner.kernel_time import accumulate_seconds, kernel_seconds, merge_seconds
from hybridcp.planner.links import hop_seconds, link_loads
from hybridcp.planner.memory import attention_memory
from hybridcp.planner.problem import make_problem
from hybridcp.planner.traffic import (
    all_to_all_out_bytes,
    all_to_all_qkv_bytes,
    head_counts,
    ring_backward_bytes,
    ring_forward_bytes,
)
from hybridcp.planner.work import ring_work
from hybridcp.schedule import Schedule


def priced(layout, *, seq_len=4096, mask="causal", kv_heads=4, cluster="h100-8", heads=8):
    problem = make_problem(
        heads=heads,
        ranks=layout.cp_degree,
        kv_heads=kv_heads,
        head_dim=64,
        seq_len=seq_len,
        batch=1,
        dtype="bf16",
        mask=mask,
        cluster=load_cluster(cluster),
    )
    sharding = layout.shard(seq_len)
    schedule = Schedule(sharding, problem.mask)
    pairs = problem.mask.pairs(seq_len, seq_len)
    return problem, schedule, price(problem, layout, sharding, ring_work(schedule), pairs)


def test_a_hop_hides_under_compute():
    time = ring_steps_seconds([3.0, 3.0, 3.0], [2.0, 5.0, 0.0], 1.0)
    assert time.compute_s == 9
    assert time.ring_exposed_s == 2
    assert time.hop_s == 5
    assert time.hop_margin == pytest.approx(9 / 7)
    half = ring_steps_seconds([3.0, 3.0, 3.0], [2.0, 5.0, 0.0], 0.5)
    assert half.ring_exposed_s == pytest.approx(0.5 + 3.5)
    assert ring_steps_seconds([3.0], [0.0], 1.0).hop_margin == float("inf")


@pytest.mark.parametrize("mask", ["causal", "full", "window:500", "causal & documents:1k,3k"])
@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 5), (2, 3), (4, 4)], ids=str)
@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
def test_passes_by_walking_every_position(mask, layout, sharding):
    layout = Layout(ulysses_degree=layout[0], ring_degree=layout[1], sharding=sharding)
    problem, schedule, found = priced(layout, mask=mask)
    heads = head_counts(8, 4, layout.ulysses_degree)
    loads = link_loads(layout, problem.cluster)
    degree = layout.ring_degree
    rows = max(schedule.sharding.ring_len(r) for r in range(degree))
    block = 2 * rows * max(heads.keys) * 64
    forward = [schedule.forward_steps(r) for r in range(degree)]
    backward = [schedule.backward_steps(r) for r in range(degree)]
    compute = exposed = back_compute = back_exposed = 0.0
    for t in range(degree):
        step = max(
            kernel_seconds(steps[t].bands, problem, heads.queries, backward=False)
            + merge_seconds(steps[t].bands, problem, heads.queries)
            for steps in forward
        )
        sends = bool(forward[0][t].sends)
        hop = hop_seconds(loads, problem.cluster, block * 2 * sends)
        compute += step
        exposed += max(0.0, hop - step)
        arriving = rows if t else 0
        step = max(
            kernel_seconds(steps[t].bands, problem, heads.queries, backward=True)
            + accumulate_seconds(steps[t].bands, problem, heads.queries, max(heads.keys), arriving)
            for steps in backward
        )
        sends = bool(backward[0][t].sends)
        hop = hop_seconds(loads, problem.cluster, block * 2 * sends + block * 4 * bool(t))
        back_compute += step
        back_exposed += max(0.0, hop - step)
    assert found.forward.compute_s == pytest.approx(compute)
    assert found.forward.ring_exposed_s == pytest.approx(exposed)
    assert found.backward.compute_s == pytest.approx(back_compute)
    assert found.backward.ring_exposed_s == pytest.approx(back_exposed)
    assert (found.forward.all_to_all_s > 0) == (layout.ulysses_degree > 1)


@pytest.mark.parametrize("layout", [(1, 7), (2, 3), (4, 5), (8, 1), (4, 3), (2, 9)], ids=str)
@pytest.mark.parametrize("seq_len", [5, 97, 128, 1000])
def test_sent_bytes_are_those_of_the_busiest_rank(layout, seq_len):
    layout = Layout(ulysses_degree=layout[0], ring_degree=layout[1])
    problem, schedule, found = priced(layout, seq_len=seq_len, kv_heads=2)
    ranks = list(product(range(layout.ring_degree), range(layout.ulysses_degree)))
    sharding = schedule.sharding

    def most(*formulas):
        return max(sum(f(problem, sharding, r, u) for f in formulas) for r, u in ranks)

    assert found.sent.ring_forward == most(ring_forward_bytes)
    assert found.sent.ring_backward == most(ring_backward_bytes)
    assert found.sent.all_to_all_forward == most(all_to_all_qkv_bytes, all_to_all_out_bytes)


def test_contiguous_causal_work_is_uneven():
    uneven = Layout(ulysses_degree=1, ring_degree=8, sharding="contiguous")
    even = Layout(ulysses_degree=1, ring_degree=8)
    assert priced(uneven)[2].busiest_share == pytest.approx(15 / 8, rel=0.01)
    assert priced(even)[2].busiest_share == pytest.approx(1)


def test_memory_by_tensor_shapes():
    layout = Layout(ulysses_degree=2, ring_degree=4)
    problem, schedule, _ = priced(layout, seq_len=1024)
    memory = attention_memory(problem, schedule.sharding)
    local, position, q_heads, kv_heads, dim = 128, 256, 4, 2, 64
    assert memory.forward == {
        "local_qkv": local * (8 + 4 + 4) * dim * 2,
        "q": position * q_heads * dim * 2,
        "kv": 2 * position * kv_heads * dim * 2,
        "kv_hops": 2 * 2 * position * kv_heads * dim * 2,
        "partial_out": position * q_heads * dim * 2,
        "partial_out_fp32": position * q_heads * dim * 4,
        "out_fp32": position * q_heads * dim * 4,
        "lse_fp32": 2 * position * q_heads * 4,
    }
    assert memory.backward == {
        "local_dout": local * 8 * dim * 2,
        "saved_q_out_lse": 2 * position * q_heads * dim * 2 + position * q_heads * 4,
        "saved_kv": 2 * position * kv_heads * dim * 2,
        "kv_hops": 3 * 2 * position * kv_heads * dim * 2,
        "dout": position * q_heads * dim * 2,
        "dq_fp32": position * q_heads * dim * 4,
        "dkv_fp32": 3 * 2 * position * kv_heads * dim * 4,
        "partial_dqkv": position * (q_heads + 2 * kv_heads) * dim * 2,
    }
    assert memory.peak_bytes == max(sum(memory.forward.values()), sum(memory.backward.values()))
