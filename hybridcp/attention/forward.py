"""The forward pass over the schedule: blocks arrive, partial results are merged.

The loop is the schedule's: it decides nothing. The block for the next step is in flight while
this one computes. (Ring Attention, arXiv 2310.01889, section 3.)

Shapes: B batch, S rows of this ring position, h query heads of this rank, D and Dv head dims of
keys and values. Blocks of keys and values are flat (`kv_block`).
"""

from collections.abc import Sequence

import torch

from hybridcp.attention.block import BlockAttention
from hybridcp.attention.kv_block import KVShape
from hybridcp.attention.online_softmax import OnlineSoftmax
from hybridcp.distributed import KV_TAG, Communicator, Exchange
from hybridcp.schedule import Step, Transfer


def forward_pass(
    q: torch.Tensor,
    kv: torch.Tensor,
    steps: Sequence[Step],
    ring: Communicator,
    attention: BlockAttention,
    *,
    passes_on: bool,
) -> tuple[OnlineSoftmax, torch.Tensor]:
    """Attention of this ring position's queries over all keys.

    Args:
        q: (B, S, h, D).
        kv: this position's own block.
        steps: `Schedule.forward_steps` of this position.
        ring: the ring group.
        attention: kernel and constants.
        passes_on: whether a position sends on the block that is present (ring) or rows of its
            own (direct).

    Returns:
        Output and log-sum-exp, and the block of the last step, which the backward starts from.
    """
    running = OnlineSoftmax(q, attention.shape.value_dim)
    present = last = kv
    for step in steps:
        source = present if passes_on else kv
        arriving, exchange = start_exchange(
            ring, attention.shape, source, step.send, step.receive, KV_TAG
        )
        attention.forward(q, present, step, running)
        exchange.wait()
        present, last = kv if arriving is None else arriving, present
    return running, last


def start_exchange(
    ring: Communicator,
    shape: KVShape,
    source: torch.Tensor,
    send: Transfer | None,
    receive: Transfer | None,
    tag: int,
) -> tuple[torch.Tensor | None, Exchange]:
    """Start sending the rows that `send` names of a block, and receiving others.

    Returns:
        The block that arrives, if any, not to be read before the exchange is waited for; of the
        dtype of `source`.
    """
    arriving = None if receive is None else shape.empty(receive.size, source)
    exchange = ring.exchange(
        send=None if send is None else shape.take(source, send.rows),
        to=None if send is None else send.peer,
        receive=arriving,
        source=None if receive is None else receive.peer,
        tag=tag,
    )
    return arriving, exchange
