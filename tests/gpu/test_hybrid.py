"""The executor on one GPU: the whole path of a rank, through NCCL's group of one."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from hybridcp import HybridAttention, Layout, ShardedSequence, causal, init_mesh
from hybridcp.masks import documents, sliding_window
from hybridcp.testing import AttentionResult, assert_accurate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYOUT = Layout(ulysses_degree=1, ring_degree=1)
MASKS = [causal(), sliding_window(100, 0), causal() & documents([1, 300, 211])]


@pytest.fixture(scope="module")
def mesh() -> Iterator[object]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_mesh(LAYOUT)
    dist.destroy_process_group()


def _run(mesh, mask, seed):
    torch.manual_seed(seed)
    seq = ShardedSequence(LAYOUT, mesh, seq_len=512, mask=mask)
    q, k, v, dout = (
        torch.randn(2, 512, heads, 64, device="cuda", dtype=torch.bfloat16)
        for heads in (8, 2, 2, 8)
    )
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = HybridAttention(LAYOUT, mesh)(*leaves, seq)
    out.backward(dout)
    result = AttentionResult(out.detach(), *(x.grad for x in leaves))
    return result, (q, k, v, dout)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_equals_single_device_attention(mesh, mask):
    result, inputs = _run(mesh, mask, seed=0)
    assert_accurate(result, *inputs, mask)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_same_inputs_same_bits(mesh, mask):
    first, second = (_run(mesh, mask, seed=1)[0] for _ in range(2))
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(getattr(first, name), getattr(second, name))
