"""`WorkerPool`: worker processes, started once, that run functions on gloo groups of any size.

    with WorkerPool() as pool:
        pool.run(function, 4, argument)      # function(argument) on 4 ranks → 4 results

Workers come from a fork server that has torch loaded, so the first run pays about a second and
later ones a few hundredths. A rank that fails, dies or hangs makes one `DistributedTestError`
that says which, why and where; the workers of that run are replaced. POSIX only.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Self, TypeVar

import torch.distributed as dist

from hybridcp.testing import worker
from hybridcp.testing.failures import DistributedTestError, RankFailure
from hybridcp.testing.worker import FunctionAddress, Job

Result = TypeVar("Result")

# How long the other ranks may go on once one has failed: enough to see its connections close.
_GRACE_S = 2.0
_DUMP_WAIT_S = 1.0


class WorkerPool:
    """Worker processes for distributed functions, reused from run to run.

    Use as a context manager, or call `close`. Not for use from several threads.
    """

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._store: dist.TCPStore | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="hybridcp-workers-")
        self._jobs = 0
        self._started = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers, and the pool."""
        self._discard(self._workers)
        self._store = None
        self._folder.cleanup()

    def run(
        self,
        fn: Callable[..., Result],
        world_size: int,
        *args: object,
        timeout: float = 60.0,
    ) -> list[Result]:
        """Call `fn(*args)` on every rank of a fresh gloo default group.

        Each rank has one compute thread, `torch.manual_seed(0)`, torchrun's environment
        variables, and the warning filters of the caller.

        Args:
            fn: a function at the top level of a module.
            world_size: number of ranks.
            *args: pickled; the same for every rank.
            timeout: seconds after which all ranks are stopped.

        Returns:
            What each rank returned, in rank order; tensors are copies.

        Raises:
            DistributedTestError: a rank raised, died, or was not done in time.
            TypeError: `fn` is not at the top level of a module.
        """
        if world_size < 1:
            raise ValueError(f"world_size must be ≥ 1, got {world_size}")
        address = _address(fn)
        arguments = pickle.dumps(args)
        workers = self._ready_workers(world_size)
        self._jobs += 1
        try:
            for rank, member in enumerate(workers):
                job = Job(
                    number=self._jobs,
                    rank=rank,
                    world_size=world_size,
                    store_port=self._store_port(),
                    # The pool's own limit comes first: it can show where each rank hangs.
                    timeout_s=timeout + 30,
                    sys_path=tuple(sys.path),
                    warning_filters=pickle.dumps(_shareable_filters()),
                    function=address,
                    arguments=arguments,
                )
                member.send(pickle.dumps(job))
            results = _Collector(workers, address.name, timeout).collect()
            for member in workers:
                member.send(b"release")
        except BaseException:
            self._discard(workers)
            raise
        return results

    def _ready_workers(self, count: int) -> list["_Worker"]:
        self._discard([member for member in self._workers if not member.process.is_alive()])
        while len(self._workers) < count:
            self._started += 1
            dump = Path(self._folder.name) / f"worker{self._started}.txt"
            self._workers.append(_Worker.start(dump))
        return self._workers[:count]

    def _discard(self, workers: list["_Worker"]) -> None:
        for member in workers:
            member.process.kill()
        for member in workers:
            member.process.join()
            member.connection.close()
            member.process.close()
        self._workers = [member for member in self._workers if member not in workers]

    def _store_port(self) -> int:
        # The operating system picks a free port while the store binds it: no race for ports.
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self._store.port


def run_distributed(
    fn: Callable[..., Result], world_size: int, *args: object, timeout: float = 60.0
) -> list[Result]:
    """`WorkerPool.run` in a pool of its own: for scripts; tests share one by the fixture.

        results = run_distributed(function, 4, argument)

    Raises:
        DistributedTestError: a rank raised, died, or was not done in time.
    """
    with WorkerPool() as pool:
        return pool.run(fn, world_size, *args, timeout=timeout)


class _Worker:
    """One worker process, seen from the pool."""

    def __init__(self, process: ForkServerProcess, connection: Connection, dump: Path) -> None:
        self.process = process
        self.connection = connection
        self.dump = dump

    @classmethod
    def start(cls, dump: Path) -> Self:
        context = multiprocessing.get_context("forkserver")
        with _one_thread_environment():
            context.set_forkserver_preload(["torch", "torch.distributed"])
            forkserver.ensure_running()
        ours, theirs = context.Pipe()
        process = context.Process(target=worker.main, args=(theirs, str(dump)), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours, dump)

    def send(self, message: bytes) -> None:
        # A worker that is gone is noticed, with its signal, when its report is due.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(message)

    def stacks(self) -> str:
        return self.dump.read_text(encoding="utf-8") if self.dump.exists() else ""


class _Collector:
    """Waits for the reports of one run."""

    def __init__(self, workers: list[_Worker], name: str, timeout: float) -> None:
        self._workers = workers
        self._name = name
        self._timeout = timeout
        self._results: dict[int, Any] = {}
        self._failures: dict[int, RankFailure] = {}

    def collect(self) -> list[Any]:
        deadline = time.monotonic() + self._timeout
        while waiting := self._waiting():
            left = deadline - time.monotonic()
            if left <= 0:
                self._stop(waiting)
                break
            failed_before = len(self._failures)
            self._take_reports(waiting, left)
            if self._failures and not failed_before:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        if self._failures:
            raise DistributedTestError(self._headline(), self._failures.values())
        return [self._results[rank] for rank in range(len(self._workers))]

    def _waiting(self) -> list[int]:
        ranks = range(len(self._workers))
        return [r for r in ranks if r not in self._results and r not in self._failures]

    def _take_reports(self, waiting: list[int], timeout: float) -> None:
        connections = {self._workers[rank].connection: rank for rank in waiting}
        for ready in wait(list(connections), timeout):
            assert isinstance(ready, Connection)
            rank = connections[ready]
            try:
                report = pickle.loads(ready.recv_bytes())
            except (EOFError, ConnectionResetError):
                self._fail(rank, *self._death(self._workers[rank]))
                continue
            if report[0] == "done":
                self._results[rank] = report[1]
            else:
                _, summary, details, consequence = report
                self._fail(rank, summary, details, consequence)

    def _death(self, member: _Worker) -> tuple[str, str]:
        member.process.join()
        code = member.process.exitcode or 0
        how = f"died with {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return how, member.stacks()

    def _stop(self, waiting: list[int]) -> None:
        """Show where the ranks are that did not report; the caller ends them."""
        members = [self._workers[rank] for rank in waiting]
        for member in members:
            if member.process.pid is not None and member.process.is_alive():
                os.kill(member.process.pid, signal.SIGUSR1)
        limit = time.monotonic() + _DUMP_WAIT_S
        while time.monotonic() < limit and not all(member.stacks() for member in members):
            time.sleep(0.05)
        gone = bool(self._failures)
        why = "stopped, as another rank had failed" if gone else f"not done in {self._timeout:g} s"
        for rank, member in zip(waiting, members, strict=True):
            self._fail(rank, f"{why}; it was here:", member.stacks(), gone)

    def _fail(self, rank: int, summary: str, details: str, consequence: bool = False) -> None:
        self._failures[rank] = RankFailure(rank, f"rank {rank}", summary, details, consequence)

    def _headline(self) -> str:
        return f"{self._name} failed on {len(self._failures)} of {len(self._workers)} ranks"


def _address(fn: Callable[..., Any]) -> FunctionAddress:
    name = getattr(fn, "__qualname__", type(fn).__name__)
    module = sys.modules.get(getattr(fn, "__module__", "") or "")
    if module is None or getattr(module, name, None) is not fn:
        raise TypeError(
            f"a worker process finds a function by its name, so it must be at the top level of a "
            f"module; {name} is not (pass what it needs as arguments)"
        )
    return FunctionAddress(module.__name__, getattr(module, "__file__", None), name)


def _shareable_filters() -> list[Any]:
    """Warning filters of this process that another one can read."""
    found = []
    for entry in warnings.filters:
        with contextlib.suppress(Exception):
            pickle.dumps(entry)
            found.append(entry)
    return found


@contextlib.contextmanager
def _one_thread_environment() -> Iterator[None]:
    """OpenMP reads this variable once, when the fork server loads torch."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
