"""The CUDA kernels themselves, where there is a GPU."""

import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from hybridcp.kernels.cuda import cuda_kernel
from hybridcp.kernels.flash_attn import flash_attn_kernel
from hybridcp.kernels.protocol import (
    AttentionKernel,
    Partial,
    PartialGradients,
    Request,
    Rows,
    Scores,
)
from hybridcp.kernels.reference import ReferenceKernel
from hybridcp.masks import Band, causal, documents, sliding_window
from tests.kernels.brute_force import make_case, random_bands
from tests.kernels.contract import check_kernel, check_rounding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KERNELS: list[AttentionKernel] = [cuda_kernel(), flash_attn_kernel(), ReferenceKernel()]


class OnGpu:
    """A kernel that takes and gives CPU tensors and computes on the GPU."""

    def __init__(self, kernel: AttentionKernel) -> None:
        self.name = kernel.name
        self.kernel = kernel

    def refusal(self, request: Request) -> str | None:
        return self.kernel.refusal(request)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bands: Sequence[Band],
        scores: Scores,
    ) -> Iterator[Partial]:
        for piece in self.kernel.forward(q.cuda(), k.cuda(), v.cuda(), bands, scores):
            yield Partial(_cpu_rows(piece.rows), piece.out.cpu(), piece.lse.cpu())

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        bands: Sequence[Band],
        scores: Scores,
    ) -> Iterator[PartialGradients]:
        inputs = (x.cuda() for x in (dout, q, k, v, out, lse))
        for piece in self.kernel.backward(*inputs, bands, scores):
            yield PartialGradients(
                _cpu_rows(piece.q_rows),
                _cpu_rows(piece.k_rows),
                piece.dq.cpu(),
                piece.dk.cpu(),
                piece.dv.cpu(),
            )


def _cpu_rows(rows: Rows) -> Rows:
    return rows.cpu() if isinstance(rows, torch.Tensor) else rows


@pytest.fixture(params=KERNELS, ids=lambda kernel: kernel.name)
def kernel(request: pytest.FixtureRequest) -> OnGpu:
    served = Request("cuda", torch.bfloat16, 64, 64)
    refusal = request.param.refusal(served)
    if refusal is not None:
        pytest.skip(refusal)
    return OnGpu(request.param)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_random_bands_on_the_gpu(kernel: OnGpu, dtype: torch.dtype) -> None:
    rng = random.Random(7)
    for seed in range(40):
        q_len, k_len = rng.randint(1, 400), rng.randint(1, 400)
        bands = random_bands(rng, q_len, k_len)
        case = make_case(
            bands,
            q_len,
            k_len,
            batch=rng.randint(1, 2),
            heads=4,
            kv_heads=rng.choice([1, 2, 4]),
            head_dim=rng.choice([33, 64, 128]),
            dtype=dtype,
            seed=seed,
        )
        check_kernel(kernel, case, blocks=rng.randint(1, 3), seed=seed)


@pytest.mark.parametrize(
    ("bands", "q_len", "k_len"),
    [
        ((Band(0, 1, 0, 40),), 1, 40),
        ((Band(0, 1, 0, 40), Band(1, 2, 40, 70)), 2, 70),
        ((Band(0, 900, 0, 100, hi=0),), 900, 100),
        ((Band(0, 900, 0, 100, lo=-850),), 900, 100),
        ((documents([300, 1, 20, 700]) & sliding_window(90, 0)).bands_for(1021, 1021), 1021, 1021),
    ],
    ids=["one-query", "one-query-each", "tall-causal", "tall-lo", "documents-window"],
)
def test_shapes_where_flash_attn_takes_another_path(
    kernel: OnGpu, bands: tuple[Band, ...], q_len: int, k_len: int
) -> None:
    case = make_case(
        bands, q_len, k_len, batch=2, heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16
    )
    check_kernel(kernel, case)


def test_bfloat16_error_on_the_gpu_is_that_of_one_attention_call(kernel: OnGpu) -> None:
    bands = causal().bands_for(1024, 1024)
    case = make_case(
        bands, 1024, 1024, heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16, seed=3
    )
    check_rounding(kernel, case, blocks=4)
