"""Peak memory of one attention layer on one rank, listed by what it is.

Counted are the tensors of attention itself while the ring runs, when they are most. Not counted:
projections, weights, optimizer, other layers' activations, the kernel's workspace, and All-to-All
buffers, which are gone by then. L tokens of a rank, S of its ring position, h = H/U query heads
and n key/value heads of a rank.
"""

from dataclasses import dataclass

from hybridcp.planner.problem import ACCUMULATOR_BYTES, Problem
from hybridcp.planner.traffic import HeadCounts, head_counts, kv_block_bytes
from hybridcp.sharding import Sharding


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by tensor, at the peak of each pass, on the rank that needs most.

    `local_`: of the rank's own tokens and all heads; others: of its ring position's tokens and its
    own heads. `saved_`: kept from the forward pass. `_hops`: blocks present or arriving, and in
    the backward pass the last block of the forward, kept. `_fp32`: accumulators in float32.
    """

    forward: dict[str, int]
    backward: dict[str, int]

    @property
    def forward_bytes(self) -> int:
        """Sum of the forward pass."""
        return sum(self.forward.values())

    @property
    def backward_bytes(self) -> int:
        """Sum of the backward pass."""
        return sum(self.backward.values())

    @property
    def peak_bytes(self) -> int:
        """The larger of both."""
        return max(self.forward_bytes, self.backward_bytes)


def attention_memory(problem: Problem, sharding: Sharding) -> Memory:
    """Memory of the largest ring position and rank."""
    degree = sharding.ring_degree
    ring_rows = max(sharding.ring_len(r) for r in range(degree))
    local_rows = -(-ring_rows // sharding.ulysses_degree)
    heads = head_counts(problem.heads, problem.kv_heads, sharding.ulysses_degree)
    return Memory(
        forward=_forward(problem, heads, local_rows, ring_rows, degree),
        backward=_backward(problem, heads, local_rows, ring_rows, degree),
    )


def query_bytes(problem: Problem, rows: int, heads: int, item_bytes: int) -> int:
    """Bytes of a (batch, rows, heads, head_dim) tensor."""
    return rows * heads * problem.head_dim * problem.batch * item_bytes


def lse_bytes(problem: Problem, rows: int, heads: int) -> int:
    """Bytes of the (batch, heads, rows) float32 log-sum-exp."""
    return rows * heads * problem.batch * ACCUMULATOR_BYTES


def _forward(
    problem: Problem, heads: HeadCounts, local_rows: int, ring_rows: int, degree: int
) -> dict[str, int]:
    item, queries = problem.item_bytes, heads.queries
    block = kv_block_bytes(problem, ring_rows, max(heads.keys))
    local = query_bytes(problem, local_rows, problem.heads, item)
    local += kv_block_bytes(problem, local_rows, problem.kv_heads)
    return {
        "local_qkv": local,
        "q": query_bytes(problem, ring_rows, queries, item),
        "kv": block,
        "kv_hops": block * min(2, degree - 1),
        "partial_out": query_bytes(problem, ring_rows, queries, item),
        "partial_out_fp32": query_bytes(problem, ring_rows, queries, ACCUMULATOR_BYTES),
        "out_fp32": query_bytes(problem, ring_rows, queries, ACCUMULATOR_BYTES),
        "lse_fp32": 2 * lse_bytes(problem, ring_rows, queries),
    }


def _backward(
    problem: Problem, heads: HeadCounts, local_rows: int, ring_rows: int, degree: int
) -> dict[str, int]:
    item, queries = problem.item_bytes, heads.queries
    keys = max(heads.keys)
    block = kv_block_bytes(problem, ring_rows, keys)
    gradient_block = block // item * ACCUMULATOR_BYTES
    per_query = query_bytes(problem, ring_rows, queries, item)
    return {
        "local_dout": query_bytes(problem, local_rows, problem.heads, item),
        "saved_q_out_lse": 2 * per_query + lse_bytes(problem, ring_rows, queries),
        "saved_kv": block,
        "kv_hops": block * min(3, degree - 1),
        "dout": per_query,
        "dq_fp32": query_bytes(problem, ring_rows, queries, ACCUMULATOR_BYTES),
        "dkv_fp32": gradient_block * (3 if degree > 1 else 1),
        "partial_dqkv": per_query + block,
    }
