"""Every (U, R), forward and backward on real processes, against float64 single-device attention."""

import pytest
import torch

from hybridcp import Layout, causal, chunked, documents, full, prefix_lm, sliding_window
from hybridcp.testing import run_threads
from tests.attention.cases import Case, check_all, run_cases, run_cases_in_threads

DEGREES = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (4, 1), (1, 4), (4, 2), (2, 4)]
MASKS = [
    causal(),
    full(),
    sliding_window(9, 0),
    sliding_window(3, 4),
    causal() & documents([1, 13, 2, 30, 1]),
    prefix_lm(11),
    causal() & chunked(10),
    documents([20, 27]) & sliding_window(5, 5),
]


def id_of(degrees: tuple[int, int]) -> str:
    return f"ulysses{degrees[0]}-ring{degrees[1]}"


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
@pytest.mark.parametrize("degrees", DEGREES, ids=id_of)
def test_equals_single_device_attention(run_distributed, degrees, sharding):
    layout = Layout(ulysses_degree=degrees[0], ring_degree=degrees[1], sharding=sharding)
    cases = [
        Case(47, mask, heads=12, kv_heads=kv_heads, dtype=dtype, batch=batch, seed=i)
        for i, (dtype, kv_heads, batch) in enumerate(
            [
                (torch.float64, 12, 2),
                (torch.float64, 3, 1),
                (torch.float32, 4, 2),
                (torch.bfloat16, 12, 1),
                (torch.bfloat16, 1, 2),
            ]
        )
        for mask in MASKS
    ]
    check_all(cases, run_distributed(run_cases, layout.cp_degree, layout, cases))


@pytest.mark.parametrize("order", ["ulysses_inner", "ring_inner"])
@pytest.mark.parametrize("degrees", [(2, 3), (4, 4), (2, 8), (8, 2), (1, 16), (16, 1)], ids=id_of)
def test_equals_single_device_attention_on_threads(degrees, order):
    layout = Layout(ulysses_degree=degrees[0], ring_degree=degrees[1], order=order)
    cases = [Case(83, mask, heads=16, kv_heads=2) for mask in (causal(), sliding_window(20, 0))]
    check_all(cases, run_threads(run_cases_in_threads, layout, layout, cases))


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_every_kernel_of_this_machine(kernel):
    layout = Layout(ulysses_degree=2, ring_degree=2)
    cases = [
        Case(61, mask, kv_heads=2, dtype=dtype, kernel=kernel)
        for mask in (causal(), sliding_window(9, 2), causal() & documents([7, 54]))
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    ]
    check_all(cases, run_threads(run_cases_in_threads, layout, layout, cases))


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("degrees", [(2, 2), (3, 2), (4, 2), (6, 1), (12, 1)], ids=id_of)
def test_any_key_value_heads(degrees, kv_heads):
    """K < U, K = 1, and K that neither divides U nor is divided by it."""
    layout = Layout(ulysses_degree=degrees[0], ring_degree=degrees[1])
    case = Case(31, heads=12, kv_heads=kv_heads)
    results = run_threads(run_cases_in_threads, layout, layout, [case])
    check_all([case], results)
    assert results[0][0].dk.size(2) == kv_heads


@pytest.mark.parametrize("seq_len", [1, 2, 3, 5, 7, 8, 9, 16, 17])
@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
def test_lengths_that_divide_by_nothing(seq_len, sharding):
    """Down to one token over eight ranks: most hold none, and all take part."""
    for ulysses_degree, ring_degree in ((2, 4), (4, 2), (1, 8), (8, 1)):
        layout = Layout(ulysses_degree=ulysses_degree, ring_degree=ring_degree, sharding=sharding)
        cases = [Case(seq_len, mask, heads=8, kv_heads=2) for mask in (causal(), full())]
        check_all(cases, run_threads(run_cases_in_threads, layout, layout, cases))


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
def test_window_edges_around_a_block_edge(sharding):
    """Blocks are 8 long: one below, at and above an edge, to the left, right and both sides."""
    layout = Layout(ulysses_degree=1, ring_degree=4, sharding=sharding)
    sizes = (0, 1, 7, 8, 9, 15, 16, 17, 31, 32)
    masks = [
        sliding_window(left, right)
        for size in sizes
        for left, right in ((size, 0), (0, size), (size, size), (size, -1))
    ]
    cases = [Case(32, mask) for mask in masks]
    check_all(cases, run_threads(run_cases_in_threads, layout, layout, cases))


@pytest.mark.parametrize("degrees", [(1, 1), (1, 3), (3, 1), (2, 2)], ids=id_of)
def test_strides_do_not_matter(degrees):
    layout = Layout(ulysses_degree=degrees[0], ring_degree=degrees[1])
    case = Case(29, heads=6, kv_heads=6, batch=3, softmax_scale=0.3, strided=True)
    check_all([case], run_threads(run_cases_in_threads, layout, layout, [case]))
