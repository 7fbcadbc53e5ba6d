"""`PlanResult`: the answer to a planning question, for programs (`to_dict`) and people (`str`)."""

from dataclasses import asdict, dataclass
from typing import Any

from hybridcp.errors import PlanError
from hybridcp.planner.cost import PassTime
from hybridcp.planner.problem import Problem
from hybridcp.planner.search import MODEL_ERROR, Candidate, Rejected

RESULT_VERSION = 1
"""Version of `PlanResult.to_dict`."""


@dataclass(frozen=True, slots=True)
class PlanResult:
    """Every layout of a problem, best first, with what was rejected and what was assumed.

    Attributes:
        problem: the question.
        candidates: layouts that fit, best first.
        rejected: splits that do not, with the reason.
        assumptions: what was not asked but decided, in words.
        notes: what else to know, in words.
    """

    problem: Problem
    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    assumptions: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def best(self) -> Candidate:
        """The first candidate.

        Raises:
            PlanError: no layout fits.
        """
        if not self.candidates:
            raise PlanError(
                f"no layout of {self.problem.ranks} ranks fits: "
                + "; ".join(f"ulysses {r.ulysses_degree}: {r.text}" for r in self.rejected)
            )
        return self.candidates[0]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, for JSON. Times in seconds, sizes in bytes."""
        return {
            "version": RESULT_VERSION,
            "problem": _problem_dict(self.problem),
            "assumptions": list(self.assumptions),
            "notes": list(self.notes),
            "model_error": MODEL_ERROR,
            "candidates": [_candidate_dict(candidate) for candidate in self.candidates],
            "rejected": [asdict(rejected) for rejected in self.rejected],
        }

    def __str__(self) -> str:
        from hybridcp.planner.report import report

        return report(self)


def _problem_dict(problem: Problem) -> dict[str, Any]:
    return {
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "head_dim": problem.head_dim,
        "seq_len": problem.seq_len,
        "batch": problem.batch,
        "dtype": problem.dtype,
        "mask": str(problem.mask),
        "ranks": problem.ranks,
        "cluster": problem.cluster.name,
    }


def _candidate_dict(candidate: Candidate) -> dict[str, Any]:
    price = candidate.price
    return {
        "layout": candidate.layout.model_dump(),
        "tie": candidate.tie,
        "total_s": candidate.total_s,
        "forward": _pass_dict(price.forward),
        "backward": _pass_dict(price.backward),
        "sent_bytes": asdict(price.sent),
        "memory_bytes": {
            "forward": candidate.memory.forward,
            "backward": candidate.memory.backward,
            "peak": candidate.memory.peak_bytes,
        },
        "all_to_all_level": price.all_to_all_level,
        "ring_level": price.ring_level,
        "busiest_share": price.busiest_share,
        "warnings": list(candidate.warnings),
    }


def _pass_dict(time: PassTime) -> dict[str, Any]:
    # JSON has no infinity: without a ring there is no hop and no margin.
    data = asdict(time) | {"total_s": time.total_s}
    if not time.hop_s:
        data["hop_margin"] = None
    return data
