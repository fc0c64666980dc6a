"""The command line `megalodon-numerics`: a module per family of commands, `views` for output."""

from reports.cli.program import main

__all__ = ["main"]
