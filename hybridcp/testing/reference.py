"""Attention in float64 on one device, small and readable: the truth that results are held to.

Shapes: B batch, N queries, M keys (M = N in self attention), H query heads, K key/value heads
(K divides H), D head dim, Dv that of values. q (B, N, H, D), k (B, M, K, D), v (B, M, K, Dv), out
(B, N, H, Dv), lse (B, H, N).
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
        dsinks: (H,), summed over ranks; None without sinks.
    """

    out: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    lse: torch.Tensor | None = None
    dsinks: torch.Tensor | None = None


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
    *,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention in float64; autograd goes through it.

        out, lse = reference_attention(q, k, v, causal())

    Args:
        q: (B, N, H, D), any float dtype.
        k: (B, M, K, D).
        v: (B, M, K, Dv).
        mask: a mask, or bands in row numbers of q and k.
        softmax_scale: factor of q · k; 1/√D by default.
        softcap: scores become softcap · tanh(score / softcap); 0 for none.
        sinks: (H,) logits that take part in the softmax and give no value.

    Returns:
        out (B, N, H, Dv) and lse (B, H, N), float64.
    """
    sinks = None if sinks is None else sinks.double()
    return dense_attention(
        q.double(), k.double(), v.double(), mask, softmax_scale, softcap=softcap, sinks=sinks
    )


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: AttentionMask | Sequence[Band],
    softmax_scale: float | None = None,
    *,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference_attention` in the dtype of its inputs, whatever that rounds away."""
    group = q.size(2) // k.size(2)
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scale = q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale
    allowed = dense_mask(mask, q.size(1), k.size(1)).to(q.device)

    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        # A sink is a key that every query sees, whose value is 0.
        logits = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, logits], dim=-1)
        v = torch.cat([v, v.new_zeros((v.size(0), 1, *v.shape[2:]))], dim=1)
        allowed = torch.cat([allowed, allowed.new_ones((allowed.size(0), 1))], dim=1)
    has_key = allowed.any(dim=1)
    # Subtracting -inf from -inf would be NaN, so rows without a key subtract 0.
    top = scores.detach().amax(dim=-1).where(has_key, 0.0) if v.size(1) else scores.sum(-1)
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
    *,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> AttentionResult:
    """`reference_attention` and its gradients for a given `dout`, all float64.

    Args:
        q: (B, N, H, D), any float dtype.
        k: (B, M, K, D).
        v: (B, M, K, D).
        dout: (B, N, H, D), gradient of the output.
        mask: a mask, or bands in row numbers of q and k.
        softmax_scale: factor of q · k; 1/√D by default.
        softcap: as there.
        sinks: as there.
    """
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    if sinks is not None:
        sinks = sinks.detach().double().requires_grad_()
    with torch.enable_grad():
        out, lse = reference_attention(q, k, v, mask, softmax_scale, softcap=softcap, sinks=sinks)
        leaves = [q, k, v] if sinks is None else [q, k, v, sinks]
        dq, dk, dv, *dsinks = torch.autograd.grad(out, leaves, dout.double())
    return AttentionResult(
        out.detach(), dq, dk, dv, lse.detach(), dsinks=dsinks[0] if dsinks else None
    )
