"""Attention sinks: a learnable logit for each head that takes probability and gives no value.

With a sink logit s for each head, after attention over the keys (out, lse):

    lse' = logaddexp(lse, s)         out' = out · exp(lse − lse')

No kernel needs to know: the backward runs with (out', lse'), and ds = −Σ exp(s − lse') · delta over
queries, where delta = rowsum(dout · out').
"""

import torch

from hybridcp.attention.online_softmax import OnlineSoftmax


def fold_in_sinks(running: OnlineSoftmax, sinks: torch.Tensor) -> None:
    """Add the sinks of this rank's heads to a finished result, in place.

    Args:
        running: output and log-sum-exp over all keys.
        sinks: (h,), one logit for each query head.
    """
    lse = torch.logaddexp(running.lse, sinks.to(running.lse.dtype)[:, None])
    # A query without keys has lse = -inf: its output stays 0.
    running.out *= torch.exp(running.lse - lse).transpose(1, 2).unsqueeze(-1)
    running.lse = lse


def sink_gradient(
    dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """This rank's share of the gradient of the sinks: over its queries and heads.

    Args:
        dout: (B, S, h, Dv).
        out: (B, S, h, Dv), with the sinks.
        lse: (B, h, S), with the sinks.
        sinks: (h,).

    Returns:
        (h,), in lse's dtype.
    """
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
    return -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta).sum((0, 2))
