"""Backward of the direct exchange: rows come again, their gradients go straight to the owner.

A sliding window costs a halo, packed documents only what crosses a shard's edge, and positions
with nothing in common nothing. Shapes and blocks as in `forward`.
"""

from collections.abc import Sequence

import torch

from hybridcp.attention.block import BlockAttention
from hybridcp.attention.forward import start_exchange
from hybridcp.attention.online_softmax import accumulator_dtype
from hybridcp.distributed import GRADIENT_TAG, KV_TAG, Communicator, Exchange
from hybridcp.schedule import Step, Transfer


def direct_backward(
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
    """Gradients of `forward_pass` where rows are sent directly; as `ring_backward`.

    Arriving gradients are added to those of own rows in the order of steps.
    """
    shape = attention.shape
    dtype = accumulator_dtype(q.dtype)
    dq = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    dkv = torch.zeros_like(kv, dtype=dtype)
    present = last
    arriving_gradient: torch.Tensor | None = None
    awaited: Transfer | None = None
    gradient_exchange = Exchange(())
    for step in steps:
        arriving, exchange = start_exchange(ring, shape, kv, step.send, step.receive, KV_TAG)
        # The own block comes last; a step without work has no gradient to send.
        own = step is steps[-1] or not step.bands
        dblock = dkv if own else torch.zeros_like(present, dtype=dtype)
        attention.backward(dout, q, present, out, lse, step, dq, dblock)
        exchange.wait()
        gradient_exchange.wait()
        if arriving_gradient is not None and awaited is not None:
            shape.add(dkv, awaited.rows, arriving_gradient)
        awaited = step.receive_gradient
        arriving_gradient, gradient_exchange = start_exchange(
            ring, shape, dblock, step.send_gradient, step.receive_gradient, GRADIENT_TAG
        )
        present = kv if arriving is None else arriving
    return dq, dkv
