"""Attention of one step: a kernel on the block that is present, merged into what runs."""

from dataclasses import dataclass

import torch

from hybridcp.attention.kv_block import KVShape
from hybridcp.attention.online_softmax import OnlineSoftmax
from hybridcp.kernels.protocol import AttentionKernel, Scores
from hybridcp.steps import Step


@dataclass(frozen=True)
class BlockAttention:
    """A kernel with what stays the same for all blocks of a call.

    Attributes:
        kernel: the attention backend.
        scores: how scores are made of q · k.
        shape: sizes of key/value blocks.
        kv_index: key/value heads in the kernel's order, or None (`HeadSplit.kernel_kv_heads`).
    """

    kernel: AttentionKernel
    scores: Scores
    shape: KVShape
    kv_index: tuple[int, ...] | None

    def forward(
        self, q: torch.Tensor, block: torch.Tensor, step: Step, running: OnlineSoftmax
    ) -> None:
        """Merge the attention of one step into the running result.

        Args:
            q: (B, S, h, D).
            block: keys and values that are present.
            step: what to compute.
            running: of all steps so far.
        """
        if not step.bands:
            return
        k, v = self._kernel_kv(block)
        for partial in self.kernel.forward(q, k, v, step.bands, self.scores):
            running.merge(partial)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        block: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        step: Step,
        dq: torch.Tensor,
        dblock: torch.Tensor,
    ) -> None:
        """Add the gradients of one step to `dq` and `dblock`, both accumulators.

        Args:
            dout: (B, S, h, Dv).
            q: (B, S, h, D).
            block: keys and values that are present.
            out: (B, S, h, Dv), over all keys.
            lse: (B, h, S), over all keys.
            step: what to compute.
            dq: (B, S, h, D), added to.
            dblock: gradient of the block, added to.
        """
        if not step.bands:
            return
        k, v = self._kernel_kv(block)
        dk, dv = self.shape.views(dblock)
        for piece in self.kernel.backward(dout, q, k, v, out, lse, step.bands, self.scores):
            dq[:, piece.q_rows] += piece.dq
            for accumulator, gradient in ((dk, piece.dk), (dv, piece.dv)):
                if self.kv_index is None:
                    accumulator[:, piece.k_rows] += gradient
                    continue
                # One head at a time: index_add would add repeated heads in any order on CUDA.
                for i, head in enumerate(self.kv_index):
                    accumulator[:, piece.k_rows, head] += gradient[:, :, i]

    def _kernel_kv(self, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self.shape.views(block)
        if self.kv_index is None:
            return k, v
        index = list(self.kv_index)
        return k[:, :, index], v[:, :, index]
