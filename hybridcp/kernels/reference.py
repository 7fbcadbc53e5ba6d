"""The reference kernel: any device, dtype, head dim and band, in float32 or float64.

Slow and plain on purpose. It works block by block, so its memory is linear in the number of
rows, and it is what the other kernels are tested against.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from hybridcp.kernels.protocol import Partial, PartialGradients, Request, Scores
from hybridcp.masks import Band

_BLOCK_QUERIES = 128
_BLOCK_KEYS = 512


class ReferenceKernel:
    """Attention in plain torch operators; one `Partial` and one `PartialGradients` a band.

    Outputs and gradients come in float32 (float64 for float64 inputs).
    """

    name = "reference"

    def refusal(self, request: Request) -> str | None:
        """Refuses dtypes that are not floating point; everything else is served."""
        if not request.dtype.is_floating_point:
            return f"it needs a floating-point dtype, got {request.dtype}"
        return None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bands: Sequence[Band],
        scores: Scores,
    ) -> Iterator[Partial]:
        """See `AttentionKernel.forward`."""
        for band in bands:
            with _full_precision(q.device.type):
                partial = _band_forward(q, k, v, band, scores)
            yield partial

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        bands: Sequence[Band],
        scores: Scores,
    ) -> Iterator[PartialGradients]:
        """See `AttentionKernel.backward`."""
        for band in bands:
            with _full_precision(q.device.type):
                gradients = _band_backward(dout, q, k, v, out, lse, band, scores)
            yield gradients


def _band_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band, scores: Scores
) -> Partial:
    batch, _, heads, _ = q.shape
    dtype = _compute_dtype(q)
    grouped = (k.shape[2], heads // k.shape[2])
    out = q.new_zeros((batch, *grouped, band.q_len, v.shape[3]), dtype=dtype)
    lse = q.new_full((batch, *grouped, band.q_len), -torch.inf, dtype=dtype)
    for block in _blocks(band):
        s = _masked_scores(q, k, block, scores)
        block_out = torch.einsum("bkgqs,bskd->bkgqd", s.softmax(-1), _keys(v, block, dtype))
        block_lse = s.logsumexp(-1)
        rows = slice(block.q0 - band.q0, block.q1 - band.q0)
        merged = torch.logaddexp(lse[..., rows], block_lse)
        kept = (lse[..., rows] - merged).exp()
        added = (block_lse - merged).exp()
        out[..., rows, :] = out[..., rows, :] * kept[..., None] + block_out * added[..., None]
        lse[..., rows] = merged
    return Partial(
        rows=slice(band.q0, band.q1),
        out=out.flatten(1, 2).transpose(1, 2),
        lse=lse.flatten(1, 2),
    )


def _band_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    band: Band,
    scores: Scores,
) -> PartialGradients:
    dtype = _compute_dtype(q)
    kv_heads = k.shape[2]
    dq = q.new_zeros((q.shape[0], band.q_len, *q.shape[2:]), dtype=dtype)
    dk = k.new_zeros((k.shape[0], band.k_len, *k.shape[2:]), dtype=dtype)
    dv = v.new_zeros((v.shape[0], band.k_len, *v.shape[2:]), dtype=dtype)
    for block in _blocks(band):
        q_BQKGD = _queries(q, kv_heads, block, dtype)
        dout_BQKGD = _queries(dout, kv_heads, block, dtype)
        out_BQKGD = _queries(out, kv_heads, block, dtype)
        k_BSKD, v_BSKD = _keys(k, block, dtype), _keys(v, block, dtype)
        lse_BHQ = lse[:, :, block.q0 : block.q1].to(dtype)
        lse_BKGQ = lse_BHQ.reshape(q.shape[0], kv_heads, -1, block.q_len)
        delta_BKGQ = (dout_BQKGD * out_BQKGD).sum(-1).permute(0, 2, 3, 1)

        s = _masked_scores(q, k, block, scores)
        p = (s - lse_BKGQ[..., None]).exp()
        dp = torch.einsum("bqkgd,bskd->bkgqs", dout_BQKGD, v_BSKD)
        ds = p * (dp - delta_BKGQ[..., None]) * scores.softmax_scale
        if scores.softcap:
            # d tanh = 1 - tanh²; where masked, p is 0 and the score -inf.
            ds *= 1 - (s / scores.softcap).masked_fill(s == -torch.inf, 0).square()

        q_rows = slice(block.q0 - band.q0, block.q1 - band.q0)
        k_rows = slice(block.k0 - band.k0, block.k1 - band.k0)
        dq[:, q_rows] += torch.einsum("bkgqs,bskd->bqkgd", ds, k_BSKD).flatten(2, 3)
        dk[:, k_rows] += torch.einsum("bkgqs,bqkgd->bskd", ds, q_BQKGD)
        dv[:, k_rows] += torch.einsum("bkgqs,bqkgd->bskd", p, dout_BQKGD)
    return PartialGradients(slice(band.q0, band.q1), slice(band.k0, band.k1), dq, dk, dv)


def _blocks(band: Band) -> Iterator[Band]:
    """The band cut into trimmed blocks of bounded size, so in each every query has a key."""
    for q0 in range(band.q0, band.q1, _BLOCK_QUERIES):
        strip = band.intersect(Band(q0, q0 + _BLOCK_QUERIES, band.k0, band.k1))
        if strip is None:
            continue
        for k0 in range(strip.k0, strip.k1, _BLOCK_KEYS):
            block = strip.intersect(Band(strip.q0, strip.q1, k0, k0 + _BLOCK_KEYS))
            if block is not None:
                yield block


def _masked_scores(q: torch.Tensor, k: torch.Tensor, block: Band, scores: Scores) -> torch.Tensor:
    """Scores of a block, (B, K, H / K, queries, keys); -inf where not allowed."""
    dtype = _compute_dtype(q)
    q_BQKGD = _queries(q, k.shape[2], block, dtype)
    s = torch.einsum("bqkgd,bskd->bkgqs", q_BQKGD, _keys(k, block, dtype)) * scores.softmax_scale
    if scores.softcap:
        s = scores.softcap * torch.tanh(s / scores.softcap)
    if not (block.has_lo or block.has_hi):
        return s
    queries = torch.arange(block.q0, block.q1, device=q.device)
    keys = torch.arange(block.k0, block.k1, device=q.device)
    distance = keys - queries[:, None]
    return s.masked_fill((distance < block.lo) | (distance > block.hi), -torch.inf)


def _queries(x: torch.Tensor, kv_heads: int, block: Band, dtype: torch.dtype) -> torch.Tensor:
    """The block's query rows of a (B, S, H, D) tensor as (B, queries, K, H / K, D)."""
    rows = x[:, block.q0 : block.q1].to(dtype)
    return rows.reshape(*rows.shape[:2], kv_heads, -1, rows.shape[3])


def _keys(x: torch.Tensor, block: Band, dtype: torch.dtype) -> torch.Tensor:
    return x[:, block.k0 : block.k1].to(dtype)


def _compute_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _full_precision(device_type: str) -> AbstractContextManager[object]:
    """Autocast off: it would silently turn the float32 products into 16-bit ones."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
