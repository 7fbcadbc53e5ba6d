"""A stand-in for aten::_flash_attention_forward and _backward, on flash-attn's stand-in."""

import torch

from tests.kernels import flash_attn_stand_in, flash_math


def flash_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    assert return_debug_mask is False
    assert (seqused_k, block_table, num_splits) == (None, None, None)
    common = (dropout_p, scale, is_causal, window_size_left, window_size_right, 0.0, alibi_slopes)
    if cum_seq_q is None:
        assert cum_seq_k is None
        assert (max_q, max_k) == (query.shape[1], key.shape[1])
        out, lse, *_ = flash_attn_stand_in._flash_attn_forward(query, key, value, *common, False)
    else:
        out, lse, *_ = flash_attn_stand_in._flash_attn_varlen_forward(
            query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, *common, False
        )
    return out, lse, torch.empty(2), torch.empty(0), torch.empty(0)


def flash_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    flash_math.check_inputs(grad_out, query, key, value, out)
    assert isinstance(rng_state, torch.Tensor)
    assert isinstance(unused, torch.Tensor)
    gradients = tuple(torch.empty(x.shape, dtype=x.dtype) for x in (query, key, value))
    inputs = (grad_out, query, key, value, out, logsumexp, *gradients)
    common = (dropout_p, scale, is_causal, window_size_left, window_size_right, 0.0, None, True)
    if cum_seq_q is None:
        assert cum_seq_k is None
        assert (max_q, max_k) == (query.shape[1], key.shape[1])
        flash_attn_stand_in._flash_attn_backward(*inputs, *common)
    else:
        flash_attn_stand_in._flash_attn_varlen_backward(
            *inputs, cum_seq_q, cum_seq_k, max_q, max_k, *common
        )
    return gradients
