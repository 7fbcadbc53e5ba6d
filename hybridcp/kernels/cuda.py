"""The CUDA kernel that needs nothing installed: torch's own flash operators."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hybridcp.kernels.flash_kernel import FlashKernel
from hybridcp.kernels.protocol import Request, Scores
from hybridcp.kernels.varlen import Varlen, flash_refusal


def _aten_forward(*args: Any, **kwargs: Any) -> Any:
    return torch.ops.aten._flash_attention_forward(*args, **kwargs)


def _aten_backward(*args: Any, **kwargs: Any) -> Any:
    return torch.ops.aten._flash_attention_backward(*args, **kwargs)


def cuda_kernel(
    forward_op: Callable[..., Any] = _aten_forward,
    backward_op: Callable[..., Any] = _aten_backward,
) -> FlashKernel:
    """Torch's own flash operators as a kernel; see `CudaBackend`."""
    return FlashKernel(CudaBackend(forward_op, backward_op))


class CudaBackend:
    """`aten::_flash_attention_forward` and `_backward`; float16 and bfloat16, deterministic.

    Args:
        forward_op: takes the arguments of `aten::_flash_attention_forward`.
        backward_op: takes the arguments of `aten::_flash_attention_backward`.
    """

    name = "cuda"

    def __init__(self, forward_op: Callable[..., Any], backward_op: Callable[..., Any]) -> None:
        self._forward_op = forward_op
        self._backward_op = backward_op

    @property
    def label(self) -> str:
        """See `FlashBackend.label`."""
        return f"torch {torch.__version__} (aten::_flash_attention_forward)"

    def refusal(self, request: Request) -> str | None:
        """Refuses what flash-attn 2 cannot do, and torch builds without it."""
        refusal = flash_refusal(request)
        if refusal is None and not torch.backends.cuda.is_flash_attention_available():
            return f"torch {torch.__version__} was built without flash attention"
        if refusal is None and request.softcap:
            return "torch's flash operator has no softcap"
        return refusal

    def call_forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scores: Scores,
        window: tuple[int, int],
        varlen: Varlen | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `FlashBackend.call_forward`."""
        out: torch.Tensor
        lse: torch.Tensor
        out, lse, *_ = self._forward_op(
            q,
            k,
            v,
            *_sequence_arguments(q, k, varlen),
            0.0,
            False,
            False,
            scale=scores.softmax_scale,
            window_size_left=window[0],
            window_size_right=window[1],
        )
        return out, lse

    def call_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scores: Scores,
        window: tuple[int, int],
        varlen: Varlen | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `FlashBackend.call_backward`."""
        no_dropout_state = torch.empty(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, dtype=torch.uint64, device=q.device)
        dq: torch.Tensor
        dk: torch.Tensor
        dv: torch.Tensor
        with _deterministic():
            dq, dk, dv = self._backward_op(
                dout,
                q,
                k,
                v,
                out,
                lse,
                *_sequence_arguments(q, k, varlen),
                0.0,
                False,
                no_dropout_state,
                unused,
                scale=scores.softmax_scale,
                window_size_left=window[0],
                window_size_right=window[1],
            )
        return dq, dk, dv


@contextmanager
def _deterministic() -> Iterator[None]:
    """The operator has no argument for it: otherwise it adds dq in an order that varies."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _sequence_arguments(
    q: torch.Tensor, k: torch.Tensor, varlen: Varlen | None
) -> tuple[torch.Tensor | None, torch.Tensor | None, int, int]:
    """`cum_seq_q`, `cum_seq_k`, `max_q`, `max_k`; no offsets means a dense call."""
    if varlen is None:
        return None, None, q.shape[1], k.shape[1]
    return varlen.cu_seqlens_q, varlen.cu_seqlens_k, varlen.max_seqlen_q, varlen.max_seqlen_k
