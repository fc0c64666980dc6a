"""More than two stored runs side by side: as lines, JSON values or a page.

Source: docs/reports.md "Two runs side by side".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalodon_jax.files import written_aside
from parity.engine.measure.measurement import Verdict
from reports.page.several import render
from reports.registry.lookup import SHOWN, read_judgeable, runs_from
from reports.text import contrast_all, count, edge_name, edge_rank, for_json, metric_name
from reports.verdict.several import Cell, Row, Several, compare_runs

_SIGNS = {"pass": "", "fail": " ✕", "blocked": " ≠", "info": ""}


def read_several(folders: Sequence[Path]) -> Several:
    """Read runs and judge each against the first.

    Raises:
        StoreError: a run cannot be read, or is of a kind without a verdict.
    """
    return compare_runs([read_judgeable(folder) for folder in folders])


def write_several_page(page: Path, folders: Sequence[Path], several: Several) -> None:
    """Write the page of several runs.

    Raises:
        OSError: the page cannot be written; the old page is kept.
    """
    text = render(several, [f"{runs_from(page, folder)}/{folder.name}" for folder in folders])
    with written_aside(page) as aside:
        aside.write_text(text, encoding="utf-8")


def run_lines(several: Several) -> list[str]:
    """Return one line per run: its number in the table, name, verdict and sentence."""
    return [
        f"{i}: run {run.id}: {decision.word}: {decision.sentence}"
        for i, (run, decision) in enumerate(
            zip(several.runs, several.decisions, strict=True), start=1
        )
    ]


def table(several: Several) -> tuple[list[str], list[list[str]], int]:
    """Return the header, the rows, and the number of omitted rows of the table for the terminal.

    A column is a run. The rows are its verdict, its passing gates per edge, and the first `SHOWN`
    changes.
    """
    heads = ["", *(str(i) for i in range(1, len(several.runs) + 1))]
    rows = [["verdict", *(decision.word.value for decision in several.decisions)]]
    rows += [[f"gates held, {edge_name(edge)}", *cells] for edge, cells in _edges(several)]
    rows += [_texts(row) for row in several.rows[:SHOWN]]
    return heads, rows, max(0, len(several.rows) - SHOWN)


def _edges(several: Several) -> list[tuple[str, list[str]]]:
    counts: dict[str, list[list[int]]] = {}
    for i, run in enumerate(several.runs):
        for m in run.measurements:
            if m.verdict is not Verdict.INFO:
                cells = counts.setdefault(m.edge, [[0, 0] for _ in several.runs])
                cells[i][0] += m.verdict is Verdict.PASS
                cells[i][1] += 1
    return [
        (edge, [f"{held:,} / {gates:,}" if gates else "–" for held, gates in counts[edge]])
        for edge in sorted(counts, key=edge_rank)
    ]


def _texts(row: Row) -> list[str]:
    case, edge, quantity, metric = row.key
    compared = f" ({edge_name(edge)})" if edge else ""
    values = contrast_all([cell.value if cell else None for cell in row.cells])
    cells = [
        "–" if cell is None else f"{value}{_SIGNS[cell.state]}{_work(cell)}"
        for cell, value in zip(row.cells, values, strict=True)
    ]
    return [f"{quantity} in {case}{compared}, {metric_name(metric)}", *cells]


def _work(cell: Cell) -> str:
    return " (other work)" if cell.other_work else ""


def more_line(omitted: int) -> list[str]:
    """Return one line that counts the omitted rows; no line if none are."""
    return [f"and {count(omitted, 'more row')}; --html and --json have them"] if omitted else []


def as_values(several: Several) -> dict[str, Any]:
    """Return the fields "runs" and "rows", which --json adds to those of a verdict."""
    runs = [
        {
            "run": run.id,
            "verdict": decision.word.value,
            "exit_code": int(decision.exit_code),
            "sentence": decision.sentence,
        }
        for run, decision in zip(several.runs, several.decisions, strict=True)
    ]
    rows = [
        {
            **dict(zip(("case", "edge", "quantity", "metric"), row.key, strict=True)),
            "cells": [_value(cell) for cell in row.cells],
        }
        for row in several.rows
    ]
    return {"runs": runs, "rows": rows}


def _value(cell: Cell | None) -> dict[str, Any] | None:
    if cell is None:
        return None
    return {
        "value": for_json(cell.value),
        "tolerance": for_json(cell.tolerance),
        "state": cell.state,
        "other_work": cell.other_work,
        "what": cell.what.value if cell.what else None,
    }
