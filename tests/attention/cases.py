"""One attention call to be run sharded, and the functions that run it on the ranks of a layout."""

from dataclasses import dataclass

import torch

from hybridcp import AttentionMask, HybridAttention, Layout, ShardedSequence, causal, init_mesh
from hybridcp.distributed import ContextParallelGroups
from hybridcp.testing import AttentionResult, assert_accurate
from hybridcp.training import sum_over_ranks


@dataclass(frozen=True)
class Case:
    """Sizes, mask and dtype; inputs follow from the seed."""

    seq_len: int
    mask: AttentionMask = causal()  # noqa: RUF009 -- frozen
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 8
    value_dim: int | None = None
    batch: int = 1
    dtype: torch.dtype = torch.float64
    kernel: str = "auto"
    softmax_scale: float | None = None
    softcap: float = 0.0
    has_sinks: bool = False
    strided: bool = False
    seed: int = 0

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """q, k, v and dout of the whole sequence."""
        generator = torch.Generator().manual_seed(self.seed)
        value_dim = self.value_dim or self.head_dim
        shapes = [
            (self.heads, self.head_dim),
            (self.kv_heads, self.head_dim),
            (self.kv_heads, value_dim),
            (self.heads, value_dim),
        ]
        return tuple(
            torch.randn(
                self.batch, self.seq_len, *shape, generator=generator, dtype=torch.float64
            ).to(self.dtype)
            for shape in shapes
        )

    def sinks(self) -> torch.Tensor | None:
        """One logit a head, float32 as a model has them (float64 in float64)."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        logits = torch.randn(self.heads, generator=generator, dtype=torch.float64)
        narrow = torch.float64 if self.dtype == torch.float64 else torch.float32
        return logits.to(narrow) if self.has_sinks else None

    def check(self, actual: AttentionResult) -> None:
        """Hold a result to single-device attention."""
        for name in ("out", "dq", "dk", "dv"):
            assert getattr(actual, name).dtype == self.dtype
        try:
            assert_accurate(actual, *self.inputs(), self.mask, **self.options())
        except AssertionError as problem:
            raise AssertionError(f"{self}: {problem}") from None

    def options(self) -> dict[str, object]:
        """Keywords of the functions in `hybridcp.testing`."""
        return {
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
            "sinks": self.sinks(),
        }


def check_all(cases: list[Case], results: list[list[AttentionResult]]) -> None:
    """Hold the first rank's results to single-device attention, and the others' to the first's."""
    for case, actual in zip(cases, results[0], strict=True):
        case.check(actual)
    for of_rank in results[1:]:
        for first, other in zip(results[0], of_rank, strict=True):
            for name in ("out", "dq", "dk", "dv", "lse"):
                assert torch.equal(getattr(first, name), getattr(other, name))


def run_case(
    layout: Layout, mesh: object, case: Case, attention: HybridAttention | None = None
) -> AttentionResult:
    """Forward and backward of one case on this rank; the global result, put back in order."""
    seq = ShardedSequence(layout, mesh, seq_len=case.seq_len, mask=case.mask)
    attention = attention or HybridAttention(layout, mesh, kernel=case.kernel)
    q, k, v, dout = (seq.shard(x, dim=1) for x in case.inputs())
    leaves = [(_strided(x) if case.strided else x).requires_grad_() for x in (q, k, v)]
    sinks = case.sinks()
    if sinks is not None:
        sinks.requires_grad_()
    out, lse = attention(
        *leaves,
        seq,
        softmax_scale=case.softmax_scale,
        softcap=case.softcap,
        sinks=sinks,
        return_lse=True,
    )
    out.backward(dout)
    parts = [out.detach(), *(x.grad for x in leaves)]
    return AttentionResult(
        *(seq.unshard(x, dim=1) for x in parts),
        lse=seq.unshard(lse, dim=2),
        dsinks=None if sinks is None else sum_over_ranks(sinks.grad, seq.groups),
    )


def _strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, heads before rows in memory and each row with a gap."""
    wide = torch.stack([x, x], dim=-2).transpose(1, 2).contiguous().transpose(1, 2)
    return wide[..., 0, :].detach()


def run_cases(layout: Layout, cases: list[Case]) -> list[AttentionResult]:
    """All cases on the ranks of a default process group."""
    mesh = init_mesh(layout, device_type="cpu")
    return [run_case(layout, mesh, case) for case in cases]


def run_cases_in_threads(
    groups: ContextParallelGroups, layout: Layout, cases: list[Case]
) -> list[AttentionResult]:
    """All cases on ranks that are threads."""
    return [run_case(layout, groups, case) for case in cases]
