"""The CPU kernel: torch's CPU flash operator on the tiles of a band."""

from collections.abc import Iterator, Sequence

import torch

from hybridcp.kernels.cpu_tiles import Tile, tiles
from hybridcp.kernels.padding import pad_to_one_dim
from hybridcp.kernels.protocol import Partial, PartialGradients, Request, Scores
from hybridcp.masks import Band

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CpuKernel:
    """`aten::_scaled_dot_product_flash_attention_for_cpu`; outputs in the input's dtype.

    Grouped key/value heads are native to the operator. float16 works but is very slow on CPUs
    without float16 arithmetic.
    """

    name = "cpu"

    def refusal(self, request: Request) -> str | None:
        """Refuses other devices and dtypes the operator has no code for."""
        if request.device_type != "cpu":
            return f"it runs on the CPU only, got device {request.device_type!r}"
        if request.dtype not in _DTYPES:
            return f"it supports float64, float32, bfloat16 and float16, got {request.dtype}"
        if request.softcap:
            return "it has no softcap"
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
        value_dim = v.shape[-1]
        q, k, v = pad_to_one_dim(q, k, v)
        for tile in tiles(bands):
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _query_batch(q, tile),
                _key_batch(k, tile),
                _key_batch(v, tile),
                0.0,
                tile.form != "full",
                scale=scores.softmax_scale,
            )
            yield Partial(
                rows=tile.q_rows,
                out=_rows(out, tile)[..., :value_dim],
                lse=_rows(lse, tile).transpose(1, 2),
            )

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
        head_dim, value_dim = q.shape[-1], v.shape[-1]
        dout, out = dout.to(q.dtype), out.to(q.dtype)
        dout, q, k, v, out = pad_to_one_dim(dout, q, k, v, out)
        lse_BSH = lse.to(torch.promote_types(q.dtype, torch.float32)).transpose(1, 2)
        for tile in tiles(bands):
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _query_batch(dout, tile),
                _query_batch(q, tile),
                _key_batch(k, tile),
                _key_batch(v, tile),
                _query_batch(out, tile),
                _query_batch(lse_BSH, tile),
                0.0,
                tile.form != "full",
                scale=scores.softmax_scale,
            )
            yield PartialGradients(
                q_rows=tile.q_rows,
                k_rows=tile.k_rows,
                dq=_rows(dq, tile)[..., :head_dim],
                dk=_rows(dk, tile)[..., :head_dim],
                dv=_rows(dv, tile)[..., :value_dim],
            )


def _query_batch(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The tile's query rows of (B, S, H, ...) as (B * copies, H, q_len, ...)."""
    return _batch(x[:, tile.q_rows], tile.q_len, tile)


def _key_batch(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The tile's key rows of (B, S, K, ...) as (B * copies, K, k_len, ...)."""
    return _batch(x[:, tile.k_rows], tile.k_len, tile)


def _batch(x: torch.Tensor, length: int, tile: Tile) -> torch.Tensor:
    if tile.copies > 1:
        x = x.reshape(x.shape[0] * tile.copies, length, *x.shape[2:])
    if tile.form == "flipped":
        x = x.flip(1)
    return x.transpose(1, 2)


def _rows(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """(B * copies, H, length, ...) as (B, copies * length, H, ...): undoes `_batch`."""
    x = x.transpose(1, 2)
    if tile.form == "flipped":
        x = x.flip(1)
    if tile.copies > 1:
        x = x.reshape(x.shape[0] // tile.copies, tile.copies * x.shape[1], *x.shape[2:])
    return x
