"""The command line: one module for each family of commands, `views` for what they print."""

from reports.cli.program import main

__all__ = ["main"]
