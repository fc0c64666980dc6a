"""Errors that low-precision products would cause: for the terminal, as JSON and on the page.

Source: docs/formats.md "What would it cost?", docs/reports.md "The page".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reports.page.sections.heat import HeatCell, HeatMap
from reports.store.runs import Run
from reports.text import label, number, share
from stability.products import what_if
from stability.products.what_if import DIRECTIONS, LADDER, Cost

_WORDS = {
    "forward": "forward",
    "input_grad": "gradient of the input",
    "weight_grad": "gradient of the weight",
}


def as_document(costs: Sequence[Cost]) -> dict[str, Any]:
    """Return the costs, and the `gemm_backend` rules that follow from them, as JSON values."""
    rules = [list(rule) for rule in what_if.rules(costs)]
    return {"costs": what_if.rows(costs), "gemm_backend": rules}


def as_text(costs: Sequence[Cost]) -> str:
    """Return a table as text, and below it the `gemm_backend` rules that follow from the costs.

    A row of the table is a kind of matrix and one of its products: forward, or the gradient of the
    input or of the weight. A cell has error and underflow in one format, of the matrix of this kind
    whose product is the worst (`Cost.graver`).
    """
    groups: dict[tuple[str, str], list[Cost]] = {}
    for cost in costs:
        groups.setdefault((_kind(cost.gemm), cost.direction), []).append(cost)
    narrow, chosen = LADDER[:-1], what_if.advice(costs)
    lines = [f"{'matrix':<14}{'product':<13}" + "".join(f"{f:<26}" for f in narrow) + "bears"]
    for (kind, direction), part in groups.items():
        worst = {f: max((c for c in part if c.format == f), key=lambda c: c.graver) for f in narrow}
        cells = [f"error {c.error:.3f}, {c.underflow:.1%} to 0" for c in worst.values()]
        bears = sorted({chosen[c.gemm, c.direction] for c in part}, key=LADDER.index)
        row = "".join(f"{cell:<26}" for cell in cells)
        lines.append(f"{kind:<14}{direction:<13}{row}{' or '.join(bears)}")
    backend = "".join(f"\n    {rule!r}," for rule in what_if.rules(costs))
    return "\n".join([*lines, "", f"gemm_backend=({backend}\n)"])


def section(run: Run) -> dict[str, Any] | None:
    """Return the data of the section: heat maps of the two narrowest formats, and a table of all.

    None if the run did not examine products.
    """
    rows = list(run.manifest.stability.get("what if") or ())
    if not rows:
        return None
    narrow = [f for f in LADDER if any(row["format"] == f for row in rows)]
    return {
        "maps": [_map(rows, fmt, d) for fmt in narrow[:2] for d in DIRECTIONS],
        "rows": [
            _row(rows, fmt, d)
            for fmt in dict.fromkeys(r["format"] for r in rows)
            for d in DIRECTIONS
        ],
        "beyond": sum(_used(row) > 1 for row in rows if row["format"] == LADDER[0]),
        "products": sum(row["format"] == LADDER[0] for row in rows),
    }


def _map(rows: Sequence[Mapping[str, Any]], fmt: str, direction: str) -> HeatMap:
    part = [r for r in rows if (r["format"], r["direction"]) == (fmt, direction)]
    columns = tuple(dict.fromkeys(_kind(str(row["gemm"])) for row in part))
    cells: dict[str, list[HeatCell | None]] = {}
    for row in part:
        name = str(row["gemm"])
        layer = re.search(r"layers\.(\d+)\.", name)
        line = cells.setdefault(f"layer {layer[1]}" if layer else "", [None] * len(columns))
        line[columns.index(_kind(name))] = _cell(row)
    worst = max(part, key=_used)
    return HeatMap(
        case=label(_WORDS[direction]),
        edge=label(fmt),
        columns=tuple(label(c, 16) for c in columns),
        rows=tuple((name, tuple(line)) for name, line in cells.items()),
        summary=f"worst {label(str(worst['gemm']))} at {share(_used(worst))} of its bound",
    )


def _cell(row: Mapping[str, Any]) -> HeatCell:
    used = _used(row)
    return HeatCell(
        quantity=label(str(row["gemm"])),
        title=f"{label(str(row['gemm']))}: output error {number(row['error'])}, "
        f"{share(row['underflow'])} to 0, {share(row['clipped'])} clipped",
        log10=math.log10(used) if used > 0 else -math.inf,
        state="pass" if used <= 1 else "fail",
        first=False,
    )


def _row(rows: Sequence[Mapping[str, Any]], fmt: str, direction: str) -> dict[str, Any]:
    part = [r for r in rows if (r["format"], r["direction"]) == (fmt, direction)]
    worst = max(part, key=_used)
    return {
        "format": label(fmt, 24),
        "direction": label(_WORDS[direction], 32),
        "error": number(float(np.median(_numbers(part, "error")))),
        "worst": number(float(np.max(_numbers(part, "error")))),
        "mse": number(float(np.max(_numbers(part, "mse")))),
        "underflow": share(float(np.max(_numbers(part, "underflow")))),
        "clipped": share(float(np.max(_numbers(part, "clipped")))),
        "used": share(_used(worst)),
        "where": label(str(worst["gemm"])),
        "state": "ok" if _used(worst) <= 1 else "note",
    }


def _used(row: Mapping[str, Any]) -> float:
    """Return the larger of a product's error and underflow, each over its bound (`Cost.fraction`).

    Infinity if the field is NaN, which run.json stores as null: an operand is not finite, so
    nothing was measured.
    """
    used = row["fraction"]
    return math.inf if used is None or math.isnan(used) else float(used)


def _numbers(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Return the field `name` of all rows as floats.

    null becomes NaN, so that NumPy's maximum and median are NaN too.
    """
    return [math.nan if row[name] is None else float(row[name]) for row in rows]


def _kind(name: str) -> str:
    return re.sub(r"^(model\.)?(layers\.\d+\.)?", "", name)
