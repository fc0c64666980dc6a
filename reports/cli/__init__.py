"""The command line: one module per family of commands, and `views` for their output."""

from reports.cli.program import main

__all__ = ["main"]
