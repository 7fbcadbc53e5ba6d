"""What `train_1m.py` shows: a progress bar or plain lines, a JSON log, a summary, a comparison."""

import json
import resource
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@dataclass(frozen=True)
class StepResult:
    """One optimiser step.

    Attributes:
        step: from 0.
        loss: mean over all targets of all ranks.
        gradient_norm: of the whole gradient, before clipping.
        tokens_per_s: global tokens, each once, by the time of the step.
        peak_memory_gib: so far, of the rank with the most.
    """

    step: int
    loss: float
    gradient_norm: float
    tokens_per_s: float
    peak_memory_gib: float

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f}  {self.tokens_per_s:,.0f} tokens/s  "
            f"peak memory {self.peak_memory_gib:.2f} GiB"
        )


class Reporter:
    """Shows steps as they come, on one rank; a context manager.

    Args:
        steps: how many there will be.
        shown: whether this rank reports at all.
        json_log: file for one JSON object a step.
    """

    def __init__(self, steps: int, *, shown: bool, json_log: Path | None = None) -> None:
        self.results: list[StepResult] = []
        self._steps = steps
        self._shown = shown
        self._json_log = json_log if shown else None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._log = (
            self._stack.enter_context(self._json_log.open("w", encoding="utf-8"))
            if self._json_log is not None
            else None
        )
        self._bar = None
        if self._shown and sys.stdout.isatty():
            # Narrow enough that a line fits 80 columns.
            columns = (
                BarColumn(bar_width=8),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = self._stack.enter_context(Progress(*columns, TimeRemainingColumn()))
            self._task = self._bar.add_task("first step", total=self._steps)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, result: StepResult) -> None:
        """Show and log one step."""
        self.results.append(result)
        if self._log is not None:
            print(json.dumps(asdict(result)), file=self._log, flush=True)
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=str(result))
        elif self._shown:
            print(f"step {result.step + 1}/{self._steps}  {result}", flush=True)


def peak_memory_gib(device: str) -> float:
    """The most memory this process has used so far: of the GPU, or resident on the CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # KiB on Linux, bytes on macOS.
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


def summary(results: Sequence[StepResult]) -> str:
    """First and last loss, speed without the first step, and peak memory."""
    # The first step also pays for what happens once: threads, connections, memory.
    timed = results[1:] or results
    seconds_per_token = sum(1 / result.tokens_per_s for result in timed) / len(timed)
    return (
        f"loss {results[0].loss:.4f} → {results[-1].loss:.4f} in {len(results)} steps, "
        f"{1 / seconds_per_token:,.0f} tokens/s, "
        f"peak memory {results[-1].peak_memory_gib:.2f} GiB a process"
    )


def comparison(name: str, split: Sequence[StepResult], single: Sequence[StepResult]) -> str:
    """Losses side by side."""
    lines = [f"{'step':>4}  {name:>24}  {'one process':>12}  {'difference':>10}"]
    for ours, reference in zip(split, single, strict=True):
        difference = ours.loss - reference.loss
        lines.append(
            f"{ours.step + 1:>4}  {ours.loss:>24.6f}  {reference.loss:>12.6f}  {difference:>+10.1e}"
        )
    largest = max(abs(a.loss - b.loss) for a, b in zip(split, single, strict=True))
    lines.append(f"largest difference {largest:.1e}")
    return "\n".join(lines)
