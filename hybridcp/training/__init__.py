"""Training on shards: the loss and the gradients of one process, whatever the layout.

    batch = seq.shard_batch({"input_ids": ids, "labels": ids})
    hidden = model(batch["input_ids"], batch["position_ids"], seq)
    loss_sum = linear_cross_entropy(hidden, output_weight, batch["shift_labels"])
    targets = count_targets(batch["shift_labels"], seq.groups)
    share = loss_share(loss_sum, targets)
    share.backward()
    sum_gradients(model.parameters(), seq.groups)
    loss = sum_over_ranks(share.detach(), seq.groups)     # to report; the same on every rank

The convention, here and nowhere else: a rank's share of the loss is the *sum* over its own
targets divided by the number of targets of *all* context-parallel ranks; each rank
back-propagates its share, and gradients are *summed* over the context-parallel ranks. Shares and
gradients then add up to those of one process that holds the whole sequence, however many targets
each rank has. Nothing is multiplied or divided by a number of ranks.
"""

from hybridcp.training.gradients import sum_gradients, sum_over_ranks
from hybridcp.training.loss import count_targets, linear_cross_entropy, loss_share

__all__ = [
    "count_targets",
    "linear_cross_entropy",
    "loss_share",
    "sum_gradients",
    "sum_over_ranks",
]
