"""Tools to test distributed attention: yours or ours, on CPU, in seconds.

    results = run_distributed(function, 4, argument)          # worker processes, real gloo
    results = run_threads(function, layout, argument)         # threads, real gloo, fastest
    assert_accurate(result, q, k, v, dout, causal())          # as exact as plain attention?

With pytest, `pytest_plugins = ["hybridcp.testing.plugin"]` gives a `run_distributed` fixture
whose worker processes serve the whole session.
"""

from hybridcp.testing.accuracy import (
    MAX_ERROR_RATIO,
    MAX_FLOAT64_ERROR,
    AttentionErrors,
    assert_accurate,
    attention_errors,
    error_ratio,
    relative_error,
    single_device_error,
)
from hybridcp.testing.failures import DistributedTestError, RankFailure
from hybridcp.testing.pool import WorkerPool, run_distributed
from hybridcp.testing.reference import (
    AttentionResult,
    dense_mask,
    reference_attention,
    reference_gradients,
)
from hybridcp.testing.threads import run_threads

__all__ = [
    "MAX_ERROR_RATIO",
    "MAX_FLOAT64_ERROR",
    "AttentionErrors",
    "AttentionResult",
    "DistributedTestError",
    "RankFailure",
    "WorkerPool",
    "assert_accurate",
    "attention_errors",
    "dense_mask",
    "error_ratio",
    "reference_attention",
    "reference_gradients",
    "relative_error",
    "run_distributed",
    "run_threads",
    "single_device_error",
]
