"""Ring attention over a schedule: blocks of keys and values pass by, partial results are merged.

The loop is the schedule's: it decides nothing. The block for the next step is in flight while
this one computes. (Ring Attention, arXiv 2310.01889; blockwise backward with the global output
and log-sum-exp, FlashAttention-2, arXiv 2307.08691, algorithm 2.)

Shapes: B batch, S rows of this ring position, h query heads and n key/value heads of this rank,
D head dim. Keys and values travel as one tensor (2, B, S, n, D).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridcp.attention.online_softmax import OnlineSoftmax, accumulator_dtype
from hybridcp.distributed import GRADIENT_TAG, KV_TAG, Communicator
from hybridcp.kernels.protocol import AttentionKernel
from hybridcp.schedule import Step


@dataclass(frozen=True)
class BlockAttention:
    """A kernel with what stays the same for all blocks of a call.

    Attributes:
        kernel: the attention backend.
        softmax_scale: factor of q · k.
        kv_index: key/value heads in the kernel's order, or None (`HeadSplit.kernel_kv_heads`).
    """

    kernel: AttentionKernel
    softmax_scale: float
    kv_index: tuple[int, ...] | None

    def forward(
        self, q: torch.Tensor, kv: torch.Tensor, step: Step, running: OnlineSoftmax
    ) -> None:
        """Merge the attention of one step into the running result."""
        if not step.bands:
            return
        k, v = self._expanded(kv)
        for partial in self.kernel.forward(q, k, v, step.bands, self.softmax_scale):
            running.merge(partial)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        kv: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        step: Step,
        dq: torch.Tensor,
        dkv: torch.Tensor,
    ) -> None:
        """Add the gradients of one step to `dq` and `dkv`, both accumulators."""
        if not step.bands:
            return
        k, v = self._expanded(kv)
        pieces = self.kernel.backward(dout, q, k, v, out, lse, step.bands, self.softmax_scale)
        for piece in pieces:
            dq[:, piece.q_rows] += piece.dq
            for accumulator, gradient in ((dkv[0], piece.dk), (dkv[1], piece.dv)):
                if self.kv_index is None:
                    accumulator[:, piece.k_rows] += gradient
                    continue
                # One head at a time: index_add would add repeated heads in any order on CUDA.
                for i, head in enumerate(self.kv_index):
                    accumulator[:, piece.k_rows, head] += gradient[:, :, i]

    def _expanded(self, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kv_index is not None:
            kv = kv[:, :, :, list(self.kv_index)]
        return kv[0], kv[1]


def ring_forward(
    q: torch.Tensor,
    kv: torch.Tensor,
    steps: Sequence[Step],
    block_lens: Sequence[int],
    ring: Communicator,
    attention: BlockAttention,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of this ring position's queries over all keys.

    Args:
        q: (B, S, h, D).
        kv: (2, B, S, n, D), this position's own block, contiguous.
        steps: `Schedule.forward_steps` of this position.
        block_lens: rows of each ring position's block.
        ring: the ring group.
        attention: kernel and constants.

    Returns:
        out (B, S, h, D) in q's dtype; lse (B, h, S) in float32; the block that arrived last,
        (2, B, rows, n, D), which the backward starts from. For a ring of one it is empty.
    """
    running = OnlineSoftmax(q, kv.size(-1))
    present = kv
    for step, following in _with_next(steps):
        arriving = None
        if step.receive_from is not None and following is not None:
            arriving = _block_like(kv, block_lens[following.kv_owner])
        exchange = ring.exchange(
            send=present, to=step.send_to, receive=arriving, source=step.receive_from, tag=KV_TAG
        )
        attention.forward(q, present, step, running)
        exchange.wait()
        if arriving is not None:
            present = arriving
    # An operator's output must not be one of its inputs.
    last = present if present is not kv else kv.new_empty(0)
    return running.out.to(q.dtype), running.lse, last


def ring_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    last: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    steps: Sequence[Step],
    block_lens: Sequence[int],
    ring: Communicator,
    attention: BlockAttention,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `ring_forward`.

    Blocks move against the forward direction, each followed by its gradient in float32, which
    every position adds to and the owner receives last.

    Args:
        dout: (B, S, h, D).
        q, kv, out, lse, last: inputs and results of `ring_forward`.
        steps: `Schedule.backward_steps` of this position.
        block_lens, ring, attention: as there.

    Returns:
        dq (B, S, h, D) and dkv (2, B, S, n, D), in q's dtype.
    """
    dtype = accumulator_dtype(q.dtype)
    dq = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    before = (ring.rank - 1) % ring.size
    after = (ring.rank + 1) % ring.size
    present = last if len(steps) > 1 else kv
    dkv = kv
    arriving_dkv = None
    dkv_exchange = None
    for step, following in _with_next(steps):
        arriving = None
        if step.receive_from is not None and following is not None:
            arriving = _block_like(kv, block_lens[following.kv_owner])
        exchange = ring.exchange(
            send=present, to=step.send_to, receive=arriving, source=step.receive_from, tag=KV_TAG
        )
        dkv = torch.zeros_like(present, dtype=dtype)
        attention.backward(dout, q, present, out, lse, step, dq, dkv)
        exchange.wait()
        if dkv_exchange is not None and arriving_dkv is not None:
            dkv_exchange.wait()
            dkv += arriving_dkv
        if following is not None:
            arriving_dkv = _block_like(dkv, block_lens[following.kv_owner])
            dkv_exchange = ring.exchange(
                send=dkv, to=before, receive=arriving_dkv, source=after, tag=GRADIENT_TAG
            )
        present = arriving if arriving is not None else kv
    return dq.to(q.dtype), dkv.to(q.dtype)


def _with_next(steps: Sequence[Step]) -> list[tuple[Step, Step | None]]:
    return list(zip(steps, [*steps[1:], None], strict=True))


def _block_like(kv: torch.Tensor, rows: int) -> torch.Tensor:
    return kv.new_empty((2, kv.size(1), rows, kv.size(3), kv.size(4)))
