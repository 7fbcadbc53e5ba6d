"""One pass over all keys, forward or backward, by the exchange that the layout names."""

import torch
from torch import Tensor

from hybridcp.attention.backward import backward_pass
from hybridcp.attention.block import BlockAttention
from hybridcp.attention.forward import forward_pass
from hybridcp.attention.gathered import gathered_backward, gathered_forward
from hybridcp.attention.heads import HeadSplit
from hybridcp.attention.kv_block import KVShape
from hybridcp.attention.sinks import fold_in_sinks, sink_gradient
from hybridcp.communicator import Communicator
from hybridcp.kernels.protocol import Request, Scores
from hybridcp.kernels.registry import select_kernel
from hybridcp.sequence import ShardedSequence


def ring_pass(
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
    """See `operators.ring_attention`."""
    split = HeadSplit(seq.layout, heads, kv_heads)
    scores = Scores(softmax_scale, softcap)
    attention = _block_attention(q, seq, split, kernel, value_dim, scores)
    ring, kept = seq.groups.ring, kv
    if seq.layout.exchange == "allgather":
        assert isinstance(ring, Communicator)
        (step,) = seq.forward_steps
        running = gathered_forward(q, kv, step, seq.schedule.kv_sharding, ring, attention)
    else:
        running, kept = forward_pass(q, kv, seq.forward_steps, ring, attention)
    if sinks is not None:
        fold_in_sinks(running, _own(sinks, split, seq))
    # An operator's output must not be one of its inputs.
    kept = kept if kept is not kv else kv.new_empty(0)
    return running.out.to(q.dtype), running.lse, kept


def ring_pass_backward(
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
    """See `operators.ring_attention_backward`."""
    split = HeadSplit(seq.layout, heads, kv_heads)
    scores = Scores(softmax_scale, softcap)
    attention = _block_attention(q, seq, split, kernel, value_dim, scores)
    ring, first = seq.groups.ring, kept if kept.numel() else kv
    if seq.layout.exchange == "allgather":
        assert isinstance(ring, Communicator)
        (step,) = seq.backward_steps
        sharding = seq.schedule.kv_sharding
        dq, dkv = gathered_backward(dout, q, kv, out, lse, step, sharding, ring, attention)
    else:
        dq, dkv = backward_pass(dout, q, kv, first, out, lse, seq.backward_steps, ring, attention)
    dsinks = q.new_empty(0)
    if sinks is not None:
        dsinks = torch.zeros_like(sinks)
        _own(dsinks, split, seq).copy_(sink_gradient(dout, out, lse, _own(sinks, split, seq)))
    return dq.to(q.dtype), dkv.to(q.dtype), dsinks


def _own(sinks: Tensor, split: HeadSplit, seq: ShardedSequence) -> Tensor:
    heads = split.q_ranges[seq.groups.ulysses.rank]
    return sinks[heads.start : heads.stop]


def _block_attention(
    q: Tensor,
    seq: ShardedSequence,
    split: HeadSplit,
    kernel: str,
    value_dim: int,
    scores: Scores,
) -> BlockAttention:
    me = seq.groups.ulysses.rank
    dim = q.size(3)
    request = Request(q.device.type, q.dtype, dim, value_dim, scores.softcap > 0)
    return BlockAttention(
        kernel=select_kernel(kernel, request).kernel,
        scores=scores,
        shape=KVShape(q.size(0), len(split.kv_ranges[me]), dim, value_dim),
        kv_index=split.kernel_kv_heads(me),
    )
