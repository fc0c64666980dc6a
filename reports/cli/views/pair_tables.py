"""Output of `parity --torch`, the comparison of a checkpoint pair: tables and JSON.

Source: docs/reports.md "The page", docs/parity.md "First divergence".
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from parity.engine.measure.measurement import Measurement, Verdict
from reports.cli.checkpoint_pair import Result
from reports.text import edge_name, edge_rank, for_json, number, share

_SHOWN = 12
"""Largest number of different weights in the printed table."""


def show(result: Result, console: Console) -> None:
    """Print tables of the weights that differ, the layers and the edges, and the verdict."""
    if result.unequal:
        console.print(_weights(result))
    if result.layers is not None:
        console.print(_layers(result))
    if result.measurements:
        console.print(_edges(result))
    console.print(f"{result.verdict[0]}: {result.sentence}", soft_wrap=True, markup=False)


def as_document(result: Result) -> dict[str, Any]:
    """Return all results as JSON values; numbers that are not finite become None."""
    layers = result.layers
    document = {
        "verdict": result.verdict[0],
        "exit_code": result.verdict[1],
        "sentence": result.sentence,
        "how": result.how,
        "weights": {
            "equal": sum(row.verdict is Verdict.PASS for row in result.weights),
            "rows": [asdict(row) for row in result.weights],
        },
        "layers": [asdict(step) for step in layers.steps] if layers else [],
        "losses": dict(layers.losses) if layers else {},
        "measurements": [asdict(m) for m in result.measurements],
    }
    return for_json(document)


def _weights(result: Result) -> RenderableType:
    table = _table("Weights that differ", "parameter", "relative L2", "what")
    for row in result.unequal[:_SHOWN]:
        table.add_row(row.name, "" if math.isnan(row.rel_l2) else number(row.rel_l2), row.note)
    if len(result.unequal) > _SHOWN:
        table.add_row(f"and {len(result.unequal) - _SHOWN:,} more", "", "see --json")
    return table


def _layers(result: Result) -> RenderableType:
    assert result.layers is not None
    names = ("step", "free", "forced", "amplification", "of tolerance", "closest gate")
    table = _table("Layer by layer", *names)
    for step in result.layers.steps:
        grown = "" if math.isnan(step.amplification) else f"{step.amplification:.2f}"
        used = number(step.free), number(step.forced), grown, share(step.share)
        stage = step.where.partition(" ")[0].removeprefix(f"{step.name}.")
        table.add_row(step.name, *used, stage)
    return table


def _edges(result: Result) -> RenderableType:
    names = ("edge", "gates", "fail", "closest", "of tolerance")
    forced = ", every step fed the reference's activations" if result.layers else ""
    table = _table(f"The triangle{forced}", *names)
    for edge in sorted({m.edge for m in result.gates}, key=edge_rank):
        rows = [m for m in result.gates if m.edge == edge]
        failed = sum(m.verdict is not Verdict.PASS for m in rows)
        worst = max(rows, key=_used)
        table.add_row(
            edge_name(edge), str(len(rows)), str(failed), worst.quantity, share(_used(worst))
        )
    return table


def _used(row: Measurement) -> float:
    return math.inf if math.isnan(row.fraction) else row.fraction


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, overflow="fold", justify="left" if i == 0 else "right")
    return table
