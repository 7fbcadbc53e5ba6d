"""One attention call to be run sharded, and the functions that run it on the ranks of a layout."""

from dataclasses import dataclass

import torch

from hybridcp import AttentionMask, HybridAttention, Layout, ShardedSequence, causal, init_mesh
from hybridcp.distributed import ContextParallelGroups
from hybridcp.testing import AttentionResult, assert_accurate


@dataclass(frozen=True)
class Case:
    """Sizes, mask and dtype; inputs follow from the seed."""

    seq_len: int
    mask: AttentionMask = causal()  # noqa: RUF009 -- frozen
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 8
    batch: int = 1
    dtype: torch.dtype = torch.float64
    kernel: str = "auto"
    softmax_scale: float | None = None
    seed: int = 0

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """q, k, v and dout of the whole sequence."""
        generator = torch.Generator().manual_seed(self.seed)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return tuple(
            torch.randn(
                self.batch, self.seq_len, h, self.head_dim, generator=generator, dtype=torch.float64
            ).to(self.dtype)
            for h in heads
        )

    def check(self, actual: AttentionResult) -> None:
        """Hold a result to single-device attention."""
        q, k, v, dout = self.inputs()
        for name in ("out", "dq", "dk", "dv"):
            assert getattr(actual, name).dtype == self.dtype
        try:
            assert_accurate(actual, q, k, v, dout, self.mask, self.softmax_scale)
        except AssertionError as problem:
            raise AssertionError(f"{self}: {problem}") from None


def check_all(cases: list[Case], results: list[list[AttentionResult]]) -> None:
    """Hold the first rank's results to single-device attention, and the others' to the first's."""
    for case, actual in zip(cases, results[0], strict=True):
        case.check(actual)
    for of_rank in results[1:]:
        for first, other in zip(results[0], of_rank, strict=True):
            for name in ("out", "dq", "dk", "dv"):
                assert torch.equal(getattr(first, name), getattr(other, name))


def run_case(
    layout: Layout, mesh: object, case: Case, attention: HybridAttention | None = None
) -> AttentionResult:
    """Forward and backward of one case on this rank; the global result, put back in order."""
    seq = ShardedSequence(layout, mesh, seq_len=case.seq_len, mask=case.mask)
    attention = attention or HybridAttention(layout, mesh, kernel=case.kernel)
    q, k, v, dout = (seq.shard(x, dim=1) for x in case.inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, seq, softmax_scale=case.softmax_scale)
    out.backward(dout)
    parts = [out.detach(), *(x.grad for x in leaves)]
    return AttentionResult(*(seq.unshard(x, dim=1) for x in parts))


def run_cases(layout: Layout, cases: list[Case]) -> list[AttentionResult]:
    """All cases on the ranks of a default process group."""
    mesh = init_mesh(layout, device_type="cpu")
    return [run_case(layout, mesh, case) for case in cases]


def run_cases_in_threads(
    groups: ContextParallelGroups, layout: Layout, cases: list[Case]
) -> list[AttentionResult]:
    """All cases on ranks that are threads."""
    return [run_case(layout, groups, case) for case in cases]
