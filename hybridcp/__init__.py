"""hybridcp: exact attention over sequences split Ulysses × Ring, planned before it runs.

Importing the package imports no torch: planning works without it. The executor and the planner
are loaded when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hybridcp.errors import HybridCPError
from hybridcp.layout import Layout
from hybridcp.masks import (
    AttentionMask,
    Band,
    causal,
    chunked,
    documents,
    full,
    prefix_lm,
    sliding_window,
)
from hybridcp.proof import check
from hybridcp.schedule import Schedule

if TYPE_CHECKING:
    from hybridcp.attention.hybrid import HybridAttention
    from hybridcp.distributed import init_mesh
    from hybridcp.planner import plan
    from hybridcp.sequence import ShardedSequence

__version__ = "0.1.0"

__all__ = [
    "AttentionMask",
    "Band",
    "HybridAttention",
    "HybridCPError",
    "Layout",
    "Schedule",
    "ShardedSequence",
    "causal",
    "check",
    "chunked",
    "documents",
    "full",
    "init_mesh",
    "plan",
    "prefix_lm",
    "sliding_window",
]

_LOADED_WHEN_USED = {
    "HybridAttention": "hybridcp.attention.hybrid",
    "ShardedSequence": "hybridcp.sequence",
    "init_mesh": "hybridcp.distributed",
    "plan": "hybridcp.planner",
}


def __getattr__(name: str) -> Any:
    if name in _LOADED_WHEN_USED:
        return getattr(import_module(_LOADED_WHEN_USED[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LOADED_WHEN_USED])
