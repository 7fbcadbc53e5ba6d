"""flash-attn 2's arithmetic and window rules in plain torch, for the stand-ins."""

from itertools import pairwise

import torch


def flash_mask(
    q_len: int, k_len: int, max_k_len: int, left: int, right: int, causal: bool
) -> torch.Tensor:
    """Pairs that flash-attn 2.8's kernels compute, (q_len, k_len) bool.

    Like `mha_fwd` and `set_params_fprop`: a side that reaches over all keys of the longest
    sequence is dropped, and one dropped side beside a bounded one counts `max_k_len` keys.
    """
    left = -1 if left >= max_k_len else left
    right = -1 if right >= max_k_len else right
    right = 0 if causal else right
    queries, keys = torch.arange(q_len)[:, None], torch.arange(k_len)
    if left < 0 and right < 0:
        return torch.ones(q_len, k_len, dtype=torch.bool)
    left = max_k_len if left < 0 else left
    right = max_k_len if right < 0 else right
    corner = k_len - q_len
    return (keys >= queries + corner - left) & (keys <= queries + corner + right)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softcap: float,
    allowed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(S, H, D) tensors of one sequence; a row without keys gets output 0 and lse +inf."""
    scores = _scores(q, k, scale, softcap, allowed)
    empty = ~allowed.any(-1)
    p = scores.softmax(-1).masked_fill(empty[:, None], 0)
    out = torch.einsum("hqs,shd->qhd", p, _repeated(v, q))
    return out.to(q.dtype), scores.logsumexp(-1).masked_fill(empty, torch.inf)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    softcap: float,
    allowed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of one sequence from the given out (S, H, D) and lse (H, S)."""
    p = (_scores(q, k, scale, softcap, allowed) - lse[..., None]).exp()
    delta = (dout.float() * out.float()).sum(-1).T
    dp = torch.einsum("qhd,shd->hqs", dout.float(), _repeated(v, q))
    ds = p * (dp - delta[..., None]) * scale
    if softcap:
        capped = _scores(q, k, scale, softcap, torch.ones_like(allowed))
        ds = ds * (1 - (capped / softcap) ** 2)
    dq = torch.einsum("hqs,shd->qhd", ds, _repeated(k, q))
    dk = torch.einsum("hqs,qhd->shd", ds, q.float())
    dv = torch.einsum("hqs,qhd->shd", p, dout.float())
    groups = (k.shape[1], q.shape[1] // k.shape[1])
    dk, dv = (x.unflatten(1, groups).sum(2) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def sequences(
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_q: int, max_k: int
) -> list[tuple[slice, slice]]:
    """Rows of each sequence of a varlen call; checks the offsets as the kernels do."""
    for cu_seqlens, longest in ((cu_seqlens_q, max_q), (cu_seqlens_k, max_k)):
        assert cu_seqlens.dtype == torch.int32
        assert cu_seqlens.is_contiguous()
        assert int(cu_seqlens[0]) == 0
        assert int(cu_seqlens.diff().min()) >= 1
        assert int(cu_seqlens.diff().max()) == longest
    return [
        (slice(*q_rows), slice(*k_rows))
        for q_rows, k_rows in zip(
            pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True
        )
    ]


def check_inputs(*tensors: torch.Tensor) -> None:
    """One 16-bit dtype, contiguous head dims, a multiple of 8 up to 256."""
    for x in tensors:
        assert x.dtype == tensors[0].dtype
        assert x.dtype in (torch.float16, torch.bfloat16)
        assert x.stride(-1) == 1
        assert x.shape[-1] % 8 == 0
        assert 0 < x.shape[-1] <= 256
        assert min(x.shape) > 0


def _scores(
    q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float, allowed: torch.Tensor
) -> torch.Tensor:
    scores = torch.einsum("qhd,shd->hqs", q.float(), _repeated(k, q)) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    return scores.masked_fill(~allowed, -torch.inf)


def _repeated(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], 1)
