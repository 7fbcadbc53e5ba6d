"""A kernel that makes flash-attn calls, whoever's functions they are."""

from collections.abc import Iterator, Sequence

import torch

from hybridcp.kernels.protocol import Partial, PartialGradients, Request, Scores
from hybridcp.kernels.varlen import FlashBackend, flash_backward, flash_forward
from hybridcp.masks import Band


class FlashKernel:
    """`AttentionKernel` over a flash backend.

    Args:
        backend: the flash functions to call.
    """

    def __init__(self, backend: FlashBackend) -> None:
        self._backend = backend

    @property
    def name(self) -> str:
        """See `AttentionKernel.name`."""
        return self._backend.name

    def refusal(self, request: Request) -> str | None:
        """See `AttentionKernel.refusal`."""
        return self._backend.refusal(request)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bands: Sequence[Band],
        scores: Scores,
    ) -> Iterator[Partial]:
        """See `AttentionKernel.forward`."""
        return flash_forward(self._backend, q, k, v, bands, scores)

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
        """See `AttentionKernel.backward`."""
        return flash_backward(self._backend, dout, q, k, v, out, lse, bands, scores)
