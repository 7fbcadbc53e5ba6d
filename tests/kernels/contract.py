"""What every kernel must do, as checks that raise AssertionError."""

import random

import torch
import torch.nn.functional as F

from hybridcp.kernels.protocol import AttentionKernel
from tests.kernels.brute_force import (
    Case,
    add_up,
    dense_attention,
    dense_gradients,
    key_blocks,
    merge,
    relative_error,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
# The log-sum-exp is float32 for 16-bit inputs, so it is held to more than the outputs are.
LSE_TOLERANCE = {**TOLERANCE, torch.bfloat16: 1e-4, torch.float16: 1e-4}


def check_kernel(kernel: AttentionKernel, case: Case, blocks: int = 1, seed: int = 0) -> None:
    """Forward pieces, their merge, and blockwise backward against dense float64."""
    check_pieces(kernel, case)
    rng = random.Random(seed)
    steps = key_blocks(rng, case.bands, case.k.shape[1], blocks) if case.bands else []
    dtype = case.q.dtype
    merged, lse = merge(
        (p for bands in steps for p in kernel.forward(*qkv(case), bands, case.scores)),
        case,
    )
    expected, expected_lse = dense_attention(
        *(x.double() for x in qkv(case)), case.allowed, case.scores
    )
    has_key = case.allowed.any(-1)
    assert relative_error(merged, expected) <= TOLERANCE[dtype]
    assert relative_error(lse[:, :, has_key], expected_lse[:, :, has_key]) <= LSE_TOLERANCE[dtype]

    for actual, wanted in zip(
        blockwise_gradients(kernel, case, steps, merged, lse), dense_gradients(case), strict=True
    ):
        assert relative_error(actual, wanted, floor=0.2) <= TOLERANCE[dtype]


def check_pieces(kernel: AttentionKernel, case: Case) -> None:
    """Shapes and dtypes of the pieces, and each log-sum-exp in natural logarithm."""
    batch, _, heads, _ = case.q.shape
    value_dim = case.v.shape[-1]
    count = torch.zeros(case.q.shape[1], dtype=torch.float64)
    for band in case.bands:
        total = torch.full((batch, heads, case.q.shape[1]), -torch.inf, dtype=torch.float64)
        for piece in kernel.forward(*qkv(case), (band,), case.scores):
            rows = torch.arange(case.q.shape[1])[piece.rows]
            assert piece.out.shape == (batch, len(rows), heads, value_dim)
            assert piece.lse.shape == (batch, heads, len(rows))
            assert piece.lse.dtype in (torch.float32, torch.float64)
            assert len(set(rows.tolist())) == len(rows)
            assert bool(piece.lse.isfinite().all()), "every row of a piece has a key"
            total[:, :, rows] = torch.logaddexp(total[:, :, rows], piece.lse.double())
            count[rows] += 1
        one = Case(*(x.double() for x in qkv(case)), case.dout, (band,), case.scores)
        _, wanted = dense_attention(one.q, one.k, one.v, one.allowed, one.scores)
        seen = slice(band.q0, band.q1)
        assert relative_error(total[..., seen], wanted[..., seen]) <= LSE_TOLERANCE[case.q.dtype]
        assert bool((total[..., ~one.allowed.any(-1)] == -torch.inf).all())


def blockwise_gradients(
    kernel: AttentionKernel,
    case: Case,
    steps: list,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Backward of each block with the global output and log-sum-exp, summed."""
    # An executor keeps both in float32; what a kernel needs it converts itself.
    wide = torch.promote_types(case.q.dtype, torch.float32)
    return add_up(
        (
            piece
            for bands in steps
            for piece in kernel.backward(
                case.dout,
                *qkv(case),
                out.to(wide),
                lse.to(wide),
                bands,
                case.scores,
            )
        ),
        case,
    )


def check_rounding(kernel: AttentionKernel, case: Case, blocks: int) -> None:
    """Errors of the blockwise result are at most 1.5 times those of one attention call."""
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in qkv(case)]
    single = F.scaled_dot_product_attention(
        *leaves, attn_mask=case.allowed, scale=case.scores.softmax_scale, enable_gqa=True
    )
    single_gradients = torch.autograd.grad(single, leaves, case.dout.transpose(1, 2))
    single_results = [x.detach().transpose(1, 2) for x in (single, *single_gradients)]

    steps = key_blocks(random.Random(0), case.bands, case.k.shape[1], blocks)
    out, lse = merge(
        (p for bands in steps for p in kernel.forward(*qkv(case), bands, case.scores)),
        case,
    )
    results = [out, *blockwise_gradients(kernel, case, steps, out, lse)]
    expected_out, _ = dense_attention(*(x.double() for x in qkv(case)), case.allowed, case.scores)
    for name, actual, reference, expected in zip(
        ("out", "dq", "dk", "dv"),
        results,
        single_results,
        (expected_out, *dense_gradients(case)),
        strict=True,
    ):
        error, limit = relative_error(actual, expected), relative_error(reference, expected)
        assert error <= 1.5 * limit, f"{name}: {error:.2e}, one call makes {limit:.2e}"


def qkv(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return case.q, case.k, case.v
