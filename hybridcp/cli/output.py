"""What the commands share in printing: emphasis where a terminal shows it, and files."""

import os
import sys

import typer


def talk(message: str) -> None:
    """Say something about the run, on stderr, away from the data."""
    print(message, file=sys.stderr)


def emphasized(text: str) -> str:
    """The text in bold if stdout is a terminal that wants colour; unchanged otherwise."""
    wanted = (
        sys.stdout.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM", "dumb") != "dumb"
    )
    return typer.style(text, bold=True) if wanted else text


def print_report(text: str) -> None:
    """Print a plan: its headline and the chosen row in bold on a terminal."""
    for line in text.splitlines():
        print(emphasized(line) if line.startswith((">", "Best:")) else line)
