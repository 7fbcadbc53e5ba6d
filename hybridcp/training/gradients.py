"""Sums over the context-parallel ranks: of one tensor, and of all gradients of a model."""

from collections.abc import Iterable, Iterator

import torch
from torch.distributed.tensor import DTensor

from hybridcp.distributed import ContextParallelGroups
from hybridcp.errors import InputError

_BUCKET_ELEMENTS = 1 << 23


def sum_over_ranks(local: torch.Tensor, groups: ContextParallelGroups) -> torch.Tensor:
    """The sum of every context-parallel rank's tensor, on every rank. A collective.

    Args:
        local: any shape and dtype that the group's backend can add, the same on all ranks.
        groups: `ShardedSequence.groups`.

    Returns:
        A new tensor, without a graph.
    """
    total = local.detach().clone(memory_format=torch.contiguous_format)
    # Each ring holds one rank of every ring position, so the two sums meet each rank once.
    for communicator in (groups.ring, groups.ulysses):
        communicator.all_reduce(total)
    return total


def sum_gradients(parameters: Iterable[torch.nn.Parameter], groups: ContextParallelGroups) -> None:
    """Replace each `grad` by its sum over the context-parallel ranks. A collective.

    Call it once an optimiser step, after the last `backward` and before clipping, so that the
    norm is that of the whole gradient. Sums are made in float32 also for 16-bit gradients, in few
    large messages. A parameter that took no part gets zeros, so the messages are the same on
    every rank.

    Args:
        parameters: those of the model, in the same order on all ranks.
        groups: `ShardedSequence.groups`.

    Raises:
        InputError: a parameter or gradient is a DTensor or sparse.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if isinstance(parameter, DTensor) or parameter.grad.is_sparse:
            kind = "sparse" if parameter.grad.is_sparse else "a DTensor"
            raise InputError(
                f"sum_gradients() sums whole dense gradients, but that of a parameter of shape "
                f"{tuple(parameter.shape)} is {kind}"
            )
    if groups.ring.size * groups.ulysses.size == 1:
        return
    for bucket in _buckets([p.grad for p in trained if p.grad is not None]):
        dtype = torch.promote_types(bucket[0].dtype, torch.float32)
        flat = sum_over_ranks(torch.cat([grad.reshape(-1).to(dtype) for grad in bucket]), groups)
        for grad, total in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            grad.copy_(total.view(grad.shape))


def _buckets(gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one dtype and device, up to a bucket's size; a larger one goes alone."""
    bucket: list[torch.Tensor] = []
    elements = 0
    for gradient in gradients:
        joins = bucket and (gradient.dtype, gradient.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (not joins or elements + gradient.numel() > _BUCKET_ELEMENTS):
            yield bucket
            bucket, elements = [], 0
        bucket.append(gradient)
        elements += gradient.numel()
    if bucket:
        yield bucket
