"""The kill matrix and the alarms of healthy cases, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from parity.killmatrix import Kill, survivors
from parity.results import Measurement


def print_matrix(kills: Sequence[Kill], console: Console) -> None:
    """Print one row per fault: whether it was found, where, and how loudly."""
    table = Table("fault", "found at", "edge", "case", "signal", box=None)
    table.columns[-1].justify = "right"
    family = None
    for kill in kills:
        if kill.fault.family is not family:
            family = kill.fault.family
            table.add_row(f"[bold]{family}[/bold]")
        style = "" if kill.localised else "bold red"
        found = kill.found or "not detected"
        row = (f"  {kill.fault.name}", found, kill.edge, kill.case, f"{kill.signal:.1e}")
        table.add_row(*row, style=style)
    console.print(table)
    console.print("signal: error over tolerance; inf: refused, another dtype, or no number")


def summary(kills: Sequence[Kill]) -> str:
    """Return the counts in one line, and a line for each fault that survived."""
    detected = sum(kill.detected for kill in kills)
    localised = sum(kill.localised for kill in kills)
    lines = [f"{len(kills)} faults: {detected} detected, {localised} localised"]
    for kill in survivors(kills):
        where = f"reported at {kill.found}" if kill.detected else "not detected"
        lines.append(f"  {kill.fault.name}: {where}, expected {kill.fault.stage} in {kill.case}")
    return "\n".join(lines)


def alarm_lines(found: Iterable[Measurement]) -> list[str]:
    """Return one line per alarm of a healthy case."""
    return [
        f"{m.case} {m.edge} {m.quantity}: {m.metric} {m.value:.2e} over {m.tolerance:.2e} {m.note}"
        for m in found
    ]
