"""Head dims padded with zeros, for kernels that take one dim for all or multiples of some number.

Zeros in q and k leave every score as it is (the scale is that of the true dim); zeros in v give
zeros in out, which are cut off.
"""

import torch
import torch.nn.functional as F


def padded_dim(*dims: int, multiple: int = 1) -> int:
    """The smallest multiple that holds all of the dims."""
    return -(-max(dims) // multiple) * multiple


def pad_to_one_dim(*tensors: torch.Tensor, multiple: int = 1) -> tuple[torch.Tensor, ...]:
    """The tensors with their last dims padded to one size; those that have it as they are."""
    dim = padded_dim(*(x.shape[-1] for x in tensors), multiple=multiple)
    return tuple(F.pad(x, (0, dim - x.shape[-1])) if x.shape[-1] < dim else x for x in tensors)
