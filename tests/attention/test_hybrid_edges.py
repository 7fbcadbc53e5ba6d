"""Rows without keys, ranks without work, extreme scores, precision, determinism, independence."""

from typing import get_args

import pytest
import torch

from hybridcp import (
    AttentionMask,
    Band,
    HybridAttention,
    Layout,
    ShardedSequence,
    causal,
    documents,
    full,
    sliding_window,
)
from hybridcp.layout import Exchange
from hybridcp.testing import (
    MAX_ERROR_RATIO,
    MAX_FLOAT64_ERROR,
    AttentionResult,
    attention_errors,
    reference_gradients,
    run_threads,
    single_device_error,
)
from tests.attention.cases import Case, check_all, run_case, run_cases_in_threads

LAYOUTS = [
    Layout(ulysses_degree=1, ring_degree=4, sharding="contiguous"),
    Layout(ulysses_degree=2, ring_degree=2),
    Layout(ulysses_degree=4, ring_degree=1),
]
# Queries 8..15 see no key, and no query sees keys 20..23.
HOLES = AttentionMask((Band(0, 8, 0, 20), Band(16, 24, 0, 20, hi=0)), label="holes")


def id_of(layout: Layout) -> str:
    return f"ulysses{layout.ulysses_degree}-ring{layout.ring_degree}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=id_of)
def test_query_without_keys_gives_zero_and_no_gradient(layout):
    case = Case(24, HOLES, kv_heads=2)
    results = run_threads(run_cases_in_threads, layout, layout, [case])
    check_all([case], results)
    actual = results[0][0]
    assert not actual.out[:, 8:16].any() and not actual.dq[:, 8:16].any()
    assert not actual.dk[:, 20:].any() and not actual.dv[:, 20:].any()


def _with_nan_in_hidden_keys(groups, layout):
    case = Case(24, HOLES, kv_heads=2)
    seq = ShardedSequence(layout, groups, seq_len=24, mask=HOLES)
    q, k, v, dout = case.inputs()
    k[:, 20:], v[:, 20:] = torch.nan, torch.nan
    leaves = [seq.shard(x, 1).requires_grad_() for x in (q, k, v)]
    out = HybridAttention(layout, groups)(*leaves, seq)
    out.backward(seq.shard(dout, 1))
    return all(x.isfinite().all() for x in (out, *(leaf.grad for leaf in leaves)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=id_of)
def test_keys_that_no_query_sees_may_hold_anything(layout):
    assert all(run_threads(_with_nan_in_hidden_keys, layout, layout))


@pytest.mark.parametrize("layout", LAYOUTS, ids=id_of)
def test_a_rank_with_nothing_to_compute(layout):
    """Only the first six tokens attend: positions 1 to 3 of a contiguous ring have no work."""
    mask = AttentionMask((Band(0, 6, 0, 6, hi=0),))
    case = Case(32, mask)
    check_all([case], run_threads(run_cases_in_threads, layout, layout, [case]))


@pytest.mark.parametrize("layout", LAYOUTS, ids=id_of)
def test_documents_of_one_token_return_their_value(layout):
    case = Case(16, documents([1] * 16) & causal())
    results = run_threads(run_cases_in_threads, layout, layout, [case])
    check_all([case], results)
    torch.testing.assert_close(results[0][0].out, case.inputs()[2])


def _with_extreme_scores(groups, layout, dtype, factor):
    q, k, v, dout = Case(32, dtype=dtype).inputs()
    # One key outweighs all others by far more than exp can hold.
    k[:, 13] = k[:, 13] * factor
    seq = ShardedSequence(layout, groups, seq_len=32, mask=full())
    leaves = [seq.shard(x, 1).requires_grad_() for x in (q, k, v)]
    out = HybridAttention(layout, groups)(*leaves, seq)
    out.backward(seq.shard(dout, 1))
    parts = (out.detach(), *(leaf.grad for leaf in leaves))
    return [seq.unshard(x, 1) for x in parts], (q, k, v, dout)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=id_of)
def test_scores_hundreds_apart(layout, dtype):
    """Finite, and as exact as a log-sum-exp of that size in the accumulator's dtype allows."""
    for parts, inputs in run_threads(_with_extreme_scores, layout, layout, dtype, 200.0):
        assert all(x.isfinite().all() for x in parts)
        exact = reference_gradients(*inputs, full())
        errors = attention_errors(AttentionResult(*parts), exact, inputs[3])
        if dtype == torch.float64:
            assert errors.worst <= MAX_FLOAT64_ERROR
            continue
        # dq and dk of a saturated row are differences of equal numbers, times the large key: in
        # these dtypes they have no digits on one device either.
        plain = single_device_error(*inputs, full(), dtype)
        lse_rounding = torch.finfo(torch.float32).eps * float(exact.lse.abs().max())
        rounding = max(torch.finfo(dtype).eps / 2, lse_rounding)
        for name in ("out", "dv"):
            limit = MAX_ERROR_RATIO * max(getattr(plain, name), rounding)
            assert getattr(errors, name) <= limit, (name, errors, plain)


@pytest.mark.parametrize("exchange", get_args(Exchange))
@pytest.mark.parametrize(("kernel", "growth"), [("cpu", 1.3), ("reference", 1.1)])
def test_bf16_error_does_not_grow_with_the_ring(kernel, growth, exchange):
    """Accumulators in bf16 would give a factor of 4 for out and 7 for dk and dv.

    The CPU kernel rounds each partial result to bf16; the reference kernel does not, so there only
    what the executor rounds is left, and a travelling gradient in bf16 shows at once.
    """
    case = Case(
        512, causal(), heads=2, kv_heads=2, head_dim=32, dtype=torch.bfloat16, kernel=kernel
    )
    exact = reference_gradients(*case.inputs(), case.mask)
    errors = {}
    for ring_degree in (1, 2, 4, 8, 16):
        layout = Layout(ulysses_degree=1, ring_degree=ring_degree, exchange=exchange)
        actual = run_threads(run_cases_in_threads, layout, layout, [case])[0][0]
        case.check(actual)
        errors[ring_degree] = attention_errors(actual, exact, case.inputs()[3])
    for name in ("out", "dq", "dk", "dv"):
        largest = max(getattr(error, name) for error in errors.values())
        assert largest <= growth * getattr(errors[1], name), (name, errors)


def _twice(groups, layout, case):
    first, second = (run_case(layout, groups, case) for _ in range(2))
    return all(
        torch.equal(getattr(first, x), getattr(second, x)) for x in ("out", "dq", "dk", "dv")
    )


@pytest.mark.parametrize("exchange", get_args(Exchange))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_inputs_same_bits(dtype, exchange):
    layout = Layout(ulysses_degree=2, ring_degree=4, exchange=exchange)
    case = Case(200, causal() & documents([77, 123]), kv_heads=2, dtype=dtype)
    assert all(run_threads(_twice, layout, layout, case))


def _two_models(groups, layout):
    """Two modules and four sequences in one process, calls interleaved."""
    one = Case(24, causal(), heads=12, kv_heads=4, seed=1)
    other = Case(31, sliding_window(5, 0), heads=8, kv_heads=8, seed=2)
    modules = [HybridAttention(layout, groups), HybridAttention(layout, groups, kernel="reference")]
    order = [(one, 0), (other, 1), (one, 1), (other, 0), (one, 0)]
    return [(case, run_case(layout, groups, case, modules[i])) for case, i in order]


def test_modules_do_not_know_of_each_other():
    layout = Layout(ulysses_degree=4, ring_degree=2)
    for case, actual in run_threads(_two_models, layout, layout)[0]:
        case.check(actual)


def _layers_with_masks(groups, layout):
    case = Case(40)
    seq = ShardedSequence(layout, groups, seq_len=40, mask=causal())
    window = seq.with_mask(sliding_window(6, 0))
    attention = HybridAttention(layout, groups)
    q, k, v, _ = (seq.shard(x, 1) for x in case.inputs())
    hidden = attention(q, k, v, seq)
    return seq.unshard(attention(hidden, k, v, window), 1)


def test_layers_with_different_masks_over_the_same_shards():
    layout = Layout(ulysses_degree=2, ring_degree=3)
    q, k, v, dout = Case(40).inputs()
    hidden = reference_gradients(q, k, v, dout, causal()).out
    expected = reference_gradients(hidden, k, v, dout, sliding_window(6, 0)).out
    for actual in run_threads(_layers_with_masks, layout, layout):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def _without_gradients(groups, layout):
    case = Case(24)
    seq = ShardedSequence(layout, groups, seq_len=24)
    attention = HybridAttention(layout, groups).eval()
    q, k, v, _ = (seq.shard(x, 1) for x in case.inputs())
    with torch.no_grad():
        quiet = attention(q, k, v, seq)
    return torch.equal(quiet, attention(q.requires_grad_(), k, v, seq)), quiet.requires_grad


def test_eval_without_gradients_gives_the_same():
    layout = Layout(ulysses_degree=2, ring_degree=2)
    assert run_threads(_without_gradients, layout, layout) == [(True, False)] * 4
