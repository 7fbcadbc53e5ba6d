"""Forward and backward of the three stages as `torch.library` operators.

As operators they are opaque to torch.compile (no graph break) and to selective activation
checkpointing, which can keep the results of `ring_attention` rather than pay for it twice. The
sequence, with its groups and schedule, is an argument like any other: nothing is looked up.
"""

from typing import Any

import torch
from torch import Tensor
from torch._library.opaque_object import MemberType, register_opaque_type

from hybridcp.attention.exchange import ring_pass, ring_pass_backward
from hybridcp.attention.heads import HeadSplit
from hybridcp.attention.inputs import check_rows
from hybridcp.attention.online_softmax import accumulator_dtype
from hybridcp.attention.ulysses import (
    gather_seq_scatter_heads,
    gather_seq_scatter_heads_qkv,
    scatter_seq_gather_heads,
    scatter_seq_gather_heads_qkv,
)
from hybridcp.sequence import ShardedSequence

# A compiled graph takes the sequence as an input: another mask or batch of documents of the same
# shape runs the same graph. What output shapes depend on is guarded.
register_opaque_type(
    ShardedSequence,
    typ="reference",
    guard_fn=lambda seq: [
        seq.local_len,
        seq.ring_len,
        seq.kept_len,
        seq.layout,
        seq.groups.ulysses.rank,
    ],
    members={
        name: MemberType.USE_REAL
        for name in ("layout", "groups", "local_len", "ring_len", "kept_len")
    },
)


@torch.library.custom_op("hybridcp::qkv_to_heads", mutates_args=())
def qkv_to_heads(q: Tensor, k: Tensor, v: Tensor, seq: ShardedSequence) -> tuple[Tensor, Tensor]:
    """q, k, v as sequence shards → q (B, S, h, D) and a flat key/value block as head shards."""
    check_rows(q, seq.local_len, seq)
    split = HeadSplit(seq.layout, q.size(2), k.size(2))
    return gather_seq_scatter_heads_qkv(q, k, v, split, seq.rank_lens, seq.groups.ulysses)


@qkv_to_heads.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, seq: ShardedSequence) -> tuple[Tensor, Tensor]:
    split = HeadSplit(seq.layout, q.size(2), k.size(2))
    me = seq.groups.ulysses.rank
    q_heads = q.new_empty((q.size(0), seq.ring_len, len(split.q_ranges[me]), q.size(3)))
    row = k.size(0) * len(split.kv_ranges[me]) * (k.size(3) + v.size(3))
    return q_heads, k.new_empty(seq.ring_len * row)


@torch.library.custom_op("hybridcp::qkv_from_heads", mutates_args=())
def qkv_from_heads(
    dq: Tensor, dkv: Tensor, seq: ShardedSequence, heads: int, kv_heads: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of `qkv_to_heads`."""
    split = HeadSplit(seq.layout, heads, kv_heads)
    return scatter_seq_gather_heads_qkv(
        dq, dkv, split, value_dim, seq.rank_lens, seq.groups.ulysses
    )


@qkv_from_heads.register_fake
def _(
    dq: Tensor, dkv: Tensor, seq: ShardedSequence, heads: int, kv_heads: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (dq.size(0), seq.local_len)
    return (
        dq.new_empty((*shape, heads, dq.size(3))),
        dq.new_empty((*shape, kv_heads, dq.size(3))),
        dq.new_empty((*shape, kv_heads, value_dim)),
    )


def _save_qkv_to_heads(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, ctx.seq = inputs
    ctx.sizes = (q.size(2), k.size(2), v.size(3))


def _qkv_to_heads_backward(ctx: Any, dq: Tensor, dkv: Tensor) -> tuple[Tensor | None, ...]:
    return *qkv_from_heads(dq, dkv, ctx.seq, *ctx.sizes), None


qkv_to_heads.register_autograd(_qkv_to_heads_backward, setup_context=_save_qkv_to_heads)


@torch.library.custom_op("hybridcp::heads_to_sequence", mutates_args=())
def heads_to_sequence(x: Tensor, seq: ShardedSequence, heads: int) -> Tensor:
    """Head shard (B, S, h, D) → sequence shard (B, L, heads, D)."""
    split = HeadSplit(seq.layout, heads, heads)
    return scatter_seq_gather_heads(x, split, seq.rank_lens, seq.groups.ulysses)


@heads_to_sequence.register_fake
def _(x: Tensor, seq: ShardedSequence, heads: int) -> Tensor:
    return x.new_empty((x.size(0), seq.local_len, heads, x.size(3)))


@torch.library.custom_op("hybridcp::sequence_to_heads", mutates_args=())
def sequence_to_heads(x: Tensor, seq: ShardedSequence) -> Tensor:
    """Sequence shard (B, L, H, D) → head shard (B, S, h, D)."""
    split = HeadSplit(seq.layout, x.size(2), x.size(2))
    return gather_seq_scatter_heads(x, split, seq.rank_lens, seq.groups.ulysses)


@sequence_to_heads.register_fake
def _(x: Tensor, seq: ShardedSequence) -> Tensor:
    split = HeadSplit(seq.layout, x.size(2), x.size(2))
    heads = len(split.q_ranges[seq.groups.ulysses.rank])
    return x.new_empty((x.size(0), seq.ring_len, heads, x.size(3)))


def _save_seq(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.seq, _ = inputs


heads_to_sequence.register_autograd(
    lambda ctx, dx: (sequence_to_heads(dx, ctx.seq), None, None), setup_context=_save_seq
)


@torch.library.custom_op("hybridcp::ring_attention", mutates_args=())
def ring_attention(
    q: Tensor,
    kv: Tensor,
    sinks: Tensor | None,
    seq: ShardedSequence,
    kernel: str,
    heads: int,
    kv_heads: int,
    value_dim: int,
    softmax_scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of this ring position's queries over the whole sequence.

    Args:
        q: (B, S, h, D).
        kv: flat block of this position's keys and values.
        sinks: (H,) of all ranks' heads, or None.
        seq: the sequence: schedule and groups.
        kernel: a kernel's name or "auto".
        heads: H of all ranks.
        kv_heads: K of all ranks.
        value_dim: Dv.
        softmax_scale: factor of q · k.
        softcap: 0 for none.

    Returns:
        out (B, S, h, Dv), lse (B, h, S), and the block that the backward starts from (empty if
        that is `kv`).
    """
    check_rows(q, seq.ring_len, seq)
    return ring_pass(q, kv, sinks, seq, kernel, heads, kv_heads, value_dim, softmax_scale, softcap)


@ring_attention.register_fake
def _(
    q: Tensor,
    kv: Tensor,
    sinks: Tensor | None,
    seq: ShardedSequence,
    kernel: str,
    heads: int,
    kv_heads: int,
    value_dim: int,
    softmax_scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, rows, local_heads, head_dim = q.shape
    split = HeadSplit(seq.layout, heads, kv_heads)
    row = batch * len(split.kv_ranges[seq.groups.ulysses.rank]) * (head_dim + value_dim)
    return (
        q.new_empty((batch, rows, local_heads, value_dim)),
        q.new_empty((batch, local_heads, rows), dtype=accumulator_dtype(q.dtype)),
        kv.new_empty(seq.kept_len * row),
    )


@torch.library.custom_op("hybridcp::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    sinks: Tensor | None,
    kept: Tensor,
    out: Tensor,
    lse: Tensor,
    seq: ShardedSequence,
    kernel: str,
    heads: int,
    kv_heads: int,
    value_dim: int,
    softmax_scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `ring_attention`'s `out` for q, kv and sinks (empty without sinks)."""
    return ring_pass_backward(
        dout,
        q,
        kv,
        sinks,
        kept,
        out,
        lse,
        seq,
        kernel,
        heads,
        kv_heads,
        value_dim,
        softmax_scale,
        softcap,
    )


@ring_attention_backward.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    sinks: Tensor | None,
    kept: Tensor,
    out: Tensor,
    lse: Tensor,
    seq: ShardedSequence,
    kernel: str,
    heads: int,
    kv_heads: int,
    value_dim: int,
    softmax_scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), kv.new_empty(kv.shape), dsinks


def _save_ring_attention(ctx: Any, inputs: Any, output: Any) -> None:
    q, kv, sinks, *ctx.constants = inputs
    out, lse, kept = output
    ctx.save_for_backward(q, kv, sinks, kept, out, lse)
    ctx.mark_non_differentiable(lse, kept)


def _ring_attention_backward(ctx: Any, dout: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    q, kv, sinks, kept, out, lse = ctx.saved_tensors
    dq, dkv, dsinks = ring_attention_backward(dout, q, kv, sinks, kept, out, lse, *ctx.constants)
    return dq, dkv, None if sinks is None else dsinks, *(None for _ in ctx.constants)


ring_attention.register_autograd(_ring_attention_backward, setup_context=_save_ring_attention)
