"""Which attention kernel serves a request, and why."""

from dataclasses import dataclass

from hybridcp.errors import KernelError
from hybridcp.kernels.cpu import CpuKernel
from hybridcp.kernels.cuda import cuda_kernel
from hybridcp.kernels.flash_attn import flash_attn_kernel
from hybridcp.kernels.protocol import AttentionKernel, Request
from hybridcp.kernels.reference import ReferenceKernel

KERNEL_NAMES = ("flash_attn", "cuda", "cpu", "reference")
"""Every kernel, in the order in which "auto" tries them: fastest first."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A kernel and, in one sentence, why it was picked."""

    kernel: AttentionKernel
    reason: str


def explain_kernels(request: Request) -> list[tuple[str, str | None]]:
    """Each kernel's name and why it refuses the request (None if it does not), in auto's order."""
    return [(name, _build(name).refusal(request)) for name in KERNEL_NAMES]


def check_kernel_name(name: str) -> None:
    """Checks that `name` is "auto" or a kernel's name, before any tensor is there.

    Raises:
        KernelError: it is not; the message lists the valid names.
    """
    if name != "auto" and name not in KERNEL_NAMES:
        valid = ", ".join(repr(known) for known in ("auto", *KERNEL_NAMES))
        raise KernelError(f"unknown kernel {name!r}; valid names are {valid}")


def select_kernel(name: str, request: Request) -> Selection:
    """The kernel called `name`, or for "auto" the first that can serve the request.

    Args:
        name: "auto" or one of `KERNEL_NAMES`.
        request: device, dtype and head dim to be served.

    Raises:
        KernelError: an unknown name, or no kernel of that name can serve the request.
    """
    check_kernel_name(name)
    if name != "auto":
        return _select_named(name, request)
    refused: list[str] = []
    for candidate in KERNEL_NAMES:
        kernel = _build(candidate)
        refusal = kernel.refusal(request)
        if refusal is None:
            before = f"; before it {' and '.join(refused)}" if refused else ""
            reason = f"{candidate} is the first kernel that supports {_shown(request)}{before}"
            return Selection(kernel, reason)
        refused.append(f"{candidate} was refused ({refusal})")
    raise KernelError(f"no kernel supports {_shown(request)}: {'; '.join(refused)}")


def _select_named(name: str, request: Request) -> Selection:
    kernel = _build(name)
    refusal = kernel.refusal(request)
    if refusal is None:
        return Selection(kernel, f"{name} was asked for and supports {_shown(request)}")
    nearest = next((other for other, why in explain_kernels(request) if why is None), None)
    advice = f"use kernel={nearest!r}, which can" if nearest else "no other kernel can either"
    raise KernelError(f"kernel {name!r} cannot serve {_shown(request)}: {refusal}; {advice}")


def _build(name: str) -> AttentionKernel:
    match name:
        case "flash_attn":
            return flash_attn_kernel()
        case "cuda":
            return cuda_kernel()
        case "cpu":
            return CpuKernel()
        case _:
            return ReferenceKernel()


def _shown(request: Request) -> str:
    dtype = str(request.dtype).removeprefix("torch.")
    dims = f"head_dim {request.head_dim}"
    if request.value_head_dim != request.head_dim:
        dims += f" and {request.value_head_dim}"
    cap = ", softcap" if request.softcap else ""
    return f"device {request.device_type!r}, {dtype}, {dims}{cap}"
