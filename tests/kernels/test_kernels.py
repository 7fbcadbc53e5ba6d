"""Every kernel against dense float64, the CUDA ones over stand-ins of their functions."""

import inspect
import random
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hybridcp.kernels.cpu import CpuKernel
from hybridcp.kernels.cuda import cuda_kernel
from hybridcp.kernels.flash_attn import FlashAttnPackage, flash_attn_kernel
from hybridcp.kernels.protocol import AttentionKernel, Partial, Scores
from hybridcp.kernels.reference import ReferenceKernel
from hybridcp.masks import UNBOUNDED, AttentionMask, Band, causal, documents, full, sliding_window
from tests.kernels import flash_attn_stand_in, torch_flash_stand_in
from tests.kernels.brute_force import Case, make_case, merge, random_bands
from tests.kernels.contract import check_kernel, check_pieces, check_rounding, qkv

KERNELS: dict[str, AttentionKernel] = {
    "reference": ReferenceKernel(),
    "cpu": CpuKernel(),
    "cuda": cuda_kernel(
        torch_flash_stand_in.flash_attention_forward, torch_flash_stand_in.flash_attention_backward
    ),
    "flash_attn": flash_attn_kernel(lambda: FlashAttnPackage("2.8.3", flash_attn_stand_in)),
}
EVERY_DTYPE = ("reference", "cpu")
SERVED = [
    *((name, dtype) for name in EVERY_DTYPE for dtype in (torch.float64, torch.float32)),
    *((name, torch.bfloat16) for name in KERNELS),
    *((name, torch.float16) for name in KERNELS),
]
served = pytest.mark.parametrize(
    ("name", "dtype"),
    SERVED,
    ids=[f"{name}-{str(dtype).removeprefix('torch.')}" for name, dtype in SERVED],
)
MASKS = {
    "full": full(),
    "causal": causal(),
    "window": sliding_window(20, 0),
    "window-both": sliding_window(9, 5),
    "own-key": sliding_window(0, 0),
    "future-only": sliding_window(0, -1),
    "documents": documents([7, 7, 7, 1, 30, 12]) & causal(),
    "documents-window": documents([7, 7, 7, 1, 30, 12]) & sliding_window(4, 0),
    "prefix": AttentionMask((Band(0, UNBOUNDED, 0, 10), Band(0, UNBOUNDED, 10, UNBOUNDED, hi=0))),
}


def mask_case(mask: AttentionMask, length: int, **kwargs: object) -> Case:
    return make_case(mask.bands_for(length, length), length, length, **kwargs)


@served
def test_random_bands(name: str, dtype: torch.dtype) -> None:
    rng = random.Random(1)
    for seed in range(60):
        q_len, k_len = rng.randint(1, 40), rng.randint(1, 40)
        case = make_case(random_bands(rng, q_len, k_len), q_len, k_len, dtype=dtype, seed=seed)
        check_kernel(KERNELS[name], case, blocks=rng.randint(1, 4), seed=seed)


@served
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks_in_four_blocks(name: str, dtype: torch.dtype, mask: AttentionMask) -> None:
    case = mask_case(mask, 64, dtype=dtype, heads=4, batch=2)
    check_kernel(KERNELS[name], case, blocks=4)


@served
@pytest.mark.parametrize("kv_heads", [1, 2, 6], ids=["mqa", "gqa", "mha"])
@pytest.mark.parametrize("head_dim", [8, 33, 64])
def test_heads_and_head_dims(name: str, dtype: torch.dtype, kv_heads: int, head_dim: int) -> None:
    case = mask_case(
        sliding_window(6, 2) & documents([13, 11]),
        24,
        dtype=dtype,
        batch=2,
        heads=6,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    check_kernel(KERNELS[name], case, blocks=3)


@served
@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 16), (24, 16), (33, 8)])
def test_values_of_another_head_dim(
    name: str, dtype: torch.dtype, head_dim: int, value_dim: int
) -> None:
    case = mask_case(
        sliding_window(6, 2) & documents([13, 11]),
        24,
        dtype=dtype,
        batch=2,
        heads=4,
        head_dim=head_dim,
        value_dim=value_dim,
    )
    check_kernel(KERNELS[name], case, blocks=3)


@pytest.mark.parametrize("softcap", [0.5, 5.0, 30.0])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("reference", torch.float64), ("reference", torch.float32), ("flash_attn", torch.bfloat16)],
    ids=["reference-float64", "reference-float32", "flash_attn-bfloat16"],
)
def test_softcap(name: str, dtype: torch.dtype, softcap: float) -> None:
    mask = causal() & documents([13, 11])
    case = mask_case(mask, 24, dtype=dtype, batch=2, heads=4, softcap=softcap, logit_gain=3.0)
    check_kernel(KERNELS[name], case, blocks=3)


@served
@pytest.mark.parametrize(
    ("band", "q_len", "k_len"),
    [
        (Band(0, 1, 0, 1), 1, 1),
        (Band(0, 1, 2, 9), 1, 9),
        (Band(3, 9, 0, 1), 9, 1),
        (Band(0, 100, 0, 10, hi=0), 100, 10),
        (Band(0, 100, 0, 10, lo=-95), 100, 10),
        (Band(0, 100, 0, 10, lo=-95, hi=3), 100, 10),
        (Band(0, 12, 0, 12, lo=0, hi=0), 12, 12),
    ],
    ids=["1x1", "one-query", "one-key", "tall-causal", "tall-lo", "tall-both", "diagonal"],
)
def test_extreme_shapes(name: str, dtype: torch.dtype, band: Band, q_len: int, k_len: int) -> None:
    check_kernel(KERNELS[name], make_case([band], q_len, k_len, dtype=dtype, batch=2, kv_heads=1))


@served
def test_rows_longer_than_a_block_of_the_reference(name: str, dtype: torch.dtype) -> None:
    mask = sliding_window(700, 3)
    check_kernel(KERNELS[name], mask_case(mask, 1100, dtype=dtype, heads=1, kv_heads=1), blocks=2)


@served
def test_strided_inputs(name: str, dtype: torch.dtype) -> None:
    case = mask_case(causal() & documents([10, 4, 4, 7]), 25, dtype=dtype, batch=2)
    packed = torch.stack([case.q, case.k, case.v], 2)
    strided = Case(
        packed[:, :, 0],
        packed[:, :, 1].transpose(1, 2).contiguous().transpose(1, 2),
        packed[:, :, 2],
        case.dout.transpose(1, 2).contiguous().transpose(1, 2),
        case.bands,
        case.scores,
    )
    check_kernel(KERNELS[name], strided, blocks=3)


@served
def test_a_query_that_follows_gaps_and_no_bands(name: str, dtype: torch.dtype) -> None:
    bands = (Band(2, 6, 1, 5, hi=-1), Band(9, 13, 7, 11, hi=-2), Band(20, 22, 15, 17, hi=-5))
    check_kernel(KERNELS[name], make_case(bands, 24, 20, dtype=dtype, batch=2), blocks=2)
    empty = make_case((), 4, 4, dtype=dtype)
    assert not list(KERNELS[name].forward(*qkv(empty), (), Scores(1.0)))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_bfloat16_error_is_that_of_one_attention_call(name: str, mask: str) -> None:
    case = mask_case(
        MASKS[mask], 256, dtype=torch.bfloat16, heads=4, kv_heads=2, head_dim=64, seed=3
    )
    check_rounding(KERNELS[name], case, blocks=4)


@served
def test_extreme_logits(name: str, dtype: torch.dtype) -> None:
    # A softmax of logits near 1e4 has float32 rounding of 1e-3, whoever computes it.
    case = mask_case(causal(), 48, dtype=dtype, logit_gain=3e3, seed=5)
    kernel = KERNELS[name]
    check_pieces(kernel, case)
    out, lse = merge(kernel.forward(*qkv(case), case.bands, case.scores), case)
    assert float(lse.abs().max()) > 1e3
    gradients = kernel.backward(
        case.dout,
        *qkv(case),
        out.to(dtype),
        lse.to(torch.promote_types(dtype, torch.float32)),
        case.bands,
        case.scores,
    )
    for piece in gradients:
        assert all(bool(x.isfinite().all()) for x in (piece.dq, piece.dk, piece.dv))
    if dtype == torch.float64:
        check_kernel(kernel, mask_case(causal(), 48, dtype=dtype, logit_gain=10.0))


@pytest.mark.parametrize("name", KERNELS)
def test_two_runs_agree_bit_for_bit(name: str) -> None:
    case = mask_case(MASKS["documents-window"], 64, dtype=torch.bfloat16, batch=2)
    first, second = (
        list(KERNELS[name].forward(*qkv(case), case.bands, case.scores)) for _ in range(2)
    )
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.out, b.out)
        assert torch.equal(a.lse, b.lse)


class BaseTwo(ReferenceKernel):
    """Wrong on purpose: a log-sum-exp in base 2, as some GPU kernels keep it inside."""

    def forward(self, *args: object) -> Iterator[Partial]:
        for partial in super().forward(*args):
            yield Partial(partial.rows, partial.out, partial.lse / torch.log(torch.tensor(2.0)))


def test_the_checks_catch_a_log_sum_exp_in_base_two() -> None:
    with pytest.raises(AssertionError):
        check_pieces(BaseTwo(), mask_case(causal(), 16))
    with pytest.raises(AssertionError):
        check_kernel(BaseTwo(), mask_case(full(), 16), blocks=2)


class LargestTensor(TorchDispatchMode):
    """Records the element count of the largest tensor that any operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for x in results if isinstance(results, tuple | list) else (results,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return results


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("mask", ["full", "causal", "window-both"])
def test_memory_is_linear_in_the_sequence(name: str, mask: str) -> None:
    def largest(length: int) -> int:
        case = mask_case(MASKS[mask], length, dtype=torch.float32, heads=1, kv_heads=1)
        kernel = KERNELS[name]
        with LargestTensor() as recorder:
            partials = list(kernel.forward(*qkv(case), case.bands, case.scores))
            out, lse = case.q, partials[0].lse.new_zeros(1, 1, length)
            list(kernel.backward(case.dout, *qkv(case), out, lse, case.bands, case.scores))
        return recorder.elements

    bound = 128 * 512
    assert largest(1024) <= bound
    assert largest(2048) <= bound


def test_the_reference_ignores_autocast() -> None:
    case = mask_case(causal(), 32, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        partials = list(ReferenceKernel().forward(*qkv(case), case.bands, case.scores))
    expected = list(ReferenceKernel().forward(*qkv(case), case.bands, case.scores))
    assert torch.equal(partials[0].out, expected[0].out)


@pytest.mark.parametrize(
    ("stand_in", "operator"),
    [
        (torch_flash_stand_in.flash_attention_forward, "_flash_attention_forward"),
        (torch_flash_stand_in.flash_attention_backward, "_flash_attention_backward"),
    ],
    ids=["forward", "backward"],
)
def test_the_stand_in_has_the_arguments_of_torchs_operator(stand_in, operator: str) -> None:
    schema = getattr(torch.ops.aten, operator).default._schema
    parameters = inspect.signature(stand_in).parameters.values()
    assert [(p.name, p.kind == p.KEYWORD_ONLY) for p in parameters] == [
        (argument.name, argument.kwarg_only) for argument in schema.arguments
    ]


@pytest.mark.parametrize("mask", ["full", "causal", "documents", "documents-window"])
def test_torchs_own_operators_take_the_calls_of_the_cuda_kernel(mask: str) -> None:
    kernel = cuda_kernel()
    bands = MASKS[mask].bands_for(64, 64)
    q = torch.empty(2, 64, 4, 33, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 64, 2, 33, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(2, 4, 64, device="meta")
    for partial in kernel.forward(q, k, k, bands, Scores(0.5)):
        rows = partial.out.shape[1]
        assert partial.out.shape == (2, rows, 4, 33)
        assert partial.lse.shape == (2, 4, rows)
    for piece in kernel.backward(q, q, k, k, q, lse, bands, Scores(0.5)):
        assert piece.dq.shape[2:] == (4, 33)
        assert piece.dk.shape[2:] == piece.dv.shape[2:] == (2, 33)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("mask", ["causal", "window-both", "documents"])
def test_fake_tensors_have_the_shapes_of_real_ones(name: str, mask: str) -> None:
    case = mask_case(MASKS[mask], 64, dtype=torch.bfloat16, batch=2, heads=4)
    kernel = KERNELS[name]
    lse = torch.zeros(2, 4, 64)

    def shapes(q, k, v, lse):
        partials = kernel.forward(q, k, v, case.bands, Scores(0.5))
        gradients = kernel.backward(q, q, k, v, q, lse, case.bands, Scores(0.5))
        return [
            (x.shape, x.dtype)
            for piece in (*partials, *gradients)
            for x in (getattr(piece, field, None) for field in ("out", "lse", "dq", "dk", "dv"))
            if x is not None
        ]

    real = shapes(*qkv(case), lse)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (*qkv(case), lse)]
        assert shapes(*fakes) == real
