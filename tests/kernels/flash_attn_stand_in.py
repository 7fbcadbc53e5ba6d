"""A stand-in for flash_attn.flash_attn_interface 2.8.3: its signatures over plain torch."""

import torch

from tests.kernels import flash_math

__version__ = "2.8.3"


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    flash_math.check_inputs(q, k, v)
    _check_options(dropout_p, softmax_scale, softcap, alibi_slopes)
    assert return_softmax is False
    q_len, k_len = q.shape[1], k.shape[1]
    allowed = flash_math.flash_mask(
        q_len, k_len, k_len, window_size_left, window_size_right, causal
    )
    results = [
        flash_math.forward(*one, softmax_scale, softcap, allowed)
        for one in zip(q, k, v, strict=True)
    ]
    out, lse = (torch.stack(part) for part in zip(*results, strict=True))
    return out, lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    flash_math.check_inputs(q, k, v)
    _check_options(dropout_p, softmax_scale, softcap, alibi_slopes)
    assert return_softmax is False
    assert (block_table, leftpad_k, seqused_k, zero_tensors) == (None, None, None, False)
    out = torch.full_like(q, torch.nan)
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan)
    for q_rows, k_rows in flash_math.sequences(
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    ):
        allowed = flash_math.flash_mask(
            q_rows.stop - q_rows.start,
            k_rows.stop - k_rows.start,
            max_seqlen_k,
            window_size_left,
            window_size_right,
            causal,
        )
        out[q_rows], lse[:, q_rows] = flash_math.forward(
            q[q_rows], k[k_rows], v[k_rows], softmax_scale, softcap, allowed
        )
    return out, lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    flash_math.check_inputs(dout, q, k, v, out)
    _check_options(dropout_p, softmax_scale, softcap, alibi_slopes)
    _check_lse(softmax_lse, (q.shape[0], q.shape[2], q.shape[1]))
    _check_gradients((dq, dk, dv), (q, k, v))
    assert deterministic is True
    q_len, k_len = q.shape[1], k.shape[1]
    allowed = flash_math.flash_mask(
        q_len, k_len, k_len, window_size_left, window_size_right, causal
    )
    for i in range(q.shape[0]):
        dq[i], dk[i], dv[i] = flash_math.backward(
            dout[i], q[i], k[i], v[i], out[i], softmax_lse[i], softmax_scale, softcap, allowed
        )
    return torch.empty(0)


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    flash_math.check_inputs(dout, q, k, v, out)
    _check_options(dropout_p, softmax_scale, softcap, alibi_slopes)
    _check_lse(softmax_lse, (q.shape[1], q.shape[0]))
    _check_gradients((dq, dk, dv), (q, k, v))
    assert deterministic is True
    for q_rows, k_rows in flash_math.sequences(
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    ):
        allowed = flash_math.flash_mask(
            q_rows.stop - q_rows.start,
            k_rows.stop - k_rows.start,
            max_seqlen_k,
            window_size_left,
            window_size_right,
            causal,
        )
        dq[q_rows], dk[k_rows], dv[k_rows] = flash_math.backward(
            dout[q_rows],
            q[q_rows],
            k[k_rows],
            v[k_rows],
            out[q_rows],
            softmax_lse[:, q_rows],
            softmax_scale,
            softcap,
            allowed,
        )
    return torch.empty(0)


def _check_options(
    dropout_p: float, softmax_scale: float, softcap: float, alibi_slopes: torch.Tensor | None
) -> None:
    assert dropout_p == 0.0
    assert isinstance(softmax_scale, float)
    assert softcap >= 0.0
    assert alibi_slopes is None


def _check_lse(lse: torch.Tensor, shape: tuple[int, ...]) -> None:
    assert lse.shape == shape
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()


def _check_gradients(
    gradients: tuple[torch.Tensor | None, ...], inputs: tuple[torch.Tensor, ...]
) -> None:
    for gradient, x in zip(gradients, inputs, strict=True):
        assert gradient is not None
        assert gradient.shape == x.shape
        assert gradient.dtype == x.dtype
        assert gradient.is_contiguous()
