"""What an attention kernel is: one block of attention over a set of bands, forward and backward.

Shapes: B batch, S local rows, H query heads, K key/value heads (K divides H), D head dim.
A kernel never decides anything: which pairs to compute comes as bands in local rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hybridcp.masks import Band

Rows = slice | torch.Tensor
"""Local rows: a slice, or an int64 tensor of distinct row numbers."""


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores are made of q · k.

    Attributes:
        softmax_scale: factor of q · k.
        softcap: then softcap · tanh(score / softcap); 0 for none.
    """

    softmax_scale: float
    softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """What a kernel is asked to support.

    Attributes:
        device_type: "cpu", "cuda", ….
        dtype: of q, k and v.
        head_dim: D of q and k.
        value_head_dim: Dv of v and out.
        softcap: whether scores are capped.
    """

    device_type: str
    dtype: torch.dtype
    head_dim: int
    value_head_dim: int
    softcap: bool = False


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention of some query rows over some keys; every row has at least one key.

    Attributes:
        rows: which local query rows.
        out: (B, rows, H, Dv), softmax over these keys alone; any float dtype.
        lse: (B, H, rows), natural-log sum of exp of the scaled scores; float32 (or float64).
    """

    rows: Rows
    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True, slots=True)
class PartialGradients:
    """Contributions to be added to the gradients of some rows.

    Attributes:
        q_rows: rows of `dq`, (B, rows, H, D).
        k_rows: rows of `dk` and `dv`, (B, rows, K, D).
    """

    q_rows: Rows
    k_rows: Rows
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


class AttentionKernel(Protocol):
    """One attention backend."""

    @property
    def name(self) -> str:
        """The name that selects it."""

    def refusal(self, request: Request) -> str | None:
        """Why this kernel cannot serve the request here, or None if it can."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bands: Sequence[Band],
        scores: Scores,
    ) -> Iterator[Partial]:
        """Attention over `bands` in pieces, to be merged by online softmax in the order given.

        Args:
            q: (B, Sq, H, D); last dim contiguous, any other strides.
            k: (B, Sk, K, D).
            v: (B, Sk, K, Dv).
            bands: trimmed and disjoint, in local rows of q and k.
            scores: scale and cap of the scores.

        Yields:
            Pieces that cover each allowed pair exactly once. Rows may come in several pieces.
        """

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        bands: Sequence[Band],
        scores: Scores,
    ) -> Iterator[PartialGradients]:
        """Gradients of this block, given the *global* output and log-sum-exp.

        With P = exp(scale · q kᵀ − lse) and delta = rowsum(dout · out) global, block gradients
        add up exactly (FlashAttention-2, arXiv 2307.08691, algorithm 2).

        Args:
            dout: (B, Sq, H, Dv), gradient of `out`.
            q, k, v, bands, scores: as in `forward`, the same block.
            out: (B, Sq, H, Dv), output over all keys.
            lse: (B, H, Sq), log-sum-exp over all keys.

        Yields:
            Contributions, each to be added; rows may come several times.
        """
