"""`run_threads`: every rank of a layout as a thread of this process, on real gloo groups.

Starting 16 ranks takes a tenth of a second, transfers are the real ones, and a debugger sees
every rank at once. What threads share they share: torch's default random generator is one (pass
seeds), and a function that uses the default process group needs processes (`WorkerPool`).
"""

import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hybridcp.communicator import Communicator, DoubleRing, RingCommunicator
from hybridcp.distributed import ContextParallelGroups
from hybridcp.layout import Layout
from hybridcp.testing.failures import DistributedTestError, RankFailure, is_consequence

Result = TypeVar("Result")

# How long the other ranks may go on once one has failed: enough to see its connections close.
_GRACE_S = 2.0


def run_threads(
    fn: Callable[..., Result], layout: Layout, *args: object, timeout: float = 60.0
) -> list[Result]:
    """Call `fn(groups, *args)` for every rank of a layout, each in a thread.

        def total(groups, x): ...
        run_threads(total, Layout(ulysses_degree=4, ring_degree=4), x)     # 16 results

    Args:
        fn: any callable; its first argument is the rank's `ContextParallelGroups`, CPU tensors
            only. Each thread computes with one core.
        layout: how many ranks, and which groups they form.
        *args: the same objects for every rank.
        timeout: seconds after which the call gives up; hanging threads are left behind.

    Returns:
        What each rank returned, in the order of context-parallel ranks.

    Raises:
        DistributedTestError: a rank raised, or was not done in time; with its coordinates.
    """
    run = _Run(fn, layout, args, timeout)
    threads_before = torch.get_num_threads()
    try:
        return run.results()
    finally:
        torch.set_num_threads(threads_before)


class _Run:
    """One call of `run_threads`: its threads, and what they reported."""

    def __init__(
        self, fn: Callable[..., Any], layout: Layout, args: tuple[object, ...], timeout: float
    ) -> None:
        self._fn = fn
        self._layout = layout
        self._args = args
        self._timeout = timeout
        self._store = dist.HashStore()
        self._results: dict[int, Any] = {}
        self._failures: dict[int, RankFailure] = {}
        self._hanging: set[int] = set()
        self._changed = threading.Condition()  # reentrant: _fail is called under it too
        self._threads = [
            threading.Thread(target=self._run_rank, args=(rank,), daemon=True)
            for rank in range(layout.cp_degree)
        ]

    def results(self) -> list[Any]:
        for thread in self._threads:
            thread.start()
        try:
            return self._collect()
        finally:
            # Interpreter exit aborts the process if a thread is just then closing its groups.
            limit = time.monotonic() + _GRACE_S
            for rank, thread in enumerate(self._threads):
                if rank not in self._hanging:
                    thread.join(max(limit - time.monotonic(), 0))

    def _collect(self) -> list[Any]:
        deadline = time.monotonic() + self._timeout
        with self._changed:
            while not self._is_over():
                left = deadline - time.monotonic()
                if left <= 0:
                    self._give_up()
                    break
                failed_before = len(self._failures)
                self._changed.wait(left)
                if self._failures and not failed_before:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
            if self._failures:
                name = getattr(self._fn, "__qualname__", repr(self._fn))
                headline = f"{name} failed on {len(self._failures)} of {len(self._threads)} ranks"
                raise DistributedTestError(headline, self._failures.values())
            return [self._results[rank] for rank in range(len(self._threads))]

    def _is_over(self) -> bool:
        return len(self._results) + len(self._failures) == len(self._threads)

    def _run_rank(self, rank: int) -> None:
        torch.set_num_threads(1)
        groups = self._try_rank(rank)
        if groups is not None:
            with self._changed:
                # Groups live until every rank is done, so nobody is cut off early.
                self._changed.wait_for(self._is_over, self._timeout)
        else:
            # Only when nothing refers to its groups do their connections close, which is what
            # tells the other ranks.
            gc.collect()

    def _try_rank(self, rank: int) -> ContextParallelGroups | None:
        """Run the function and report; the rank's groups, or None after a failure."""
        try:
            groups = self._groups(rank)
            result = self._fn(groups, *self._args)
        except BaseException as problem:
            summary = traceback.format_exception_only(problem)[-1].strip()
            self._fail(rank, summary, traceback.format_exc(), is_consequence(problem))
            traceback.clear_frames(problem.__traceback__)
            return None
        with self._changed:
            self._results[rank] = result
            self._changed.notify_all()
        return groups

    def _give_up(self) -> None:
        """Name each rank that did not report, with where it is."""
        gone = bool(self._failures)
        why = "given up, as another rank had failed" if gone else f"not done in {self._timeout:g} s"
        frames = sys._current_frames()
        for rank, thread in enumerate(self._threads):
            if rank in self._results or rank in self._failures:
                continue
            self._hanging.add(rank)
            frame = frames.get(thread.ident or 0)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
            self._fail(rank, f"{why}; it was here:", stack, gone)

    def _fail(self, rank: int, summary: str, details: str, consequence: bool) -> None:
        ring_rank, ulysses_rank = self._layout.coordinates(rank)
        where = f"rank {rank} (ring_rank={ring_rank}, ulysses_rank={ulysses_rank})"
        with self._changed:
            self._failures[rank] = RankFailure(rank, where, summary, details, consequence)
            self._changed.notify_all()

    def _groups(self, rank: int) -> ContextParallelGroups:
        ring_rank, ulysses_rank = self._layout.coordinates(rank)
        return ContextParallelGroups(
            ring=self._ring(ring_rank, ulysses_rank),
            ulysses=self._communicator(
                f"ulysses{ring_rank}", ulysses_rank, self._layout.ulysses_degree
            ),
        )

    def _ring(self, ring_rank: int, ulysses_rank: int) -> RingCommunicator:
        degree, size = self._layout.ring_degree, self._layout.inner_ring_size
        if size is None:
            return self._communicator(f"ring{ulysses_rank}", ring_rank, degree)
        outer, inner = divmod(ring_rank, size)
        return DoubleRing(
            outer=self._communicator(f"outer{ulysses_rank}.{inner}", outer, degree // size),
            inner=self._communicator(f"inner{ulysses_rank}.{outer}", inner, size),
        )

    def _communicator(self, name: str, rank: int, size: int) -> Communicator:
        if size == 1:
            return Communicator(None)
        store = dist.PrefixStore(name, self._store)
        # This call's own limit comes first: it can show where each rank hangs.
        return Communicator(_gloo_group(store, rank, size, self._timeout + 30))


def _gloo_group(store: dist.Store, rank: int, size: int, timeout: float) -> dist.ProcessGroup:
    """A gloo process group that torch's registry of groups does not know."""
    group = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(
        dist.PrefixStore("gloo/", store), rank, size, timedelta(seconds=timeout)
    )
    kind = dist.ProcessGroup.BackendType.GLOO
    backend._set_sequence_number_for_group()
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
    return group
