"""The worker process of `WorkerPool`: waits for jobs, runs each in a fresh gloo group.

A job comes as bytes over a pipe; `("done", result)` or `("failed", …)` goes back as bytes, so no
tensor shares memory between processes. A worker that failed ends itself at once: its closing
connections are what tells the other ranks.
"""

import contextlib
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridcp.testing.failures import is_consequence


@dataclass(frozen=True, slots=True)
class FunctionAddress:
    """Where a worker finds a module-level function.

    Attributes:
        module: name of its module in the calling process.
        file: source file of that module, if it has one.
        name: name in the module.
    """

    module: str
    file: str | None
    name: str

    def load(self) -> Callable[..., Any]:
        """Import the function, by module name, or from its file if the name leads elsewhere."""
        module = sys.modules.get(self.module) if self.module != "__main__" else None
        if module is None and self.module != "__main__":
            with contextlib.suppress(ImportError):
                module = importlib.import_module(self.module)
        if module is None or not self._is_here(module):
            module = self._load_file()
        function: Callable[..., Any] = getattr(module, self.name)
        return function

    def _is_here(self, module: Any) -> bool:
        found = getattr(module, "__file__", None)
        return self.file is None or (found is not None and Path(found) == Path(self.file))

    def _load_file(self) -> Any:
        # A script's own name would run its `if __name__ == "__main__"` part.
        name = "__mp_main__" if self.module == "__main__" else self.module
        if self.file is None:
            raise ImportError(f"cannot import {self.module} in a worker process: it has no file")
        loaded = sys.modules.get(name)
        if loaded is not None and self._is_here(loaded):
            return loaded
        spec = importlib.util.spec_from_file_location(name, self.file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module


@dataclass(frozen=True, slots=True)
class Job:
    """One function call on one rank.

    Attributes:
        number: distinct for each run; prefix of the run's keys in the store.
        rank: rank of this worker.
        world_size: number of ranks.
        store_port: port of the pool's store on 127.0.0.1.
        timeout_s: after which transfers of this job give up, in seconds.
        sys_path: import path of the calling process.
        warning_filters: `warnings.filters` of the calling process, pickled.
        function: what to call.
        arguments: its positional arguments, pickled.
    """

    number: int
    rank: int
    world_size: int
    store_port: int
    timeout_s: float
    sys_path: tuple[str, ...]
    warning_filters: bytes
    function: FunctionAddress
    arguments: bytes


def main(connection: Connection, dump_path: str) -> None:
    """Run jobs until the pipe closes.

    Args:
        connection: jobs in, reports out.
        dump_path: file for stacks, on SIGUSR1 and on fatal signals.
    """
    # Ctrl-C reaches the whole foreground group; the pool decides what happens to its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with Path(dump_path).open("w", encoding="utf-8") as dump:
        faulthandler.enable(dump, all_threads=True)
        faulthandler.register(signal.SIGUSR1, dump, all_threads=True)
        while True:
            try:
                job: Job = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            try:
                with _job_scope(job):
                    connection.send_bytes(pickle.dumps(("done", _call(job))))
                    # Connections stay open until every rank is done, so nobody is cut off early.
                    connection.recv_bytes()
            except (EOFError, BrokenPipeError):
                os._exit(1)
            except BaseException as problem:
                report = ("failed", _one_line(problem), _format(problem), is_consequence(problem))
                connection.send_bytes(pickle.dumps(report))
                os._exit(1)


def _call(job: Job) -> Any:
    function = job.function.load()
    arguments = pickle.loads(job.arguments)
    return function(*arguments)


@contextlib.contextmanager
def _job_scope(job: Job) -> Iterator[None]:
    """The group, seed, environment, import path and warning filters of one job."""
    environment = dict(os.environ)
    os.environ.update(_rank_environment(job))
    sys.path[:] = job.sys_path
    with warnings.catch_warnings():
        warnings.filters[:] = pickle.loads(job.warning_filters)  # type: ignore[index]
        torch.manual_seed(0)
        timeout = timedelta(seconds=job.timeout_s)
        store = dist.TCPStore("127.0.0.1", job.store_port, is_master=False, timeout=timeout)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"job{job.number}", store),
            rank=job.rank,
            world_size=job.world_size,
            timeout=timeout,
        )
        yield
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)


def _rank_environment(job: Job) -> dict[str, str]:
    """What torchrun would set, and a network interface that needs no host name look-up."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    found = {
        "RANK": str(job.rank),
        "LOCAL_RANK": str(job.rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size),
        "OMP_NUM_THREADS": "1",
    }
    if loopback is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        found["GLOO_SOCKET_IFNAME"] = loopback
    return found


def _one_line(problem: BaseException) -> str:
    return traceback.format_exception_only(problem)[-1].strip()


def _format(problem: BaseException) -> str:
    """The traceback without the frames of this file."""
    frame = problem.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(problem), problem, frame))
