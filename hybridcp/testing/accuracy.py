"""Is a result as accurate as plain attention in the same dtype? The rule that tests hold to.

A result is accepted when its error against float64 is at most 1.5 × the error that plain
single-device attention makes in the same dtype on the same inputs; float64 itself to 1e-12. So
no tolerance is chosen by hand, and one that is too generous cannot hide an algorithm error.

Errors are relative in the Frobenius norm: ‖x − exact‖ / ‖exact‖.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hybridcp.masks import AttentionMask, Band
from hybridcp.testing.reference import (
    AttentionResult,
    dense_attention,
    dense_mask,
    reference_gradients,
)

MAX_ERROR_RATIO = 1.5
MAX_FLOAT64_ERROR = 1e-12

_TENSORS = ("out", "dq", "dk", "dv", "dsinks")
# A correctly rounded result is off by about a fifth of eps; no baseline is held to be better.
_ROUNDING_SHARE = 0.2
# Below this share of dout a gradient is zero by cancellation, and judged against dout.
_CANCELLED = 1e-6


@dataclass(frozen=True, slots=True)
class AttentionErrors:
    """One figure each for the output and the gradients: an error, or a ratio of errors."""

    out: float
    dq: float
    dk: float
    dv: float
    dsinks: float = 0.0

    @property
    def worst(self) -> float:
        """The largest of them."""
        return max(self.out, self.dq, self.dk, self.dv, self.dsinks)


def relative_error(
    actual: torch.Tensor, exact: torch.Tensor, *, scale: float | None = None
) -> float:
    """‖actual − exact‖ / ‖exact‖ in the Frobenius norm; NaN counts as infinite.

    Args:
        actual: any shape and dtype.
        exact: same shape.
        scale: divide by this instead of ‖exact‖.
    """
    if actual.shape != exact.shape:
        raise ValueError(f"shapes differ: {tuple(actual.shape)} and {tuple(exact.shape)}")
    error = float((actual.double() - exact.double()).norm())
    size = float(exact.double().norm()) if scale is None else scale
    if error == 0:
        return 0.0
    return error / size if size > 0 and error == error else float("inf")


def attention_errors(
    actual: AttentionResult, exact: AttentionResult, dout: torch.Tensor
) -> AttentionErrors:
    """Relative error of each tensor of `actual` against float64.

    A gradient that vanishes by cancellation (dq of a query with one key) has no relative error;
    it is measured against `dout`.

    Args:
        actual: result to judge.
        exact: `reference_gradients` on the same inputs.
        dout: gradient of the output.
    """
    dout_size = float(dout.double().norm())
    found = {}
    for name in _TENSORS:
        true: torch.Tensor | None = getattr(exact, name)
        if true is None:
            continue
        size = float(true.double().norm())
        cancelled = name in ("dq", "dk", "dsinks") and size < _CANCELLED * dout_size
        found[name] = relative_error(
            getattr(actual, name), true, scale=dout_size if cancelled else size
        )
    return AttentionErrors(**found)


def single_device_error(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    mask: AttentionMask | Sequence[Band],
    dtype: torch.dtype,
    softmax_scale: float | None = None,
    *,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> AttentionErrors:
    """Error that plain attention on one device makes in `dtype`, against float64.

    Args:
        q: (B, N, H, D); inputs are rounded to `dtype` first.
        k: (B, M, K, D).
        v: (B, M, K, D).
        dout: (B, N, H, D).
        mask: a mask, or bands in row numbers of q and k.
        dtype: to compute in.
        softmax_scale: factor of q · k; 1/√D by default.
        softcap: as in `reference_attention`.
        sinks: as there; their gradient is judged too.
    """
    q, k, v, dout = (x.detach().to(dtype) for x in (q, k, v, dout))
    plain = _plain_attention(q, k, v, dout, mask, softmax_scale, softcap, sinks)
    exact = reference_gradients(q, k, v, dout, mask, softmax_scale, softcap=softcap, sinks=sinks)
    return attention_errors(plain, exact, dout)


def error_ratio(
    actual: AttentionResult,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    mask: AttentionMask | Sequence[Band],
    softmax_scale: float | None = None,
    *,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> AttentionErrors:
    """Error of `actual` ÷ error of plain single-device attention in the dtype of `q`.

    Args:
        actual: result to judge, global (not sharded).
        q: (B, N, H, D), as given to what is judged.
        k: (B, M, K, D).
        v: (B, M, K, D).
        dout: (B, N, H, D).
        mask: a mask, or bands in row numbers of q and k.
        softmax_scale: factor of q · k; 1/√D by default.
        softcap: as in `reference_attention`.
        sinks: as there; their gradient is judged too.
    """
    exact = reference_gradients(q, k, v, dout, mask, softmax_scale, softcap=softcap, sinks=sinks)
    errors = attention_errors(actual, exact, dout)
    plain = single_device_error(
        q, k, v, dout, mask, q.dtype, softmax_scale, softcap=softcap, sinks=sinks
    )
    floor = _ROUNDING_SHARE * torch.finfo(q.dtype).eps
    return AttentionErrors(
        **{name: getattr(errors, name) / max(getattr(plain, name), floor) for name in _TENSORS}
    )


def assert_accurate(
    actual: AttentionResult,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    mask: AttentionMask | Sequence[Band],
    softmax_scale: float | None = None,
    *,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Raise unless `actual` keeps the rule of this module.

    Args:
        actual: result to judge, global (not sharded); its lse is compared too if it has one.
        q: (B, N, H, D), as given to what is judged.
        k: (B, M, K, D).
        v: (B, M, K, D).
        dout: (B, N, H, D).
        mask: a mask, or bands in row numbers of q and k.
        softmax_scale: factor of q · k; 1/√D by default.
        softcap: as in `reference_attention`.
        sinks: as there; their gradient is judged too.

    Raises:
        AssertionError: naming the tensor that is off, and by how much.
    """
    exact = reference_gradients(q, k, v, dout, mask, softmax_scale, softcap=softcap, sinks=sinks)
    if q.dtype == torch.float64:
        figures, limit = attention_errors(actual, exact, dout), MAX_FLOAT64_ERROR
        what = "relative error"
    else:
        figures = error_ratio(
            actual, q, k, v, dout, mask, softmax_scale, softcap=softcap, sinks=sinks
        )
        limit, what = MAX_ERROR_RATIO, f"error ÷ that of plain {q.dtype} attention"
    for name in _TENSORS:
        figure = getattr(figures, name)
        if not figure <= limit:
            raise AssertionError(f"{name}: {what} is {figure:.3g}, limit {limit:g}")
    if actual.lse is not None:
        assert exact.lse is not None
        # 16-bit kernels may round scores before they sum them.
        narrow = 1e-5 if q.dtype == torch.float32 else 2e-4
        tolerance = MAX_FLOAT64_ERROR if q.dtype == torch.float64 else narrow
        torch.testing.assert_close(
            actual.lse.double(),
            exact.lse,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m: f"lse: {m}",
        )


def _plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    mask: AttentionMask | Sequence[Band],
    softmax_scale: float | None,
    softcap: float,
    sinks: torch.Tensor | None,
) -> AttentionResult:
    """Attention with a dense mask in the dtype of the inputs: PyTorch's own where it can."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    if sinks is not None:
        sinks = sinks.detach().to(q.dtype).requires_grad_()
    with torch.enable_grad():
        if softcap or sinks is not None:
            out, _ = dense_attention(q, k, v, mask, softmax_scale, softcap=softcap, sinks=sinks)
        else:
            out = _torch_attention(q, k, v, mask, softmax_scale)
        leaves = [q, k, v] if sinks is None else [q, k, v, sinks]
        dq, dk, dv, *dsinks = torch.autograd.grad(out, leaves, dout)
    return AttentionResult(out.detach(), dq, dk, dv, dsinks=dsinks[0] if dsinks else None)


def _torch_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: AttentionMask | Sequence[Band],
    softmax_scale: float | None,
) -> torch.Tensor:
    allowed = dense_mask(mask, q.size(1), k.size(1)).to(q.device)
    # What a kernel does with a query that has no key differs; here it sees all, and is erased.
    has_key = allowed.any(dim=1)
    bias = torch.zeros(allowed.shape, dtype=q.dtype, device=q.device)
    bias = bias.masked_fill(~(allowed | ~has_key[:, None]), -torch.inf)
    q_BHSD, k_BHSD, v_BHSD = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q_BHSD, k_BHSD, v_BHSD, attn_mask=bias, scale=softmax_scale, enable_gqa=True
    ).transpose(1, 2)
    return out * has_key[:, None, None]
