"""The command line as a whole: its commands, and how every failure becomes one sentence."""

import os
import sys
from io import TextIOWrapper
from typing import Annotated, NoReturn

import typer

import hybridcp
from hybridcp.cli import exit_codes
from hybridcp.cli.layouts import CHECK_HELP, SHOW_HELP, check_command, show_command
from hybridcp.cli.plan import PLAN_HELP, plan_command
from hybridcp.errors import HybridCPError, ScheduleError

HELP = """Examples:

\b
  hybridcp plan --heads 32 --ranks 256
  hybridcp check layout.yaml --seq-len 1M --mask causal

Plan, prove and show context-parallel attention: Ulysses x Ring.

\b
Exit codes: 0 done; 1 the answer is no (no layout fits, a proof failed);
2 bad question (usage, impossible values, invalid file); 3 this machine lacks something.
"""

# Plain help: the same in a terminal, a pipe and a log, and no import of rich.
app = typer.Typer(
    name="hybridcp",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("plan", help=PLAN_HELP, short_help="Find the best layout.")(plan_command)
app.command("check", help=CHECK_HELP, short_help="Prove that a layout computes a mask.")(
    check_command
)
app.command("show", help=SHOW_HELP, short_help="Show ranks, tokens and work of a layout.")(
    show_command
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hybridcp {hybridcp.__version__}")
        raise typer.Exit


@app.callback(help=HELP)
def _root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Options of `hybridcp` itself."""


def run(arguments: list[str]) -> int:
    """Run one command line.

    Args:
        arguments: without the program's name.

    Returns:
        The exit code.
    """
    try:
        result = app(arguments, prog_name="hybridcp", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else exit_codes.OK
    except BrokenPipeError:
        # The reader has seen enough (`hybridcp plan … | head`). Leave nothing to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_codes.OK
    except SystemExit:
        # Without standalone mode typer exits for one reason only: the same, noticed by itself.
        return exit_codes.OK
    except KeyboardInterrupt:
        return _failure("stopped", 130)
    except ScheduleError as problem:
        return _failure(str(problem), exit_codes.NO)
    except HybridCPError as problem:
        return _failure(str(problem), exit_codes.BAD_QUESTION)
    except ImportError as problem:
        return _failure(f"{problem}; install what is missing", exit_codes.ENVIRONMENT)
    except OSError as problem:
        where = f"{problem.filename}: " if problem.filename else ""
        return _failure(f"{where}{problem.strerror or problem}", exit_codes.BAD_QUESTION)
    except typer.Abort:
        return _failure("stopped", 130)
    except Exception as problem:
        # typer does not export the class of its usage errors; they are known by their method.
        if not hasattr(problem, "format_message"):
            raise
        context = getattr(problem, "ctx", None)
        command = context.command_path if context else "hybridcp"
        message = problem.format_message().rstrip(".") or "a command is missing"
        return _failure(f"{message}; see {command} --help", exit_codes.BAD_QUESTION)


def main() -> NoReturn:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A sign that the terminal cannot show is no reason to fail.
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))


def _failure(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code
