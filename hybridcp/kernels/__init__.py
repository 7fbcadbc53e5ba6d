"""Attention kernels: one file a backend, one protocol, and a registry that states its reason."""

from hybridcp.kernels.protocol import (
    AttentionKernel,
    Partial,
    PartialGradients,
    Request,
    Rows,
)
from hybridcp.kernels.registry import (
    KERNEL_NAMES,
    Selection,
    check_kernel_name,
    explain_kernels,
    select_kernel,
)

__all__ = [
    "KERNEL_NAMES",
    "AttentionKernel",
    "Partial",
    "PartialGradients",
    "Request",
    "Rows",
    "Selection",
    "check_kernel_name",
    "explain_kernels",
    "select_kernel",
]
