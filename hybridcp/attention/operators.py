"""Forward and backward of the three stages as `torch.library` operators.

As operators they are opaque to torch.compile (no graph break) and to selective activation
checkpointing, which can keep the results of `ring_attention` rather than pay for it twice. The
sequence, with its groups and schedule, is an argument like any other: nothing is looked up.
"""

from typing import Any

import torch
from torch import Tensor
from torch._library.opaque_object import MemberType, register_opaque_type

from hybridcp.attention.heads import HeadSplit
from hybridcp.attention.inputs import check_rows
from hybridcp.attention.online_softmax import accumulator_dtype
from hybridcp.attention.ring import BlockAttention, ring_backward, ring_forward
from hybridcp.attention.ulysses import (
    gather_seq_scatter_heads,
    gather_seq_scatter_heads_qkv,
    scatter_seq_gather_heads,
    scatter_seq_gather_heads_qkv,
)
from hybridcp.kernels.protocol import Request
from hybridcp.kernels.registry import select_kernel
from hybridcp.sequence import ShardedSequence

# A compiled graph takes the sequence as an input: another mask or batch of documents of the same
# shape runs the same graph. What output shapes depend on is guarded.
register_opaque_type(
    ShardedSequence,
    typ="reference",
    guard_fn=lambda seq: [seq.local_len, seq.ring_len, seq.layout, seq.groups.ulysses.rank],
    members={
        name: MemberType.USE_REAL
        for name in ("layout", "groups", "local_len", "ring_len", "rank_lens", "ring_lens")
    },
)


@torch.library.custom_op("hybridcp::qkv_to_heads", mutates_args=())
def qkv_to_heads(q: Tensor, k: Tensor, v: Tensor, seq: ShardedSequence) -> tuple[Tensor, Tensor]:
    """q, k, v as sequence shards → q (B, S, h, D) and kv (2, B, S, n, D) as head shards."""
    check_rows(q, seq.local_len, seq)
    split = HeadSplit(seq.layout, q.size(2), k.size(2))
    return gather_seq_scatter_heads_qkv(q, k, v, split, seq.rank_lens, seq.groups.ulysses)


@qkv_to_heads.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, seq: ShardedSequence) -> tuple[Tensor, Tensor]:
    split = HeadSplit(seq.layout, q.size(2), k.size(2))
    kv_heads = len(split.kv_ranges[seq.groups.ulysses.rank])
    q_heads = q.new_empty((q.size(0), seq.ring_len, split.heads_per_rank, q.size(3)))
    return q_heads, k.new_empty((2, k.size(0), seq.ring_len, kv_heads, k.size(3)))


@torch.library.custom_op("hybridcp::qkv_from_heads", mutates_args=())
def qkv_from_heads(
    dq: Tensor, dkv: Tensor, seq: ShardedSequence, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of `qkv_to_heads`."""
    split = HeadSplit(seq.layout, heads, kv_heads)
    return scatter_seq_gather_heads_qkv(dq, dkv, split, seq.rank_lens, seq.groups.ulysses)


@qkv_from_heads.register_fake
def _(
    dq: Tensor, dkv: Tensor, seq: ShardedSequence, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (dq.size(0), seq.local_len)
    dk = dkv.new_empty((*shape, kv_heads, dkv.size(4)))
    return dq.new_empty((*shape, heads, dq.size(3))), dk, torch.empty_like(dk)


def _save_qkv_to_heads(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, _, ctx.seq = inputs
    ctx.heads, ctx.kv_heads = q.size(2), k.size(2)


def _qkv_to_heads_backward(ctx: Any, dq: Tensor, dkv: Tensor) -> tuple[Tensor | None, ...]:
    return *qkv_from_heads(dq, dkv, ctx.seq, ctx.heads, ctx.kv_heads), None


qkv_to_heads.register_autograd(_qkv_to_heads_backward, setup_context=_save_qkv_to_heads)


@torch.library.custom_op("hybridcp::heads_to_sequence", mutates_args=())
def heads_to_sequence(x: Tensor, seq: ShardedSequence) -> Tensor:
    """Head shard (B, S, h, D) → sequence shard (B, L, H, D)."""
    return scatter_seq_gather_heads(x, seq.rank_lens, seq.groups.ulysses)


@heads_to_sequence.register_fake
def _(x: Tensor, seq: ShardedSequence) -> Tensor:
    heads = x.size(2) * seq.layout.ulysses_degree
    return x.new_empty((x.size(0), seq.local_len, heads, x.size(3)))


@torch.library.custom_op("hybridcp::sequence_to_heads", mutates_args=())
def sequence_to_heads(x: Tensor, seq: ShardedSequence) -> Tensor:
    """Sequence shard (B, L, H, D) → head shard (B, S, h, D)."""
    return gather_seq_scatter_heads(x, seq.rank_lens, seq.groups.ulysses)


@sequence_to_heads.register_fake
def _(x: Tensor, seq: ShardedSequence) -> Tensor:
    heads = x.size(2) // seq.layout.ulysses_degree
    return x.new_empty((x.size(0), seq.ring_len, heads, x.size(3)))


def _save_seq(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.seq = inputs


heads_to_sequence.register_autograd(
    lambda ctx, dx: (sequence_to_heads(dx, ctx.seq), None), setup_context=_save_seq
)


@torch.library.custom_op("hybridcp::ring_attention", mutates_args=())
def ring_attention(
    q: Tensor,
    kv: Tensor,
    seq: ShardedSequence,
    kernel: str,
    heads: int,
    kv_heads: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of this ring position's queries over the whole sequence.

    Args:
        q: (B, S, h, D).
        kv: (2, B, S, n, D), contiguous.
        seq: the sequence: schedule and groups.
        kernel: a kernel's name or "auto".
        heads: H of all ranks.
        kv_heads: K of all ranks.
        softmax_scale: factor of q · k.

    Returns:
        out (B, S, h, D), lse (B, h, S), and the key/value block that arrived last.
    """
    check_rows(q, seq.ring_len, seq)
    attention = _block_attention(q, seq, kernel, heads, kv_heads, softmax_scale)
    return ring_forward(q, kv, seq.forward_steps, seq.ring_lens, seq.groups.ring, attention)


@ring_attention.register_fake
def _(
    q: Tensor,
    kv: Tensor,
    seq: ShardedSequence,
    kernel: str,
    heads: int,
    kv_heads: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, rows, local_heads, _ = q.shape
    lse = q.new_empty((batch, local_heads, rows), dtype=accumulator_dtype(q.dtype))
    out = q.new_empty((*q.shape[:3], kv.size(4)))
    if seq.layout.ring_degree == 1:
        return out, lse, kv.new_empty(0)
    # Blocks move forward, so the last to arrive is that of the position after this one.
    last_owner = (seq.groups.ring.rank + 1) % seq.layout.ring_degree
    return out, lse, kv.new_empty((2, batch, seq.ring_lens[last_owner], kv.size(3), kv.size(4)))


@torch.library.custom_op("hybridcp::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    last: Tensor,
    out: Tensor,
    lse: Tensor,
    seq: ShardedSequence,
    kernel: str,
    heads: int,
    kv_heads: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of `ring_attention`'s `out` for q and kv."""
    attention = _block_attention(q, seq, kernel, heads, kv_heads, softmax_scale)
    return ring_backward(
        dout, q, kv, last, out, lse, seq.backward_steps, seq.ring_lens, seq.groups.ring, attention
    )


@ring_attention_backward.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    last: Tensor,
    out: Tensor,
    lse: Tensor,
    seq: ShardedSequence,
    kernel: str,
    heads: int,
    kv_heads: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), kv.new_empty(kv.shape)


def _save_ring_attention(ctx: Any, inputs: Any, output: Any) -> None:
    q, kv, *ctx.constants = inputs
    out, lse, last = output
    ctx.save_for_backward(q, kv, last, out, lse)
    ctx.mark_non_differentiable(lse, last)


def _ring_attention_backward(ctx: Any, dout: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    q, kv, last, out, lse = ctx.saved_tensors
    dq, dkv = ring_attention_backward(dout, q, kv, last, out, lse, *ctx.constants)
    return dq, dkv, *(None for _ in ctx.constants)


ring_attention.register_autograd(_ring_attention_backward, setup_context=_save_ring_attention)


def _block_attention(
    q: Tensor, seq: ShardedSequence, kernel: str, heads: int, kv_heads: int, softmax_scale: float
) -> BlockAttention:
    split = HeadSplit(seq.layout, heads, kv_heads)
    request = Request(q.device.type, q.dtype, q.size(-1))
    return BlockAttention(
        kernel=select_kernel(kernel, request).kernel,
        softmax_scale=softmax_scale,
        kv_index=split.kernel_kv_heads(seq.groups.ulysses.rank),
    )
