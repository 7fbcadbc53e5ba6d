"""`plan`: from two numbers to a ranked list of layouts."""

from math import gcd
from pathlib import Path

from hybridcp.masks import AttentionMask, causal, full
from hybridcp.planner.cluster import Cluster, load_cluster
from hybridcp.planner.problem import Problem, make_problem
from hybridcp.planner.result import PlanResult
from hybridcp.planner.search import MOST_BALANCED_POSITIONS, search
from hybridcp.planner.units import count_of, format_tokens
from hybridcp.planner.work import EXACT_RING_DEGREE, SAMPLED_POSITIONS, is_uniform


def plan(
    heads: int,
    ranks: int,
    *,
    kv_heads: int | None = None,
    head_dim: int = 128,
    seq_len: int | str = "1M",
    batch: int = 1,
    dtype: str = "bf16",
    mask: str | AttentionMask = "causal",
    cluster: str | Path | Cluster = "h100-8",
) -> PlanResult:
    """How to split ranks into Ulysses × ring for one attention layer.

        result = plan(heads=32, kv_heads=8, ranks=256)
        print(result); result.best.layout.save("layout.yaml")

    Args:
        heads: H, query heads. With tensor parallelism: heads of one tp rank.
        ranks: P, ranks that share one sequence.
        kv_heads: K, key/value heads, a divisor of `heads`; all heads by default.
        head_dim: D.
        seq_len: N, global tokens: a number, or text such as "128k" or "1M" (powers of two).
        batch: sequences at once.
        dtype: "bf16", "fp16" or "fp32".
        mask: an `AttentionMask`, or its text form: "causal", "full", "window:4095",
            "causal & documents:128k*8".
        cluster: a preset (`h100-8`), a YAML file, or a `Cluster`.

    Raises:
        PlanError: impossible numbers.
        MaskError: a mask that cannot be read or does not fit `seq_len`.
        ClusterError: a cluster that is unknown or cannot be read.
    """
    machines = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    problem = make_problem(
        heads=heads,
        ranks=ranks,
        kv_heads=kv_heads,
        head_dim=head_dim,
        seq_len=seq_len,
        batch=batch,
        dtype=dtype,
        mask=mask,
        cluster=machines,
    )
    candidates, rejected = search(problem)
    return PlanResult(
        problem=problem,
        candidates=tuple(candidates),
        rejected=tuple(rejected),
        assumptions=tuple(_assumptions(problem)),
        notes=tuple(_notes(problem)),
    )


def _assumptions(problem: Problem) -> list[str]:
    assumed = [
        f"{problem.kv_heads} kv_heads",
        f"head_dim {problem.head_dim}",
        f"{format_tokens(problem.seq_len)} tokens, batch {problem.batch}",
        f"mask {problem.mask}",
        problem.dtype,
        f"cluster {problem.cluster.name}",
        "ranks of a sequence are consecutive",
        "times are of attention alone, without projections",
    ]
    if not is_uniform(problem.mask):
        assumed.append("ring positions wait for the slowest at each step")
        if problem.ranks > EXACT_RING_DEGREE:
            assumed.append(
                f"of rings above {EXACT_RING_DEGREE}, {SAMPLED_POSITIONS} positions are priced"
            )
    if problem.ranks > MOST_BALANCED_POSITIONS and problem.mask not in (causal(), full()):
        assumed.append(f"balanced shardings are searched for rings up to {MOST_BALANCED_POSITIONS}")
    return assumed


def _notes(problem: Problem) -> list[str]:
    """Why Ulysses stops where it does, and what would let it go further."""
    ranks, heads = problem.ranks, problem.heads
    largest = gcd(heads, ranks)
    notes = []
    if ranks > 1 and largest == 1:
        near = next((p for p in range(ranks - 1, 1, -1) if gcd(heads, p) > 1), None)
        note = f"no ulysses_degree above 1 divides both {heads} heads and {ranks} ranks: ring only"
        if near is not None:
            note += f"; {count_of(near, 'rank')} would allow ulysses {gcd(heads, near)}"
        notes.append(note)
    if problem.kv_heads < largest:
        notes.append(
            f"above ulysses {problem.kv_heads} (the kv_heads) keys and values are sent to several "
            "ranks, so ring traffic no longer falls"
        )
    return notes
