"""The float64 reference against loops, and the accuracy rule against errors of known size."""

import math

import pytest
import torch

from hybridcp.masks import Band, causal, documents, full, sliding_window
from hybridcp.testing import (
    AttentionResult,
    assert_accurate,
    attention_errors,
    dense_mask,
    error_ratio,
    reference_attention,
    reference_gradients,
    relative_error,
    single_device_error,
)

MASKS = {
    "full": full(),
    "causal": causal(),
    "window": sliding_window(2, 1),
    "documents": causal() & documents([1, 4, 2]),
    "gaps": (Band(2, 5, 1, 4),),
    "nothing": (),
}


def tensors(n=7, heads=4, kv_heads=2, dim=3, dtype=torch.float64, seed=0):
    """q, k, v, dout."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, n, heads, dim), (2, n, kv_heads, dim), (2, n, kv_heads, dim), (2, n, heads, dim)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def loops(q, k, v, allowed, scale):
    """Attention as written in the paper, one query at a time."""
    out, lse = (
        torch.zeros_like(q),
        torch.full((q.size(0), q.size(2), q.size(1)), -math.inf).double(),
    )
    group = q.size(2) // k.size(2)
    for b in range(q.size(0)):
        for h in range(q.size(2)):
            for i in range(q.size(1)):
                keys = [j for j in range(k.size(1)) if allowed[i][j]]
                if not keys:
                    continue
                scores = [scale * float(q[b, i, h] @ k[b, j, h // group]) for j in keys]
                total = sum(math.exp(score) for score in scores)
                lse[b, h, i] = math.log(total)
                for j, score in zip(keys, scores, strict=True):
                    out[b, i, h] += math.exp(score) / total * v[b, j, h // group]
    return out, lse


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("scale", [None, 0.7])
def test_reference_is_attention(name, scale):
    q, k, v, _ = tensors()
    allowed = dense_mask(MASKS[name], 7, 7)
    expected = loops(q, k, v, allowed.tolist(), 3**-0.5 if scale is None else scale)
    torch.testing.assert_close(reference_attention(q, k, v, MASKS[name], scale), expected)


def test_dense_mask_of_bands():
    allowed = dense_mask(MASKS["documents"], 7, 7)
    expected = [[j <= i and block(i) == block(j) for j in range(7)] for i in range(7)]
    assert allowed.tolist() == expected
    assert dense_mask([Band(1, 2, 0, 3, hi=0)], 2, 3).tolist() == [[False] * 3, [True, True, False]]


def block(position):
    return (position >= 1) + (position >= 5)


@pytest.mark.parametrize("name", ["causal", "gaps"])
def test_gradients_are_right(name):
    q, k, v, _ = (x.requires_grad_() for x in tensors(n=5))
    mask = MASKS[name]
    assert torch.autograd.gradcheck(lambda *x: reference_attention(*x, mask)[0], (q, k, v))


def test_rows_without_a_key_have_no_gradient():
    q, k, v, dout = tensors()
    result = reference_gradients(q, k, v, dout, MASKS["gaps"])
    empty = [0, 1, 5, 6]
    assert not result.out[:, empty].any() and not result.dq[:, empty].any()
    assert (result.lse[:, :, empty] == -math.inf).all()
    assert result.dq[:, 2:5].all() and not result.dk[:, 4:].any()
    assert all(torch.isfinite(x).all() for x in (result.out, result.dq, result.dk, result.dv))


def test_no_keys_at_all():
    q, k, v, dout = tensors()
    result = reference_gradients(q, k[:, :0], v[:, :0], dout, ())
    assert not result.out.any() and not result.dq.any() and result.dk.shape[1] == 0


def test_relative_error():
    exact = torch.tensor([3.0, 4.0])
    assert relative_error(exact, exact) == 0
    assert relative_error(exact + torch.tensor([0.0, 0.5]), exact) == pytest.approx(0.1)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.ones(2), torch.zeros(2)) == math.inf
    assert relative_error(torch.tensor([3.0, math.nan]), exact) == math.inf
    with pytest.raises(ValueError, match="shapes differ"):
        relative_error(exact, exact[:1])


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [(torch.float64, 0, 1e-14), (torch.float32, 1e-8, 1e-6), (torch.bfloat16, 5e-4, 2e-2)],
    ids=["fp64", "fp32", "bf16"],
)
def test_single_device_error_is_that_of_the_dtype(dtype, low, high):
    q, k, v, dout = tensors(n=64, dim=16)
    errors = single_device_error(q, k, v, dout, causal(), dtype)
    for error in (errors.out, errors.dq, errors.dk, errors.dv):
        assert low <= error <= high


def test_single_device_error_survives_rows_without_a_key():
    errors = single_device_error(*tensors(), MASKS["gaps"], torch.float32)
    assert 0 < errors.worst < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2, 64])
def test_rounding_is_accepted(dtype, n):
    q, k, v, dout = tensors(n=n, dtype=dtype)
    exact = reference_gradients(q, k, v, dout, causal())
    rounded = [getattr(exact, name).to(dtype) for name in ("out", "dq", "dk", "dv")]
    lse = exact.lse if dtype == torch.float64 else exact.lse.float()
    assert_accurate(AttentionResult(*rounded, lse), q, k, v, dout, causal())


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_twice_the_error_is_refused(name):
    q, k, v, dout = tensors(n=64, dtype=torch.float32)
    exact = reference_gradients(q, k, v, dout, causal())
    plain = single_device_error(q, k, v, dout, causal(), torch.float32)
    off = {
        each: getattr(exact, each) * (1 + (2 * getattr(plain, each) if each == name else 0))
        for each in ("out", "dq", "dk", "dv")
    }
    ratio = error_ratio(AttentionResult(**off), q, k, v, dout, causal())
    assert getattr(ratio, name) == pytest.approx(2) and ratio.worst == getattr(ratio, name)
    with pytest.raises(AssertionError, match=f"^{name}: error ÷ that of plain"):
        assert_accurate(AttentionResult(**off), q, k, v, dout, causal())


def test_float64_is_held_to_1e_12():
    q, k, v, dout = tensors()
    exact = reference_gradients(q, k, v, dout, full())
    off = AttentionResult(exact.out * (1 + 2e-12), exact.dq, exact.dk, exact.dv)
    with pytest.raises(AssertionError, match="^out: relative error is 2e-12, limit 1e-12"):
        assert_accurate(off, q, k, v, dout, full())
    wrong_lse = AttentionResult(exact.out, exact.dq, exact.dk, exact.dv, exact.lse + 1e-9)
    with pytest.raises(AssertionError, match="^lse: "):
        assert_accurate(wrong_lse, q, k, v, dout, full())


def test_nan_is_refused():
    q, k, v, dout = tensors()
    exact = reference_gradients(q, k, v, dout, full())
    bad = AttentionResult(exact.out, exact.dq * math.nan, exact.dk, exact.dv)
    with pytest.raises(AssertionError, match="^dq: relative error is inf"):
        assert_accurate(bad, q, k, v, dout, full())


def test_gradients_that_cancel_are_judged_against_dout():
    """One key for each query: dq and dk are zero but for rounding."""
    q, k, v, dout = tensors(dtype=torch.float32)
    mask = documents([1] * 7)
    exact = reference_gradients(q, k, v, dout, mask)
    noisy = AttentionResult(exact.out, exact.dq + 1e-8, exact.dk - 1e-8, exact.dv)
    assert attention_errors(noisy, exact, dout).worst < 1e-7
    assert_accurate(noisy, q, k, v, dout, mask)
    wrong = AttentionResult(exact.out, exact.dq + 1e-5, exact.dk, exact.dv)
    with pytest.raises(AssertionError, match="^dq: "):
        assert_accurate(wrong, q, k, v, dout, mask)
