"""What went wrong on which rank, root cause first.

Both runners, worker processes and threads, turn what each rank reports into one
`DistributedTestError`. When one rank fails, the others see its connections close; their errors
are consequences and are told apart from the cause here.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed|gloo.*closed"
    r"|remote.*(closed|exited)|recvValue failed|sendBytes failed",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How one rank failed.

    Attributes:
        rank: rank within the run.
        where: how to name it in a message: "rank 3", or with its coordinates.
        summary: one line: exception, signal, or what it was stopped for.
        details: traceback or stack of every thread; may be empty.
        consequence: the rank only saw that another one was gone, or was stopped because of it.
    """

    rank: int
    where: str
    summary: str
    details: str = ""
    consequence: bool = False


class DistributedTestError(RuntimeError):
    """A distributed function failed on at least one rank.

    Attributes:
        failures: one for each failing rank, root causes first.
    """

    def __init__(self, headline: str, failures: Iterable[RankFailure]) -> None:
        self.failures = tuple(sorted(failures, key=lambda f: (f.consequence, f.rank)))
        sections = [
            "\n".join(
                part
                for part in (f"── {f.where}{_note(f)}: {f.summary}", f.details.rstrip())
                if part
            )
            for f in self.failures
        ]
        super().__init__("\n\n".join([headline, *sections]))


def is_consequence(problem: BaseException) -> bool:
    """Whether an exception says no more than that another rank is gone."""
    return isinstance(problem, RuntimeError | OSError) and bool(_CONSEQUENCE.search(str(problem)))


def _note(failure: RankFailure) -> str:
    return " (a consequence)" if failure.consequence else ""
