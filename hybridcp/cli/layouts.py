"""`hybridcp check` and `hybridcp show`: prove a saved layout, and see who holds what."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from hybridcp.cli import exit_codes

CHECK_HELP = """Examples:

\b
  hybridcp check layout.yaml
  hybridcp check layout.yaml --seq-len 64k --mask 'causal & documents:8k*8'

Prove, without running anything, that a layout computes a mask exactly.
"""

SHOW_HELP = """Examples:

\b
  hybridcp show layout.yaml
  hybridcp show layout.yaml --seq-len 128k --mask window:4095 --ranks-per-node 4

Show the rank grid of a layout, which rank holds which tokens, and how even the work is.
"""

LayoutFile = Annotated[Path, typer.Argument(help="A layout file, from `hybridcp plan --out`.")]
SeqLen = Annotated[
    str, typer.Option(help="Tokens of the whole sequence; k and M are powers of two.")
]
MaskText = Annotated[
    str,
    typer.Option(
        help="causal, full, window:LEFT[,RIGHT], prefix:LENGTH, chunked:SIZE, "
        "documents:LENGTH[*COUNT],... joined by &."
    ),
]


def check_command(layout: LayoutFile, seq_len: SeqLen = "1M", mask: MaskText = "causal") -> int:
    """Prove a layout; `hybridcp check`."""
    from hybridcp.errors import LayoutError
    from hybridcp.layout import Layout
    from hybridcp.mask_text import parse_mask, parse_tokens
    from hybridcp.proof import check
    from hybridcp.schedule import Schedule

    loaded = Layout.load(layout)
    tokens = parse_tokens(seq_len, "--seq-len", LayoutError)
    allowed = parse_mask(mask)
    report = check(Schedule.of_layout(loaded, loaded.shard(tokens, allowed), allowed))
    inner = loaded.inner_ring_size
    exchange = f"{loaded.exchange} exchange" + (f", inner rings of {inner}" if inner else "")
    print(
        f"Proved: ulysses {loaded.ulysses_degree} x ring {loaded.ring_degree}, "
        f"{loaded.sharding}, {exchange}, {tokens} tokens, mask {mask}\n"
        f"  {report.pairs} (query, key) pairs, each computed exactly once, forward and backward\n"
        f"  {report.hops} sends of key/value blocks, each met by its receive\n"
        f"  {report.bands} kernel regions; the busiest ring position has "
        f"{report.busiest_share:.2f} x the mean work"
    )
    words = ["hybridcp", "show", str(layout), "--seq-len", seq_len, "--mask", mask]
    print(f"Next:   {shlex.join(words)}")
    return exit_codes.OK


def show_command(
    layout: LayoutFile,
    seq_len: SeqLen = "1M",
    mask: MaskText = "causal",
    ranks_per_node: Annotated[int, typer.Option(help="Ranks of one row of the grid.", min=1)] = 8,
) -> int:
    """Draw a layout; `hybridcp show`."""
    from hybridcp.cli.drawing import rank_grid, token_map, work_map
    from hybridcp.errors import LayoutError
    from hybridcp.layout import Layout
    from hybridcp.mask_text import parse_mask, parse_tokens
    from hybridcp.schedule import Schedule

    loaded = Layout.load(layout)
    allowed = parse_mask(mask)
    sharding = loaded.shard(parse_tokens(seq_len, "--seq-len", LayoutError), allowed)
    schedule = Schedule.of_layout(loaded, sharding, allowed)
    print(rank_grid(loaded, ranks_per_node))
    print()
    print(token_map(loaded, sharding))
    print()
    print(work_map(schedule))
    words = ["hybridcp", "check", str(layout), "--seq-len", seq_len, "--mask", mask]
    print(f"\nNext: {shlex.join(words)}")
    return exit_codes.OK
