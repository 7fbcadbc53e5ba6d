"""Token-mean cross-entropy on shards, without ever holding the logits of all tokens.

At a million tokens the logits, tokens × vocabulary, would be by far the largest tensor of a
training step. Here they exist for `chunk_tokens` tokens at a time, and the gradient is computed
while they do.
"""

from typing import Any

import torch
from torch import Tensor

from hybridcp.distributed import ContextParallelGroups
from hybridcp.errors import InputError
from hybridcp.sequence import IGNORE_INDEX
from hybridcp.training.gradients import sum_over_ranks


def count_targets(labels: Tensor, groups: ContextParallelGroups) -> Tensor:
    """How many targets all context-parallel ranks have together, each once. A collective.

    For several micro-batches in one optimiser step, add their counts and divide each loss by the
    total, so that every target weighs the same.

    Args:
        labels: this rank's `shift_labels`, any shape; -100 is no target.
        groups: `ShardedSequence.groups`.

    Returns:
        () int64, the same on every rank.
    """
    return sum_over_ranks((labels != IGNORE_INDEX).sum(), groups)


def loss_share(loss_sum: Tensor, targets: Tensor) -> Tensor:
    """This rank's share of the mean loss: the shares of all ranks add up to the mean.

    Args:
        loss_sum: () sum over this rank's targets, from `linear_cross_entropy`.
        targets: () number of targets of all ranks, from `count_targets`.

    Returns:
        () to call `backward` on; 0 where no rank has a target.
    """
    return loss_sum / targets.clamp(min=1)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk_tokens: int = 1024
) -> Tensor:
    """Sum over the targets of the cross-entropy of the logits `hidden @ weight.T`.

    Memory: one chunk's logits in float32, and a gradient of the size of `hidden` and of `weight`,
    which is computed here rather than in the backward. Logits, losses and the sum over tokens are
    float32 for 16-bit input (float64 for float64).

    Args:
        hidden: (..., C), last hidden states of this rank's tokens; there may be none.
        weight: (V, C), the output projection.
        labels: (...) int64, the *next* token of each position (`shift_labels`); -100 is no target.
        chunk_tokens: tokens whose logits, (chunk_tokens, V), exist at a time.

    Returns:
        () float32 or float64, differentiable once; 0 without targets, with zero gradients.

    Raises:
        InputError: shapes or dtypes that do not fit, or `chunk_tokens` below 1.
    """
    _check(hidden, weight, labels, chunk_tokens)
    training = torch.is_grad_enabled()
    loss_sum: Tensor = _linear_cross_entropy(
        hidden.reshape(-1, hidden.size(-1)),
        weight,
        labels.reshape(-1),
        chunk_tokens,
        training and hidden.requires_grad,
        training and weight.requires_grad,
    )[0]
    return loss_sum


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk_tokens: int,
    hidden_gradient: bool,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of losses and its gradients, chunk by chunk.

    Args:
        hidden: (T, C).
        weight: (V, C).
        labels: (T,).
        chunk_tokens: rows of `hidden` at a time.
        hidden_gradient: whether the gradient of `hidden` is wanted.
        weight_gradient: whether that of `weight` is.

    Returns:
        The sum (), d hidden (T, C) and d weight (V, C), the latter and the sum in float32 or
        float64; a gradient that is not wanted is empty.
    """
    accumulator = torch.promote_types(hidden.dtype, torch.float32)
    loss_sum = hidden.new_zeros((), dtype=accumulator)
    dhidden = torch.empty_like(hidden) if hidden_gradient else hidden.new_empty(0)
    dweight = weight.new_zeros(weight.shape if weight_gradient else 0, dtype=accumulator)
    # Autocast would turn these products into 16-bit ones behind our back.
    with torch.autocast(hidden.device.type, enabled=False):
        projection = weight.to(hidden.dtype)
        for start in range(0, hidden.size(0), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            is_target = labels[rows] != IGNORE_INDEX
            target = labels[rows].masked_fill(~is_target, 0).unsqueeze(1)
            logits = _product(hidden[rows], projection.t())
            lse = logits.logsumexp(1, keepdim=True)
            losses = (lse - logits.gather(1, target)).squeeze(1)
            loss_sum += losses.masked_fill(~is_target, 0).sum()
            if not (hidden_gradient or weight_gradient):
                continue
            # d loss / d logits = softmax − one-hot, written over the logits.
            dlogits = logits.sub_(lse).exp_()
            dlogits.scatter_add_(1, target, dlogits.new_full((1, 1), -1.0).expand_as(target))
            dlogits.masked_fill_(~is_target.unsqueeze(1), 0)
            dlogits = dlogits.to(hidden.dtype)
            if hidden_gradient:
                dhidden[rows] = _product(dlogits, projection)
            if weight_gradient:
                dweight += _product(dlogits.t(), hidden[rows])
    return loss_sum, dhidden, dweight


_linear_cross_entropy = torch.library.custom_op(
    "hybridcp::linear_cross_entropy", chunked_loss, mutates_args=()
)


@_linear_cross_entropy.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk_tokens: int,
    hidden_gradient: bool,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    accumulator = torch.promote_types(hidden.dtype, torch.float32)
    return (
        hidden.new_empty((), dtype=accumulator),
        hidden.new_empty(hidden.shape if hidden_gradient else 0),
        weight.new_empty(weight.shape if weight_gradient else 0, dtype=accumulator),
    )


def _save_gradients(ctx: Any, inputs: Any, output: Any) -> None:
    _, dhidden, dweight = output
    ctx.weight_dtype = inputs[1].dtype
    ctx.wanted = inputs[-2:]
    ctx.save_for_backward(dhidden, dweight)
    ctx.mark_non_differentiable(dhidden, dweight)


def _scale_gradients(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    dhidden, dweight = ctx.saved_tensors
    hidden_wanted, weight_wanted = ctx.wanted
    return (
        dhidden * dloss if hidden_wanted else None,
        # Scaled before it is rounded: a sum over a million tokens is beyond float16.
        (dweight * dloss).to(ctx.weight_dtype) if weight_wanted else None,
        *(None for _ in range(4)),
    )


_linear_cross_entropy.register_autograd(_scale_gradients, setup_context=_save_gradients)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """(m, k) @ (k, n) with a float32 result for 16-bit input, as tensor cores can give it."""
    if a.dtype.itemsize >= 4:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> None:
    shapes = (
        f"hidden {tuple(hidden.shape)} {hidden.dtype}, weight {tuple(weight.shape)} "
        f"{weight.dtype}, labels {tuple(labels.shape)} {labels.dtype}"
    )
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.size(-1) != weight.size(1):
        raise InputError(f"hidden must be (..., C) and weight (V, C) with the same C, got {shapes}")
    if labels.shape != hidden.shape[:-1]:
        raise InputError(f"labels must have one entry for each row of hidden, got {shapes}")
    if labels.dtype != torch.int64 or not hidden.dtype.is_floating_point:
        raise InputError(f"labels must be int64 and hidden floating point, got {shapes}")
    if chunk_tokens < 1:
        raise InputError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
