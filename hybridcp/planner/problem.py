"""`Problem`: the question a plan answers, checked once."""

from dataclasses import dataclass
from typing import get_args

from hybridcp.errors import PlanError
from hybridcp.mask_text import parse_mask, parse_tokens
from hybridcp.masks import AttentionMask
from hybridcp.planner.cluster import Cluster, DtypeName

ITEM_BYTES: dict[DtypeName, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of one element; accumulators are float32 whatever the dtype."""

ACCUMULATOR_BYTES = 4


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention layer over the ranks of one context-parallel group.

    Attributes:
        heads: H, query heads (with tensor parallelism: of one tp rank).
        kv_heads: K, key/value heads.
        head_dim: D.
        seq_len: N, global tokens.
        batch: B, sequences.
        dtype: of q, k, v and out.
        mask: allowed (query, key) pairs.
        ranks: P, ranks of the group.
        cluster: where it runs.
    """

    heads: int
    kv_heads: int
    head_dim: int
    seq_len: int
    batch: int
    dtype: DtypeName
    mask: AttentionMask
    ranks: int
    cluster: Cluster

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of q, k, v and out."""
        return ITEM_BYTES[self.dtype]


def make_problem(
    *,
    heads: int,
    ranks: int,
    kv_heads: int | None,
    head_dim: int,
    seq_len: int | str,
    batch: int,
    dtype: str,
    mask: str | AttentionMask,
    cluster: Cluster,
) -> Problem:
    """Check every value of a question; see `Problem` for their meaning.

    Raises:
        PlanError: a value is impossible; the message names it and a remedy.
        MaskError: the mask text is wrong, or the mask does not fit `seq_len`.
    """
    counts = {"heads": heads, "ranks": ranks, "head_dim": head_dim, "batch": batch}
    if kv_heads is not None:
        counts["kv_heads"] = kv_heads
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PlanError(f"{name} must be a whole number ≥ 1, got {value!r}")
    if ranks > 1 << 17:
        raise PlanError(f"ranks must be at most {1 << 17} (131072), got {ranks}")
    kv = heads if kv_heads is None else kv_heads
    if heads % kv:
        nearest = max(k for k in range(1, min(kv, heads) + 1) if heads % k == 0)
        raise PlanError(
            f"kv_heads must divide heads, got {heads} heads and {kv} kv_heads; the nearest that "
            f"does is {nearest}"
        )
    if dtype not in get_args(DtypeName):
        raise PlanError(f"dtype must be one of {', '.join(get_args(DtypeName))}, got {dtype!r}")
    if dtype not in cluster.gpu.peak_tflops:
        raise PlanError(
            f"cluster {cluster.name} states no peak_tflops for {dtype}; it has "
            f"{', '.join(cluster.gpu.peak_tflops)}"
        )
    room = cluster.group_sizes[-1]
    if room is not None and ranks > room:
        raise PlanError(
            f"cluster {cluster.name} holds {room} ranks, but {ranks} were asked for; leave out "
            f"the size of its outermost level for as many as needed"
        )
    tokens = parse_tokens(seq_len, "seq_len", PlanError)
    allowed = parse_mask(mask) if isinstance(mask, str) else mask
    allowed.bands_for(tokens, tokens)
    return Problem(heads, kv, head_dim, tokens, batch, dtype, allowed, ranks, cluster)
