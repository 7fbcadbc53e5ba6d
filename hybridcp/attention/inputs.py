"""What `HybridAttention` accepts, checked on every rank before any message is sent."""

import math

import torch
from torch.distributed.tensor import DTensor

from hybridcp.errors import InputError, LayoutError
from hybridcp.layout import Layout
from hybridcp.sequence import ShardedSequence


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
    if k.shape != v.shape or q.size(0) != k.size(0) or q.size(3) != k.size(3):
        raise InputError(
            f"q, k and v must agree in batch and head_dim, and k and v in heads: {shapes}"
        )
    if q.size(0) < 1 or q.size(3) < 1:
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


def check_softmax_scale(softmax_scale: float) -> None:
    """Raise unless the scale is a finite number.

    Raises:
        InputError: it is not.
    """
    if not isinstance(softmax_scale, float | int) or not math.isfinite(softmax_scale):
        raise InputError(f"softmax_scale must be a finite number, got {softmax_scale!r}")
