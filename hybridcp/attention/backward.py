"""The backward pass over the schedule: blocks come again, and their gradients go to the owners.

Each block's backward gets the global output and log-sum-exp, so the gradients of blocks add up to
the exact ones (FlashAttention-2, arXiv 2307.08691, algorithm 2). Gradients travel in float32, on
one schedule together with those of the positions that they pass, on another straight to the owner.
Shapes and blocks as in `forward`.
"""

from collections.abc import Sequence

import torch

from hybridcp.attention.block import BlockAttention
from hybridcp.attention.forward import present_block, with_sources
from hybridcp.attention.in_flight import InFlight
from hybridcp.attention.online_softmax import accumulator_dtype
from hybridcp.communicator import GRADIENT_TAG, KV_TAG, RingCommunicator
from hybridcp.steps import Step


def backward_pass(
    dout: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    last: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    steps: Sequence[Step],
    ring: RingCommunicator,
    attention: BlockAttention,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `forward_pass`. All sums are made in the order of the schedule.

    Args:
        dout: (B, S, h, Dv).
        q, kv, out, lse, last: inputs and results of `forward_pass`.
        steps: `Schedule.backward_steps` of this position.
        ring, attention: as there.

    Returns:
        dq (B, S, h, D) and the gradient of `kv`, both accumulators in float32 (or float64).
    """
    shape = attention.shape
    dtype = accumulator_dtype(q.dtype)
    dq = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    dkv = torch.zeros_like(kv, dtype=dtype)
    blocks = InFlight(ring, shape, KV_TAG)
    gradients = InFlight(ring, shape, GRADIENT_TAG)
    for t, step in enumerate(steps):
        present = present_block(blocks, t, last if t == 0 else kv)
        blocks.start(with_sources(step.sends, ring.rank, kv, present), step.receives, kv)
        own = step.kv_owner == ring.rank
        dblock = dkv if own else None
        if dblock is None and step.bands:
            dblock = torch.zeros_like(present, dtype=dtype)
        if dblock is not None:
            attention.backward(dout, q, present, out, lse, step, dq, dblock)
        for transfer, arrived in gradients.due(t):
            if transfer.owner == ring.rank:
                shape.add(dkv, transfer.rows, arrived)
            elif dblock is None:
                dblock = arrived
            else:
                dblock += arrived
        if dblock is None and step.gradient_sends:
            dblock = torch.zeros_like(present, dtype=dtype)
        going = [] if dblock is None else [(sent, dblock) for sent in step.gradient_sends]
        gradients.start(going, step.gradient_receives, dkv)
    return dq, dkv
