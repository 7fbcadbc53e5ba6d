"""Attention in float64 on one device, small and readable: the truth that results are held to.

Shapes: B batch, N queries, M keys (M = N in self attention), H query heads, K key/value heads
(K divides H), D head dim. q (B, N, H, D), k and v (B, M, K, D), out (B, N, H, D), lse (B, H, N).
A query without any key gets out 0, lse -inf and no gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridcp.masks import AttentionMask, Band


@dataclass(frozen=True, slots=True)
class AttentionResult:
    """Output and gradients of one attention.

    Attributes:
        out: (B, N, H, D).
        dq: (B, N, H, D).
        dk: (B, M, K, D).
        dv: (B, M, K, D).
        lse: (B, H, N), natural log; None where it was not returned.
    """

    out: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    lse: torch.Tensor | None = None


def dense_mask(mask: AttentionMask | Sequence[Band], q_len: int, k_len: int) -> torch.Tensor:
    """The allowed pairs as a boolean (q_len, k_len) matrix, True where allowed.

    Args:
        mask: a mask, or bands in row numbers of these queries and keys.
        q_len: number of queries.
        k_len: number of keys.
    """
    bands = mask.bands_for(q_len, k_len) if isinstance(mask, AttentionMask) else mask
    rows = torch.arange(q_len)[:, None]
    columns = torch.arange(k_len)[None, :]
    allowed = torch.zeros(q_len, k_len, dtype=torch.bool)
    for band in bands:
        turn = columns - rows
        allowed |= (
            (rows >= band.q0)
            & (rows < band.q1)
            & (columns >= band.k0)
            & (columns < band.k1)
            & (turn >= band.lo)
            & (turn <= band.hi)
        )
    return allowed


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: AttentionMask | Sequence[Band],
    softmax_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention in float64; autograd goes through it.

        out, lse = reference_attention(q, k, v, causal())

    Args:
        q: (B, N, H, D), any float dtype.
        k: (B, M, K, D).
        v: (B, M, K, D).
        mask: a mask, or bands in row numbers of q and k.
        softmax_scale: factor of q · k; 1/√D by default.

    Returns:
        out (B, N, H, D) and lse (B, H, N), float64.
    """
    q, k, v = q.double(), k.double(), v.double()
    group = q.size(2) // k.size(2)
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scale = q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale
    allowed = dense_mask(mask, q.size(1), k.size(1)).to(q.device)

    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * scale
    scores = scores.masked_fill(~allowed, -torch.inf)
    has_key = allowed.any(dim=1)
    # Subtracting -inf from -inf would be NaN, so rows without a key subtract 0.
    top = scores.detach().amax(dim=-1).where(has_key, 0.0) if k.size(1) else scores.sum(-1)
    weights = (scores - top[..., None]).exp()
    total = weights.sum(dim=-1)
    safe_total = total.where(has_key, 1.0)
    out = torch.einsum("bhnm,bmhd->bnhd", weights / safe_total[..., None], v)
    lse = (safe_total.log() + top).where(has_key, -torch.inf)
    return out, lse


def reference_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    mask: AttentionMask | Sequence[Band],
    softmax_scale: float | None = None,
) -> AttentionResult:
    """`reference_attention` and its gradients for a given `dout`, all float64.

    Args:
        q: (B, N, H, D), any float dtype.
        k: (B, M, K, D).
        v: (B, M, K, D).
        dout: (B, N, H, D), gradient of the output.
        mask: a mask, or bands in row numbers of q and k.
        softmax_scale: factor of q · k; 1/√D by default.
    """
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        out, lse = reference_attention(q, k, v, mask, softmax_scale)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout.double())
    return AttentionResult(out.detach(), dq, dk, dv, lse.detach())
