"""The forward pass over the schedule: blocks arrive, partial results are merged.

The loop is the schedule's: it decides nothing. Blocks for later steps are in flight while this one
computes. (Ring Attention, arXiv 2310.01889, section 3.)

Shapes: B batch, S rows of this ring position, h query heads of this rank, D and Dv head dims of
keys and values. Blocks of keys and values are flat (`kv_block`).
"""

from collections.abc import Sequence

import torch

from hybridcp.attention.block import BlockAttention
from hybridcp.attention.in_flight import InFlight
from hybridcp.attention.online_softmax import OnlineSoftmax
from hybridcp.communicator import KV_TAG, RingCommunicator
from hybridcp.steps import Step, Transfer


def forward_pass(
    q: torch.Tensor,
    kv: torch.Tensor,
    steps: Sequence[Step],
    ring: RingCommunicator,
    attention: BlockAttention,
) -> tuple[OnlineSoftmax, torch.Tensor]:
    """Attention of this ring position's queries over all keys.

    Args:
        q: (B, S, h, D).
        kv: this position's own block.
        steps: `Schedule.forward_steps` of this position.
        ring: the ring group.
        attention: kernel and constants.

    Returns:
        Output and log-sum-exp, and the block of the last step, which the backward starts from.
    """
    running = OnlineSoftmax(q, attention.shape.value_dim)
    in_flight = InFlight(ring, attention.shape, KV_TAG)
    present = kv
    for t, step in enumerate(steps):
        present = present_block(in_flight, t, kv)
        in_flight.start(with_sources(step.sends, ring.rank, kv, present), step.receives, kv)
        attention.forward(q, present, step, running)
    return running, present


def present_block(in_flight: InFlight, step: int, own: torch.Tensor) -> torch.Tensor:
    """What is due in a step, or the own block."""
    arrived = in_flight.due(step)
    return arrived[0][1] if arrived else own


def with_sources(
    sends: Sequence[Transfer], position: int, own: torch.Tensor, present: torch.Tensor
) -> list[tuple[Transfer, torch.Tensor]]:
    """Each message with the block that has its rows: the own, or the one that is present."""
    return [(sent, own if sent.owner == position else present) for sent in sends]
