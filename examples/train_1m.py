"""Train a small decoder on long sequences that are split over processes, Ulysses × Ring.

    torchrun --standalone --nproc-per-node 2 examples/train_1m.py              # 2 CPU processes
    torchrun --standalone --nproc-per-node 2 examples/train_1m.py --compare    # and on one process
    torchrun --standalone --nproc-per-node 8 examples/train_1m.py --seq-len 1M --heads 8
    python examples/train_1m.py --steps 5                                      # one process

`start` and `loss_and_gradients` are what a training script of your own needs; the rest chooses a
layout and reports. With GPUs, each process uses one, NCCL and bf16; without, gloo and float32.
"""

import hashlib
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from decoder import Decoder
from options import (
    Options,
    TrainConfig,
    local_rank,
    local_world_size,
    read_options,
    set_threads,
    world_size,
)
from report import Reporter, StepResult, comparison, peak_memory_gib, summary
from text_corpus import Corpus
from torch.distributed.device_mesh import DeviceMesh

from hybridcp import HybridAttention, HybridCPError, Layout, ShardedSequence, init_mesh
from hybridcp.communicator import Communicator
from hybridcp.distributed import ContextParallelGroups
from hybridcp.errors import InputError
from hybridcp.training import (
    count_targets,
    linear_cross_entropy,
    loss_share,
    sum_gradients,
    sum_over_ranks,
)

Mesh = DeviceMesh | ContextParallelGroups


@dataclass(frozen=True)
class Training:
    """What one process trains with.

    Attributes:
        config: what to train.
        seq: the sequence over the ranks, and this rank's part.
        attention: the one module that all layers share.
        model: the same weights on every rank.
        optimizer: AdamW.
    """

    config: TrainConfig
    seq: ShardedSequence
    attention: HybridAttention
    model: Decoder
    optimizer: torch.optim.Optimizer


def start(config: TrainConfig, mesh: Mesh) -> Training:
    """Model, optimiser and sequence, the same for every layout."""
    seq = ShardedSequence(config.layout, mesh, seq_len=config.seq_len, mask=config.mask)
    attention = HybridAttention(config.layout, mesh)
    model = Decoder(
        config.model,
        attention,
        seed=config.seed,
        dtype=config.dtype,
        checkpoint_activations=config.checkpoint_activations,
    ).to(config.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    return Training(config, seq, attention, model, optimizer)


def loss_and_gradients(training: Training, tokens: torch.Tensor) -> torch.Tensor:
    """Forward and backward on one sequence; leaves the whole gradient on every rank. A collective.

    Args:
        training: from `start`.
        tokens: (1, N) int64, the whole sequence, the same on every rank.

    Returns:
        () mean loss over all targets, the same on every rank.
    """
    seq, model = training.seq, training.model
    device = model.output_weight.device
    # Labels are shifted before the cut: the target of a shard's last token is in another shard.
    batch = seq.shard_batch({"input_ids": tokens, "labels": tokens})
    batch = {name: x.to(device) for name, x in batch.items()}
    labels = batch["shift_labels"]

    hidden = model(batch["input_ids"], batch["position_ids"], seq)
    loss_sum = linear_cross_entropy(hidden, model.output_weight, labels)
    share = loss_share(loss_sum, count_targets(labels, seq.groups))
    share.backward()
    sum_gradients(model.parameters(), seq.groups)
    return sum_over_ranks(share, seq.groups)


def train_step(training: Training, tokens: torch.Tensor) -> tuple[float, float]:
    """One optimiser step on one sequence. A collective.

    Returns:
        The loss and the norm of the gradient before clipping, the same on every rank.
    """
    loss = loss_and_gradients(training, tokens)
    # Every rank has the whole gradient, so this is its true norm.
    norm = torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
    training.optimizer.step()
    training.optimizer.zero_grad()
    return loss.item(), norm.item()


def train(
    training: Training, corpus: Corpus, report: Callable[[StepResult], None] = lambda _: None
) -> list[float]:
    """Run all steps. A collective.

    Args:
        training: from `start`.
        corpus: samples; step s draws the same tokens on every rank of every layout.
        report: called after each step.

    Returns:
        The loss of each step.

    Raises:
        InputError: ranks have different data, or different weights at the end.
    """
    config = training.config
    losses = []
    for step in range(config.steps):
        began = time.perf_counter()
        tokens = corpus.sample(config.seq_len, seed=config.seed, step=step)
        if step == 0:
            check_same_on_all_ranks("samples", [tokens], training)
        loss, norm = train_step(training, tokens)
        seconds = time.perf_counter() - began
        memory = max_over_ranks(peak_memory_gib(config.device), training.seq.groups, config.device)
        report(StepResult(step, loss, norm, config.seq_len / seconds, memory))
        losses.append(loss)
    check_same_on_all_ranks("weights", training.model.parameters(), training)
    return losses


def one_process() -> ContextParallelGroups:
    """Groups of one rank: no process group, no messages."""
    return ContextParallelGroups(ring=Communicator(None), ulysses=Communicator(None))


def max_over_ranks(value: float, groups: ContextParallelGroups, device: str) -> float:
    """The largest value of all ranks. A collective."""
    largest = torch.tensor(value, device=device)
    for communicator in (groups.ring, groups.ulysses):
        communicator.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def check_same_on_all_ranks(what: str, tensors: Iterable[torch.Tensor], training: Training) -> None:
    """Raise unless all ranks have the same tensors, bit for bit. A collective.

    Raises:
        InputError: they differ.
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().numpy().tobytes())
    ours = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    ours = ours.to(training.config.device)
    for communicator in (training.seq.groups.ring, training.seq.groups.ulysses):
        gathered = communicator.all_gather(ours, [ours.numel()] * communicator.size)
        if any(not torch.equal(theirs, ours) for theirs in gathered):
            raise InputError(f"ranks that share a sequence have different {what}")


def describe(training: Training, origin: str) -> str:
    """Layout, kernel and model, as the introduction shows them."""
    config = training.config
    layout, sizes = config.layout, config.model
    like_q = torch.empty(
        (1, 1, sizes.heads, sizes.head_dim), dtype=config.dtype, device=config.device
    )
    kernel = training.attention.select_kernel(like_q)
    parameters = sum(weight.numel() for weight in training.model.parameters())
    return (
        f"{origin}\n\n"
        f"layout   {layout_name(layout)}, {layout.sharding}, {layout.order}\n"
        f"kernel   {kernel.kernel.name}: {kernel.reason}\n"
        f"model    {parameters:,} parameters: {sizes.layers} layers, dim {sizes.dim}, "
        f"{sizes.heads} heads, {sizes.kv_heads} kv_heads, vocabulary {sizes.vocab_size}\n"
        f"data     {config.seq_len:,} tokens a step, mask {config.mask}\n"
    )


def layout_name(layout: Layout) -> str:
    """The degrees in words."""
    return f"Ulysses {layout.ulysses_degree} × Ring {layout.ring_degree}"


def compare(options: Options, split: Reporter) -> None:
    """Train the same on one process, with all cores, and print the losses side by side."""
    set_threads(processes=1)
    config = replace(options.config, layout=Layout(ulysses_degree=1, ring_degree=1))
    print("\nthe same on one process:")
    with Reporter(config.steps, shown=True) as single:
        train(start(config, one_process()), options.corpus, single.add)
    print(summary(single.results), end="\n\n")
    print(comparison(layout_name(options.config.layout), split.results, single.results))


def main() -> int:
    """Run the command line; the exit status is 2 for a mistake in it."""
    set_threads(processes=local_world_size())
    try:
        options = read_options(sys.argv[1:])
    except HybridCPError as mistake:
        if local_rank() == 0:
            print(f"error: {mistake}", file=sys.stderr)
        else:
            # torchrun ends all ranks when one does, perhaps before the first could say why.
            time.sleep(10)
        return 2
    config = options.config
    mesh: Mesh = one_process()
    if world_size() > 1:
        mesh = init_mesh(config.layout, device_type=config.device)
    first = not dist.is_initialized() or dist.get_rank() == 0
    training = start(config, mesh)
    if first:
        print(describe(training, options.origin), flush=True)
    with Reporter(config.steps, shown=first, json_log=options.json_log) as reporter:
        train(training, options.corpus, reporter.add)
    if dist.is_initialized():
        dist.destroy_process_group()
    if first:
        print(summary(reporter.results))
        if options.compare:
            compare(options, reporter)
    return 0


if __name__ == "__main__":
    sys.exit(main())
