"""`python -m hybridcp.cli`: the same as the `hybridcp` command."""

from hybridcp.cli.app import main

main()
