"""Bands as flash-attn calls: dense for one band, varlen for several that share a window.

Shared by the kernels that take flash-attn's arguments. Besides grouping it does what both need:
head dims padded to a multiple of 8, rows packed and unpacked, log-sum-exps checked.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch

from hybridcp.errors import KernelError
from hybridcp.kernels.padding import pad_to_one_dim
from hybridcp.kernels.protocol import Partial, PartialGradients, Request, Rows, Scores
from hybridcp.masks import Band

MAX_HEAD_DIM = 256
_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Varlen:
    """The sequences of a varlen call, as flash-attn names them; `cu_seqlens` are int32."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class FlashBackend(Protocol):
    """A pair of flash functions; head dims are multiples of 8, windows bottom-right aligned.

    Without `varlen`, tensors are (B, S, H, D) and log-sum-exps (B, H, S); with it they are
    (rows, H, D) and (H, rows).
    """

    @property
    def name(self) -> str:
        """The kernel name that selects it."""

    @property
    def label(self) -> str:
        """The library and its version, for messages."""

    def refusal(self, request: Request) -> str | None:
        """Why it cannot serve the request here, or None if it can."""

    def call_forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scores: Scores,
        window: tuple[int, int],
        varlen: Varlen | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (out, lse)."""

    def call_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scores: Scores,
        window: tuple[int, int],
        varlen: Varlen | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns (dq, dk, dv) in the shapes of q, k, v."""


def flash_refusal(request: Request) -> str | None:
    """What flash-attn 2 cannot do anywhere, and what this machine lacks; None if neither."""
    if request.device_type != "cuda":
        return f"it needs a CUDA device, got device {request.device_type!r}"
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"it supports float16 and bfloat16, got {request.dtype}"
    largest = max(request.head_dim, request.value_head_dim)
    if largest > MAX_HEAD_DIM:
        return f"it supports head dims up to {MAX_HEAD_DIM}, got {largest}"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"it needs compute capability 8.0 (Ampere) or newer, this GPU has {major}.{minor}"
    return None


def group_bands(bands: Iterable[Band]) -> list[list[Band]]:
    """Trimmed bands in groups, each of which is one flash-attn call.

    The bands of a group have one window and ascending, disjoint query and key ranges. The
    result depends on the bands and their order only.
    """
    groups: list[list[Band]] = []
    by_window: dict[tuple[int, int], list[list[Band]]] = {}
    pieces = (piece for band in bands for piece in _within_window_limits(band))
    for band in sorted(pieces):
        same_window = by_window.setdefault(band.flash_window, [])
        for group in same_window:
            if group[-1].q1 <= band.q0 and group[-1].k1 <= band.k0:
                group.append(band)
                break
        else:
            same_window.append([band])
            groups.append(same_window[-1])
    return groups


def _within_window_limits(band: Band) -> Iterator[Band]:
    """The band, cut by rows where flash-attn would read its window wrongly.

    flash-attn takes a side of the window that reaches over all keys, or that is -1 beside a
    bounded one, as "number of keys" counted from the bottom-right corner (`mha_fwd` and
    `set_params_fprop` in its flash_api.cpp). On the right that hides keys from the first
    queries, or shows them too many, where there are many more queries than keys.
    """
    _, right = band.flash_window
    is_read_right = right < band.k_len if band.has_hi else band.q_len <= band.k_len + 1
    if is_read_right or not (band.has_lo or band.has_hi):
        yield band
        return
    hi_cuts_until = band.k1 - 1 - band.hi if band.has_hi else band.q0
    lo_cuts_from = band.k0 - band.lo + 1 if band.has_lo else band.q1
    for q0, q1 in pairwise(sorted((band.q0, hi_cuts_until, lo_cuts_from, band.q1))):
        piece = band.intersect(Band(q0, q1, band.k0, band.k1))
        if piece is not None:
            yield piece


def flash_forward(
    backend: FlashBackend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bands: Sequence[Band],
    scores: Scores,
) -> Iterator[Partial]:
    """`AttentionKernel.forward` by calls of a flash backend, one a group of bands.

    Raises:
        KernelError: more rows than int32 counts, or a log-sum-exp of an unknown layout.
    """
    value_dim = v.shape[-1]
    q, k, v = pad_to_one_dim(q, k, v, multiple=8)
    for group in group_bands(bands):
        call = _Call.of(group, q)
        out, lse = backend.call_forward(
            call.pack_q(q),
            call.pack_k(k),
            call.pack_k(v),
            scores,
            call.window,
            call.varlen,
        )
        yield Partial(
            rows=call.q_rows,
            out=call.unpack(out)[..., :value_dim],
            lse=call.unpack_lse(lse, backend.label),
        )


def flash_backward(
    backend: FlashBackend,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bands: Sequence[Band],
    scores: Scores,
) -> Iterator[PartialGradients]:
    """`AttentionKernel.backward` by calls of a flash backend, one a group of bands.

    Raises:
        KernelError: more rows than int32 counts.
    """
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    dout, out = dout.to(q.dtype), out.to(q.dtype)
    dout, q, k, v, out = pad_to_one_dim(dout, q, k, v, out, multiple=8)
    for group in group_bands(bands):
        call = _Call.of(group, q)
        dq, dk, dv = backend.call_backward(
            call.pack_q(dout),
            call.pack_q(q),
            call.pack_k(k),
            call.pack_k(v),
            call.pack_q(out),
            call.pack_lse(lse),
            scores,
            call.window,
            call.varlen,
        )
        yield PartialGradients(
            q_rows=call.q_rows,
            k_rows=call.k_rows,
            dq=call.unpack(dq)[..., :head_dim],
            dk=call.unpack(dk)[..., :head_dim],
            dv=call.unpack(dv)[..., :value_dim],
        )


@dataclass(frozen=True, slots=True)
class _Call:
    """One flash call: which rows it takes, its window, and how rows are packed for it."""

    q_rows: Rows
    k_rows: Rows
    window: tuple[int, int]
    varlen: Varlen | None
    lse_shape: tuple[int, ...]
    batch: int

    @classmethod
    def of(cls, group: Sequence[Band], q: torch.Tensor) -> "_Call":
        """The call for a group of `group_bands`; `q` gives batch, heads and device."""
        batch, heads = q.shape[0], q.shape[2]
        q_spans = [(band.q0, band.q1) for band in group]
        k_spans = [(band.k0, band.k1) for band in group]
        q_lengths = [band.q_len for band in group] * batch
        k_lengths = [band.k_len for band in group] * batch
        rows = max(sum(q_lengths), sum(k_lengths))
        if rows > _MAX_INT32:
            raise KernelError(
                f"one flash-attn call cannot take {rows} rows: it counts them in int32, up to "
                f"{_MAX_INT32}; use a smaller batch or more context-parallel ranks"
            )
        varlen = None
        lse_shape: tuple[int, ...] = (batch, heads, sum(q_lengths) // batch)
        if len(group) > 1:
            varlen = Varlen(
                _cu_seqlens(q_lengths, q.device),
                _cu_seqlens(k_lengths, q.device),
                max(q_lengths),
                max(k_lengths),
            )
            lse_shape = (heads, sum(q_lengths))
        return cls(
            q_rows=_rows(q_spans, q.device),
            k_rows=_rows(k_spans, q.device),
            window=group[0].flash_window,
            varlen=varlen,
            lse_shape=lse_shape,
            batch=batch,
        )

    def pack_q(self, x: torch.Tensor) -> torch.Tensor:
        """Query rows of (B, S, ...), as (B, rows, ...) or packed as (B * rows, ...)."""
        return self._pack(x[:, self.q_rows])

    def pack_k(self, x: torch.Tensor) -> torch.Tensor:
        """Key rows of (B, S, ...), as (B, rows, ...) or packed as (B * rows, ...)."""
        return self._pack(x[:, self.k_rows])

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.varlen is None else x.flatten(0, 1)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of the call as (B, rows, ...)."""
        return x if self.varlen is None else x.reshape(self.batch, -1, *x.shape[1:])

    def pack_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """Rows of (B, H, S) as the call takes them: (B, H, rows) or (H, B * rows)."""
        lse = lse[:, :, self.q_rows].to(torch.float32)
        if self.varlen is not None:
            lse = lse.transpose(0, 1).flatten(1, 2)
        return lse.contiguous()

    def unpack_lse(self, lse: torch.Tensor, label: str) -> torch.Tensor:
        """What the call returned as (B, H, rows), if it has the one layout that is known."""
        if tuple(lse.shape) != self.lse_shape or lse.dtype != torch.float32:
            raise KernelError(
                f"{label} returned a log-sum-exp of shape {tuple(lse.shape)} and {lse.dtype}, "
                f"expected {self.lse_shape} and torch.float32; use another kernel or a version "
                f"that returns it in this layout"
            )
        if self.varlen is None:
            return lse
        return lse.reshape(lse.shape[0], self.batch, -1).transpose(0, 1)


def _cu_seqlens(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def _rows(spans: Sequence[tuple[int, int]], device: torch.device) -> Rows:
    """A slice where the spans follow each other: then packing needs no copy of a batch of 1."""
    if all(before[1] == after[0] for before, after in pairwise(spans)):
        return slice(spans[0][0], spans[-1][1])
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in spans])
