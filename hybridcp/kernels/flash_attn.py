"""The flash-attn 2 package as a kernel; imported only when asked for."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hybridcp.errors import KernelError
from hybridcp.kernels.flash_kernel import FlashKernel
from hybridcp.kernels.protocol import Request, Scores
from hybridcp.kernels.varlen import Varlen, flash_refusal

_INSTALL = "pip install flash-attn --no-build-isolation"


@dataclass(frozen=True, slots=True)
class FlashAttnPackage:
    """An importable flash-attn: its version and its `flash_attn_interface` module."""

    version: str
    interface: Any


def load_package() -> FlashAttnPackage:
    """Imports flash-attn.

    Raises:
        KernelError: it is not installed, does not import, or is not 2.8 or a later 2.x.
    """
    try:
        package = importlib.import_module("flash_attn")
        interface = importlib.import_module("flash_attn.flash_attn_interface")
    except (ImportError, OSError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "flash_attn":
            raise KernelError(f"flash-attn is not installed; install it: {_INSTALL}") from error
        raise KernelError(f"flash-attn does not import: {error}; reinstall: {_INSTALL}") from error
    version = str(getattr(package, "__version__", "unknown"))
    if not _is_supported(version):
        raise KernelError(f"flash-attn 2.8 or a later 2.x is needed, found {version}: {_INSTALL}")
    return FlashAttnPackage(version, interface)


def _is_supported(version: str) -> bool:
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return major == "2" and minor.isdecimal() and int(minor) >= 8


def flash_attn_kernel(load: Callable[[], FlashAttnPackage] = load_package) -> FlashKernel:
    """The flash-attn 2 package as a kernel; see `FlashAttnBackend`."""
    return FlashKernel(FlashAttnBackend(load))


class FlashAttnBackend:
    """flash-attn 2.8: float16 and bfloat16 on Ampere or newer, deterministic backward.

    Args:
        load: returns the package, or raises `KernelError` with the reason.
    """

    name = "flash_attn"

    def __init__(self, load: Callable[[], FlashAttnPackage]) -> None:
        self._load = load

    @property
    def label(self) -> str:
        """See `FlashBackend.label`."""
        return f"flash-attn {self._load().version}"

    def refusal(self, request: Request) -> str | None:
        """Refuses what flash-attn 2 cannot do, and a package that cannot be imported."""
        refusal = flash_refusal(request)
        if refusal is not None:
            return refusal
        try:
            self._load()
        except KernelError as error:
            return str(error)
        return None

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
        interface = self._load().interface
        function = (
            interface._flash_attn_forward
            if varlen is None
            else interface._flash_attn_varlen_forward
        )
        out: torch.Tensor
        lse: torch.Tensor
        out, lse, *_ = function(
            q=q,
            k=k,
            v=v,
            **_sequence_arguments(varlen),
            **_common_arguments(scores, window),
            return_softmax=False,
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
        interface = self._load().interface
        function = (
            interface._flash_attn_backward
            if varlen is None
            else interface._flash_attn_varlen_backward
        )
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        function(
            dout=dout,
            q=q,
            k=k,
            v=v,
            out=out,
            softmax_lse=lse,
            dq=dq,
            dk=dk,
            dv=dv,
            **_sequence_arguments(varlen),
            **_common_arguments(scores, window),
            deterministic=True,
        )
        return dq, dk, dv


def _sequence_arguments(varlen: Varlen | None) -> dict[str, Any]:
    if varlen is None:
        return {}
    return {
        "cu_seqlens_q": varlen.cu_seqlens_q,
        "cu_seqlens_k": varlen.cu_seqlens_k,
        "max_seqlen_q": varlen.max_seqlen_q,
        "max_seqlen_k": varlen.max_seqlen_k,
    }


def _common_arguments(scores: Scores, window: tuple[int, int]) -> dict[str, Any]:
    return {
        "dropout_p": 0.0,
        "softmax_scale": scores.softmax_scale,
        "causal": False,
        "window_size_left": window[0],
        "window_size_right": window[1],
        "softcap": scores.softcap,
        "alibi_slopes": None,
    }
