"""Merging partial attention results: running output and log-sum-exp in float32.

    lse = logaddexp(lse_a, lse_b)
    out = out_a · exp(lse_a − lse) + out_b · exp(lse_b − lse)

(FlashAttention-2, arXiv 2307.08691, section 3.1.) Partial results may be bf16; the accumulators
never are, so the error does not grow with the number of merges.
"""

import torch

from hybridcp.kernels.protocol import Partial


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 inputs, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class OnlineSoftmax:
    """Accumulators of one attention call; rows that never see a key keep out = 0, lse = -inf.

    Args:
        q: (B, S, H, D) queries, for shape, dtype and device.
        value_dim: last dimension of the output.

    Attributes:
        out: (B, S, H, value_dim), float32 (float64 for float64 inputs).
        lse: (B, H, S), the same dtype.
    """

    def __init__(self, q: torch.Tensor, value_dim: int) -> None:
        batch, rows, heads, _ = q.shape
        dtype = accumulator_dtype(q.dtype)
        self.out = q.new_zeros((batch, rows, heads, value_dim), dtype=dtype)
        self.lse = q.new_full((batch, heads, rows), -torch.inf, dtype=dtype)

    def merge(self, partial: Partial) -> None:
        """Add attention over further keys; `partial` is not modified."""
        rows = partial.rows
        # Indexing by a slice gives a view, by a tensor a copy that must be written back.
        out, lse = self.out[:, rows], self.lse[:, :, rows]
        partial_lse = partial.lse.to(lse.dtype)
        merged = torch.logaddexp(lse, partial_lse)
        weight = torch.exp(partial_lse - merged).transpose(1, 2).unsqueeze(-1)
        out.lerp_(partial.out.to(out.dtype), weight)
        if isinstance(rows, slice):
            lse.copy_(merged)
        else:
            self.out[:, rows] = out
            self.lse[:, :, rows] = merged
