"""Exit codes of every command, as `hybridcp --help` states them."""

OK = 0
NO = 1
"""The answer is no: no layout fits, or a proof failed."""
BAD_QUESTION = 2
"""Usage, impossible values, or an invalid file."""
ENVIRONMENT = 3
"""This machine lacks something the command needs."""
