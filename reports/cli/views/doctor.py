"""Output of `doctor` in eighty columns: what must be changed, what could be, and all facts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from reports.cli.doctor import Line

WIDTH = 80
"""Width in columns when the output is piped."""


def show_lines(lines: Sequence[Line]) -> None:
    """Print the advice of all lines, necessary advice first, and below it all facts."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    needed = [line for line in lines if line.advice and not line.optional]
    possible = [line for line in lines if line.advice and line.optional]
    if needed:
        _section(console, "To do", [(line.topic, line.advice) for line in needed])
    else:
        console.print("Nothing needs doing: this machine can measure.")
    if possible:
        _section(console, "Could be better", [(line.topic, line.advice) for line in possible])
    _section(console, "What is here", [(line.topic, line.value) for line in lines])


def _section(console: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        # Versions, flags and paths are data and may look like rich markup.
        table.add_row(*map(Text, row))
    console.print(f"\n{title}", style="bold", markup=False)
    console.print(table)
