"""Both passes of the all-gather exchange: every position sees all keys and values at once.

One collective in place of R - 1 hops, and memory for the keys and values of the whole sequence
(Llama 3, arXiv 2407.21783, section 3.3.2, which does the same for few key/value heads). The
backward gathers again rather than keep them; gradients go back to the owners in float32 and are
summed there in the order of ring positions, so the sum does not depend on the backend.

Shapes as in `forward`.
"""

import torch

from hybridcp.attention.block import BlockAttention
from hybridcp.attention.kv_block import KVShape
from hybridcp.attention.online_softmax import OnlineSoftmax, accumulator_dtype
from hybridcp.communicator import Communicator
from hybridcp.sharding import Sharding
from hybridcp.steps import Step


def gathered_forward(
    q: torch.Tensor,
    kv: torch.Tensor,
    step: Step,
    kv_sharding: Sharding,
    ring: Communicator,
    attention: BlockAttention,
) -> OnlineSoftmax:
    """Attention of this ring position's queries over all keys.

    Args:
        q: (B, S, h, D).
        kv: this position's own block.
        step: the one step of `Schedule.forward_steps`.
        kv_sharding: who holds which keys.
        ring: the ring group.
        attention: kernel and constants.
    """
    running = OnlineSoftmax(q, attention.shape.value_dim)
    attention.forward(q, _gather(kv, kv_sharding, ring, attention.shape), step, running)
    return running


def gathered_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    step: Step,
    kv_sharding: Sharding,
    ring: Communicator,
    attention: BlockAttention,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `gathered_forward`.

    Args:
        dout: (B, S, h, Dv).
        q, kv, kv_sharding, ring, attention: as there.
        out: (B, S, h, Dv), and `lse` (B, h, S): its results.
        lse: see `out`.
        step: the one step of `Schedule.backward_steps`.

    Returns:
        dq (B, S, h, D) and the gradient of `kv`, both accumulators in float32 (or float64).
    """
    shape = attention.shape
    dtype = accumulator_dtype(q.dtype)
    dq = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    whole = _gather(kv, kv_sharding, ring, shape)
    dwhole = torch.zeros_like(whole, dtype=dtype)
    attention.backward(dout, q, whole, out, lse, step, dq, dwhole)
    pieces = [shape.take(dwhole, ranges) for ranges in kv_sharding.ring_ranges]
    shares = kv.new_empty(ring.size * kv.numel(), dtype=dtype)
    sizes = [piece.numel() for piece in pieces]
    ring.all_to_all(shares, torch.cat(pieces), [kv.numel()] * ring.size, sizes)
    dkv = torch.zeros_like(kv, dtype=dtype)
    for share in shares.view(ring.size, kv.numel()):
        dkv += share
    return dq, dkv


def _gather(
    kv: torch.Tensor, kv_sharding: Sharding, ring: Communicator, shape: KVShape
) -> torch.Tensor:
    """The blocks of all positions as one, rows in global order."""
    whole = shape.empty(kv_sharding.seq_len, kv)
    sizes = [shape.elements(kv_sharding.ring_len(r)) for r in range(ring.size)]
    for r, block in enumerate(ring.all_gather(kv, sizes)):
        shape.put(whole, kv_sharding.ring_ranges[r], block)
    return whole
