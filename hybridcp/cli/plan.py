"""`hybridcp plan`: which layout, how fast, and why not another."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from hybridcp.cli import exit_codes
from hybridcp.cli.output import print_report, talk

PLAN_HELP = """Examples:

\b
  hybridcp plan --heads 32 --ranks 256
  hybridcp plan --heads 32 --kv-heads 8 --ranks 64 --seq-len 256k --out layout.yaml

Find the best Ulysses x Ring layout for one attention layer, forward and backward.
"""


def plan_command(
    heads: Annotated[
        int, typer.Option(help="Query heads (with tensor parallelism: of one tp rank).")
    ],
    ranks: Annotated[int, typer.Option(help="Ranks that share one sequence.")],
    kv_heads: Annotated[
        int | None, typer.Option(help="Key/value heads.", show_default="heads")
    ] = None,
    head_dim: Annotated[int, typer.Option(help="Size of one head.")] = 128,
    seq_len: Annotated[
        str, typer.Option(help="Tokens of the whole sequence; k and M are powers of two.")
    ] = "1M",
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    mask: Annotated[
        str,
        typer.Option(
            help="causal, full, window:LEFT[,RIGHT], prefix:LENGTH, chunked:SIZE, "
            "documents:LENGTH[*COUNT],... joined by &."
        ),
    ] = "causal",
    cluster: Annotated[
        str, typer.Option(help="A preset, or a YAML file.", metavar="NAME|FILE")
    ] = "h100-8",
    top: Annotated[int, typer.Option(help="Lines of the table.", min=1)] = 8,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole plan as JSON and nothing else.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Save the best layout to this file.", metavar="FILE")
    ] = None,
) -> int:
    """Print a plan; `hybridcp plan`."""
    from hybridcp.planner import plan

    result = plan(
        heads=heads,
        ranks=ranks,
        kv_heads=kv_heads,
        head_dim=head_dim,
        seq_len=seq_len,
        batch=batch,
        dtype=dtype,
        mask=mask,
        cluster=cluster,
    )
    options = {
        "--heads": (heads, None),
        "--ranks": (ranks, None),
        "--kv-heads": (kv_heads, None),
        "--head-dim": (head_dim, 128),
        "--seq-len": (seq_len, "1M"),
        "--batch": (batch, 1),
        "--dtype": (dtype, "bf16"),
        "--mask": (mask, "causal"),
        "--cluster": (cluster, "h100-8"),
    }
    words = [w for name, (v, usual) in options.items() if v != usual for w in (name, str(v))]
    command = shlex.join(["hybridcp", "plan", *words])
    fits = bool(result.candidates)
    if out is not None and fits:
        result.best.layout.save(out, comment=command)
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        from hybridcp.planner.report import report

        print_report(report(result, top))
        if not fits:
            next_command = shlex.join(
                ["hybridcp", "plan", *_replaced(words, "--ranks", str(2 * ranks))]
            )
        elif out is None:
            next_command = f"{command} --out layout.yaml"
        else:
            next_command = shlex.join(
                ["hybridcp", "check", str(out), "--seq-len", seq_len, "--mask", mask]
            )
        print(f"Next:     {next_command}")
    if out is not None:
        talk(f"wrote {out}" if fits else f"no layout fits, so {out} is not written")
    return exit_codes.OK if fits else exit_codes.NO


def _replaced(words: list[str], name: str, value: str) -> list[str]:
    return [value if i and words[i - 1] == name else word for i, word in enumerate(words)]
