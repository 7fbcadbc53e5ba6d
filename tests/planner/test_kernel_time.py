"""Kernel formulas against counting and against published speeds."""

import pytest

from hybridcp.masks import Band
from hybridcp.planner.cluster import load_cluster
from hybridcp.planner.kernel_time import (
    accumulate_seconds,
    forward_flops,
    kernel_calls,
    kernel_seconds,
    merge_seconds,
    occupancy,
    padded_efficiency,
)
from hybridcp.planner.problem import make_problem


def problem(head_dim=128, seq_len=16384, batch=1, heads=16, cluster="h100-8"):
    return make_problem(
        heads=heads,
        ranks=1,
        kv_heads=None,
        head_dim=head_dim,
        seq_len=seq_len,
        batch=batch,
        dtype="bf16",
        mask="causal",
        cluster=load_cluster(cluster),
    )


def test_flops_by_counting():
    """q · kᵀ and p · v, a multiply and an add for each element."""
    band = Band(0, 5, 0, 7, hi=1)
    count = 0
    for q in range(5):
        for _ in band.keys_of(q):
            for _head in range(3):
                count += 2 * 4 + 2 * 4
    assert forward_flops(band.pairs, heads=3, head_dim=4, batch=1) == count
    assert forward_flops(band.pairs, heads=3, head_dim=4, batch=2) == 2 * count


# FlashAttention-3 README figures and MagiAttention's long-context benchmark, H100, head_dim 128.
PUBLISHED_TFLOPS = [
    (2048, True, False, 521),
    (8192, True, False, 602),
    (16384, True, False, 616),
    (2048, False, False, 625),
    (16384, False, False, 648),
    (4096, True, True, 463),
    (16384, True, True, 563),
    (32768, True, True, 586),
    (4096, False, True, 518),
    (32768, False, True, 601),
]


@pytest.mark.parametrize(("seq_len", "is_causal", "backward", "tflops"), PUBLISHED_TFLOPS)
def test_published_speeds(seq_len, is_causal, backward, tflops):
    band = Band(0, seq_len, 0, seq_len, **({"hi": 0} if is_causal else {}))
    batch = max(1, 16384 // seq_len)
    asked = problem(seq_len=seq_len, batch=batch)
    seconds = kernel_seconds((band,), asked, 16, backward=backward)
    flops = 4 * band.pairs * 128 * 16 * batch * (2.5 if backward else 1)
    assert flops / seconds / 1e12 == pytest.approx(tflops, rel=0.1)


def test_head_dims_are_padded_to_the_kernel():
    gpu = load_cluster("h100-8").gpu
    assert [padded_efficiency(gpu, d).head_dim for d in (1, 64, 65, 128, 200, 512)] == [
        64,
        64,
        128,
        128,
        256,
        256,
    ]
    band = (Band(0, 8192, 0, 8192),)
    a, b = (kernel_seconds(band, problem(head_dim=d), 16, backward=False) for d in (80, 128))
    assert a == b


def test_few_tiles_leave_multiprocessors_idle():
    gpu = load_cluster("h100-8").gpu
    assert occupancy((Band(0, 129, 0, 9),), heads=3, batch=2, gpu=gpu) == pytest.approx(12 / 132)
    assert occupancy((Band(0, 9999, 0, 9),), heads=3, batch=2, gpu=gpu) == 1


def test_bands_that_share_a_window_are_one_call():
    full_bands = (Band(0, 4, 0, 4), Band(4, 8, 4, 8))
    assert kernel_calls(full_bands) == 1
    assert kernel_calls((*full_bands, Band(8, 12, 8, 12, hi=0))) == 2
    assert kernel_calls(()) == 0


def test_nothing_to_compute_costs_nothing():
    asked = problem()
    assert kernel_seconds((), asked, 16, backward=True) == 0
    assert merge_seconds((), asked, 16) == 0
    assert accumulate_seconds((), asked, 16, 4, 0) == 0


def test_merge_traffic_by_counting():
    asked = problem(batch=2, head_dim=64)
    rate = asked.cluster.gpu.memory_bandwidth_gb_per_s * 1e9
    bands = (Band(0, 10, 0, 4), Band(20, 25, 0, 4))
    moved = sum(2 + 4 + 4 for _ in range(15 * 3 * 64 * 2))
    assert merge_seconds(bands, asked, 3) == pytest.approx(moved / rate)
    moved += sum(2 * (2 + 4 + 4) for _ in range(8 * 1 * 64 * 2))
    moved += sum(2 * (4 + 4 + 4) for _ in range(100 * 1 * 64 * 2))
    assert accumulate_seconds(bands, asked, 3, 1, 100) == pytest.approx(moved / rate)
