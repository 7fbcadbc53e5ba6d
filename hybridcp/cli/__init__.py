"""The `hybridcp` command. Data goes to stdout, talk to stderr; never a traceback.

One file holds one group of commands; each imports what it needs when it runs, so that `plan`
answers before torch would have been found on disk.
"""

from hybridcp.cli.app import app, main, run

__all__ = ["app", "main", "run"]
