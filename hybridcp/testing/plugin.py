"""The `run_distributed` fixture: `pytest_plugins = ["hybridcp.testing.plugin"]` in conftest.py.

    def test_ring(run_distributed):
        results = run_distributed(function, 4, argument)

One pool of worker processes serves the whole session.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest

from hybridcp.testing.pool import WorkerPool


class RunDistributed(Protocol):
    """Type of the `run_distributed` fixture."""

    def __call__(
        self, fn: Callable[..., Any], world_size: int, *args: object, timeout: float = 60.0
    ) -> list[Any]:
        """See `WorkerPool.run`."""


@pytest.fixture(scope="session")
def worker_pool() -> Iterator[WorkerPool]:
    """The session's worker processes."""
    with WorkerPool() as pool:
        yield pool


@pytest.fixture(scope="session", name="run_distributed")
def _run_distributed(worker_pool: WorkerPool) -> RunDistributed:
    """Call a function on every rank of a fresh gloo group: `WorkerPool.run`."""
    return worker_pool.run
