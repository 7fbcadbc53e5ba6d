"""Backward of the ring exchange: blocks go from position to position, their gradients behind.

Each block's backward gets the global output and log-sum-exp, so the gradients of blocks add up to
the exact ones (FlashAttention-2, arXiv 2307.08691, algorithm 2). Shapes and blocks as in
`forward`.
"""

from collections.abc import Sequence

import torch

from hybridcp.attention.block import BlockAttention
from hybridcp.attention.forward import start_exchange
from hybridcp.attention.online_softmax import accumulator_dtype
from hybridcp.distributed import GRADIENT_TAG, KV_TAG, Communicator, Exchange
from hybridcp.schedule import Step


def ring_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    last: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    steps: Sequence[Step],
    ring: Communicator,
    attention: BlockAttention,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `forward_pass` where blocks are passed on.

    Blocks move against the forward direction, each followed by its gradient in float32, which
    every position adds to and the owner receives last.

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
    present = last
    dblock = arriving_gradient = None
    gradient_exchange = Exchange(())
    for step in steps:
        arriving, exchange = start_exchange(ring, shape, present, step.send, step.receive, KV_TAG)
        dblock = torch.zeros_like(present, dtype=dtype)
        attention.backward(dout, q, present, out, lse, step, dq, dblock)
        exchange.wait()
        gradient_exchange.wait()
        if arriving_gradient is not None:
            dblock += arriving_gradient
        arriving_gradient, gradient_exchange = start_exchange(
            ring, shape, dblock, step.send_gradient, step.receive_gradient, GRADIENT_TAG
        )
        present = kv if arriving is None else arriving
    assert dblock is not None
    return dq, dblock
