"""What `HybridAttention` accepts, checked on every rank before any message is sent."""

import math
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from hybridcp.errors import InputError, LayoutError
from hybridcp.layout import Layout
from hybridcp.sequence import ShardedSequence


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """Keywords of a call that change scores or weights.

    Attributes:
        softmax_scale: None for 1 / sqrt(D).
        softcap: 0 for none.
        sinks: (H,), or None.
        dropout_p: 0 in eval.
    """

    softmax_scale: float | None
    softcap: float
    sinks: torch.Tensor | None
    dropout_p: float

    def in_words(self) -> str:
        """What must be equal on all ranks, for comparing and for showing."""
        with_sinks = "no sinks" if self.sinks is None else f"sinks {self.sinks.dtype}"
        return f"softmax_scale {self.softmax_scale}, softcap {self.softcap}, {with_sinks}"


def check_sequence(seq: ShardedSequence, layout: Layout) -> None:
    """Raise unless `seq` belongs to this layout.

    Raises:
        InputError: `seq` is something else.
        LayoutError: it was cut by another layout.
    """
    if not isinstance(seq, ShardedSequence):
        raise InputError(
            f"seq must be a hybridcp.ShardedSequence, got {type(seq).__name__}; make one with "
            "ShardedSequence(layout, mesh, seq_len=N, mask=hybridcp.causal())"
        )
    if seq.layout != layout:
        raise LayoutError(
            f"the sequence was sharded by {seq.layout!r}, but the module runs {layout!r}; give "
            "both the same layout"
        )


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq: ShardedSequence) -> None:
    """Raise unless q (B, L, H, D), k and v (B, L, K, D) are this rank's shards of `seq`.

    Raises:
        InputError: a wrong type, shape, dtype or device, with the shapes of all three.
        LayoutError: heads that the layout cannot split.
    """
    tensors = {"q": q, "k": k, "v": v}
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise InputError(f"{name} must be a tensor, got {type(x).__name__}")
    shapes = ", ".join(f"{name} {tuple(x.shape)} {x.dtype}" for name, x in tensors.items())
    for name, x in tensors.items():
        if isinstance(x, DTensor):
            raise InputError(f"{name} is a DTensor; pass local tensors, e.g. {name}.to_local()")
        if x.ndim != 4:
            raise InputError(
                f"{name} must be (batch, seq, heads, head_dim), got {x.ndim} dims: {shapes}"
            )
        if x.size(1) != seq.local_len:
            raise InputError(f"{name}{_wrong_rows(x, seq.local_len, seq)}: {shapes}")
    if not q.size(0) == k.size(0) == v.size(0) or k.size(2) != v.size(2):
        raise InputError(f"q, k and v must agree in batch, and k and v in heads: {shapes}")
    if q.size(3) != k.size(3):
        raise InputError(f"q and k must agree in head_dim: {shapes}")
    if min(q.size(0), q.size(3), v.size(3)) < 1:
        raise InputError(f"batch and head_dim must be at least 1: {shapes}")
    if not q.dtype.is_floating_point or not q.dtype == k.dtype == v.dtype:
        raise InputError(f"q, k and v must have one floating-point dtype: {shapes}")
    if not q.device == k.device == v.device:
        devices = ", ".join(f"{name} on {x.device}" for name, x in tensors.items())
        raise InputError(f"q, k and v must be on one device: {devices}")
    seq.layout.check_heads(q.size(2), k.size(2))


def check_rows(q: torch.Tensor, rows: int, seq: ShardedSequence) -> None:
    """Raise unless `q` has as many rows as this rank works on.

    A compiled graph skips the checks above; without this one it would exchange messages of
    different sizes.

    Raises:
        InputError: it has not.
    """
    if q.size(1) != rows:
        raise InputError(f"q{_wrong_rows(q, rows, seq)}")


def _wrong_rows(x: torch.Tensor, rows: int, seq: ShardedSequence) -> str:
    return (
        f" has {x.size(1)} tokens where this rank has {rows} of the sequence's {seq.seq_len}; cut "
        "tensors with seq.shard(x, dim=1)"
    )


def check_options(options: ScoreOptions, q: torch.Tensor) -> None:
    """Raise unless the options can be honoured.

    Raises:
        InputError: a number that is no number, sinks of another shape, or dropout in training.
    """
    if options.softmax_scale is not None and not _is_finite(options.softmax_scale):
        raise InputError(f"softmax_scale must be a finite number, got {options.softmax_scale!r}")
    if not _is_finite(options.softcap) or options.softcap < 0:
        raise InputError(f"softcap must be a finite number ≥ 0, got {options.softcap!r}")
    if options.dropout_p != 0:
        raise InputError(
            f"dropout_p = {options.dropout_p!r}: attention dropout in training is not supported, "
            "since its random mask would depend on the layout; use dropout_p=0 (models for long "
            "sequences are trained without), or dropout outside attention"
        )
    sinks = options.sinks
    if sinks is None:
        return
    if not isinstance(sinks, torch.Tensor) or isinstance(sinks, DTensor):
        raise InputError(f"sinks must be a local tensor, got {type(sinks).__name__}")
    if sinks.shape != (q.size(2),) or sinks.device != q.device or not sinks.is_floating_point():
        raise InputError(
            f"sinks must be one logit for each of the {q.size(2)} query heads, floating point, on "
            f"{q.device}; got {tuple(sinks.shape)} {sinks.dtype} on {sinks.device}"
        )


def _is_finite(value: object) -> bool:
    return isinstance(value, float | int) and math.isfinite(value)
