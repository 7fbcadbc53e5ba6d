"""Command line of `train_1m.py`: text in, one checked `TrainConfig` out, before anything starts.

Every rank reads and checks the same options, so every rank stops at the same mistake.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from decoder import DecoderConfig
from text_corpus import Corpus, load_corpus

import hybridcp
from hybridcp import AttentionMask, Layout, Schedule
from hybridcp.errors import InputError, LayoutError
from hybridcp.kernels.protocol import Request
from hybridcp.kernels.registry import select_kernel
from hybridcp.mask_text import MASK_GRAMMAR, parse_mask, parse_tokens

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class TrainConfig:
    """What to train and how.

    Attributes:
        model: sizes of the decoder.
        layout: how ranks share a sequence.
        mask: which keys a query sees.
        seq_len: N, tokens of the one sequence in a step.
        steps: number of optimiser steps.
        lr: learning rate of AdamW.
        seed: of weights and samples.
        device: "cpu" or "cuda".
        dtype: of activations and attention; weights and gradients are float32.
        checkpoint_activations: compute activations again in the backward.
    """

    model: DecoderConfig
    layout: Layout
    mask: AttentionMask
    seq_len: int
    steps: int
    lr: float
    seed: int = 0
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    checkpoint_activations: bool = False


@dataclass(frozen=True)
class Options:
    """All that the command line says.

    Attributes:
        config: the training run.
        corpus: its data.
        compare: train on one process too.
        json_log: where to write one line a step.
        origin: how the layout was chosen: the printed plan, or which option gave it.
    """

    config: TrainConfig
    corpus: Corpus
    compare: bool
    json_log: Path | None
    origin: str


def world_size() -> int:
    """Number of processes, from torchrun's environment."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Rank of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def set_threads(processes: int) -> None:
    """Share this machine's cores between processes, unless OMP_NUM_THREADS was set by hand."""
    threads = os.environ.get("OMP_NUM_THREADS")
    # torchrun itself sets it to 1 for several processes, which would leave cores idle.
    if threads is None or (threads == "1" and local_world_size() > 1):
        usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
        torch.set_num_threads(max(1, len(usable) // processes))


def read_options(arguments: Sequence[str]) -> Options:
    """Parse and check the command line, load the corpus and choose the layout.

    Raises:
        HybridCPError: a mistake; the message is one sentence for the user.
        SystemExit: --help was asked for.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    seq_len = parse_tokens(given.seq_len, "--seq-len", InputError)
    for name in ("steps", "vocab_size"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1")
    if not 0 < given.lr < float("inf"):
        raise InputError(f"--lr must be a positive number, got {given.lr}")
    if given.seed < 0:
        raise InputError(f"--seed must be at least 0, got {given.seed}")
    device = _device(given.device)
    dtype = given.dtype or ("bf16" if device == "cuda" else "fp32")
    mask = parse_mask(given.mask)
    mask.bands_for(seq_len, seq_len)
    _check_writable(given.json_log)
    sizes = DecoderConfig(
        layers=given.layers, dim=given.dim, heads=given.heads, kv_heads=given.kv_heads
    )
    corpus = load_corpus(given.data, given.vocab_size)
    corpus.check_length(seq_len)
    select_kernel("auto", Request(device, DTYPES[dtype], sizes.head_dim, sizes.head_dim))
    layout, origin = _layout(given, sizes, mask, seq_len, dtype, device)
    layout.check_ranks(world_size())
    layout.check_heads(sizes.heads, sizes.kv_heads)
    Schedule(layout.shard(seq_len, mask), mask)
    config = TrainConfig(
        model=DecoderConfig(
            corpus.vocab_size, sizes.layers, sizes.dim, sizes.heads, sizes.kv_heads
        ),
        layout=layout,
        mask=mask,
        seq_len=seq_len,
        steps=given.steps,
        lr=given.lr,
        seed=given.seed,
        device=device,
        dtype=DTYPES[dtype],
        checkpoint_activations=given.checkpoint_activations,
    )
    return Options(config, corpus, given.compare, given.json_log, origin)


class _Parser(argparse.ArgumentParser):
    """Reports mistakes like all others: by an exception, printed once for all ranks."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        description="Train a small decoder on long sequences, split Ulysses × Ring.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--seq-len", default="16k", help="tokens of a sequence: 16384, 128k, 1M (powers of two)")
    add("--steps", type=int, default=50, help="optimiser steps, one sequence each")
    add(
        "--data",
        type=Path,
        nargs="+",
        default=[],
        metavar="PATH",
        help="UTF-8 text files, or one .bin of uint16 tokens; default: Python's own sources",
    )
    add("--vocab-size", type=int, help="default: 256 for text, largest token + 1 for .bin")
    add("--mask", default="causal", help=MASK_GRAMMAR)
    add("--layers", type=int, default=2, help="blocks")
    add("--dim", type=int, default=128, help="width of the model")
    add("--heads", type=int, default=4, help="query heads")
    add("--kv-heads", type=int, default=2, help="key/value heads")
    add("--lr", type=float, default=2e-3, help="learning rate of AdamW")
    add("--seed", type=int, default=0, help="of the weights and the samples")
    add("--layout", type=Path, metavar="FILE", help="layout file; default: the planner chooses")
    add("--ulysses", type=int, metavar="U", help="ulysses_degree, with --ring")
    add("--ring", type=int, metavar="R", help="ring_degree, with --ulysses")
    add("--compare", action="store_true", help="train on one process too, and compare the losses")
    add("--dtype", choices=tuple(DTYPES), help="of activations; default: bf16 on GPUs, else fp32")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    add("--checkpoint-activations", action="store_true", help="less memory, more computation")
    add("--json-log", type=Path, metavar="FILE", help="write one JSON object a step")
    return parser


def _check_writable(path: Path | None) -> None:
    if path is None:
        return
    target = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(target, os.W_OK):
        raise InputError(f"--json-log: cannot write {path}; name a file in a folder of yours")


def _device(name: str | None) -> str:
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no GPU here; use --device cpu")
    device = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and local_rank() >= torch.cuda.device_count():
        raise InputError(
            f"there are {torch.cuda.device_count()} GPUs on this machine, fewer than processes; "
            "start one process for each GPU, or use --device cpu"
        )
    return device


def _layout(
    given: argparse.Namespace,
    sizes: DecoderConfig,
    mask: AttentionMask,
    seq_len: int,
    dtype: str,
    device: str,
) -> tuple[Layout, str]:
    degrees = (given.ulysses, given.ring)
    if given.layout is not None:
        if degrees != (None, None):
            raise LayoutError("give either --layout or --ulysses and --ring, not both")
        return Layout.load(given.layout), f"from {given.layout}"
    if degrees != (None, None):
        if None in degrees:
            raise LayoutError("--ulysses and --ring go together; give both")
        return Layout(ulysses_degree=given.ulysses, ring_degree=given.ring), "as asked for"
    result = hybridcp.plan(
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        ranks=world_size(),
        seq_len=seq_len,
        dtype=dtype,
        mask=mask,
        cluster="h100-8" if device == "cuda" else "cpu-laptop",
    )
    return result.best.layout, str(result)
