"""Every way in which keys and values travel, on real processes and on threads."""

import pytest
import torch

from hybridcp import Layout, causal, documents, full, sliding_window
from hybridcp.communicator import DoubleRing
from hybridcp.testing import run_threads
from tests.attention.cases import Case, check_all, run_cases, run_cases_in_threads

EXCHANGES = [
    {"exchange": "direct"},
    {"exchange": "allgather"},
    {"inner_ring_size": 2},
]
MASKS = [full(), causal(), sliding_window(9, 4), causal() & documents([1, 13, 2, 30, 1])]


def id_of(options: dict) -> str:
    return "-".join(map(str, options.values()))


@pytest.mark.parametrize("exchange", EXCHANGES, ids=id_of)
@pytest.mark.parametrize("order", ["ulysses_inner", "ring_inner"])
@pytest.mark.parametrize("degrees", [(1, 4), (2, 4)], ids=str)
def test_equals_single_device_attention(run_distributed, degrees, order, exchange):
    layout = Layout(ulysses_degree=degrees[0], ring_degree=degrees[1], order=order, **exchange)
    cases = [
        Case(47, mask, heads=6, kv_heads=kv_heads, dtype=dtype, batch=2)
        for mask in MASKS
        for dtype, kv_heads in ((torch.float64, 6), (torch.float64, 1), (torch.bfloat16, 2))
    ]
    check_all(cases, run_distributed(run_cases, layout.cp_degree, layout, cases))


@pytest.mark.parametrize(
    ("ring", "inner"), [(4, 2), (6, 2), (6, 3), (8, 2), (8, 4), (9, 3), (12, 2), (12, 6), (16, 4)]
)
def test_double_rings_of_any_size(ring, inner):
    layout = Layout(ulysses_degree=1, ring_degree=ring, inner_ring_size=inner)
    cases = [Case(53, mask, heads=2, kv_heads=1) for mask in (full(), causal())]
    check_all(cases, run_threads(run_cases_in_threads, layout, layout, cases))


@pytest.mark.parametrize("exchange", EXCHANGES, ids=id_of)
@pytest.mark.parametrize("seq_len", [1, 2, 5, 9])
def test_positions_without_tokens(seq_len, exchange):
    layout = Layout(ulysses_degree=2, ring_degree=8, **exchange)
    cases = [Case(seq_len, mask, heads=2, kv_heads=1) for mask in (full(), causal())]
    check_all(cases, run_threads(run_cases_in_threads, layout, layout, cases))


def _gather_and_sum(groups, layout):
    ring = groups.ring
    assert isinstance(ring, DoubleRing) and ring.size == layout.ring_degree
    sizes = [(r * 5) % 3 for r in range(ring.size)]
    gathered = ring.all_gather(torch.full((sizes[ring.rank], 2), float(ring.rank)), sizes)
    total = torch.tensor([1.0, ring.rank])
    ring.all_reduce(total)
    return [(piece.tolist()) for piece in gathered], total.tolist()


@pytest.mark.parametrize(("ring", "inner"), [(4, 2), (6, 2), (6, 3)])
def test_a_double_ring_gathers_and_sums_over_both_levels(ring, inner):
    layout = Layout(ulysses_degree=1, ring_degree=ring, inner_ring_size=inner)
    expected = [[[float(r)] * 2] * ((r * 5) % 3) for r in range(ring)]
    for gathered, total in run_threads(_gather_and_sum, layout, layout):
        assert gathered == expected
        assert total == [ring, sum(range(ring))]
