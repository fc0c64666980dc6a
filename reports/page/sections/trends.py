"""Trends over nights: the worst gate of each edge (comparison) per night, and gates that moved.

Pure functions from a history to plain data. Source: docs/reports.md "The page".
"""

# The unions in the type hints of pandas cannot be narrowed.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import pandas as pd

from parity.engine.measure.measurement import Measurement
from reports.page.sections.tables import cell, edges_of, gates_of
from reports.page.svg import Line
from reports.text import count, edge_name, share
from reports.verdict.history import History, worst_over

DRIFTS = 12
"""Largest number of gates listed as moved away from their median."""
STEADY = 1.05
"""A gate whose share of tolerance is within this factor of its median over earlier nights counts as
steady."""


def trends(data: pd.DataFrame, history: History) -> dict[str, Any] | None:
    """Return curves over nights of the worst share of tolerance, one for each edge.

    Of more than nine edges, the first nine of `edges_of` have a curve. The result also lists the
    gates whose share of tolerance moved by the largest factor from its median over the earlier
    nights. None without an earlier night, or without a gate.
    """
    nights = len(history.runs)
    gates = gates_of(data)
    if not nights or gates.empty:
        return None
    worst = {}
    for edge in edges_of(gates)[:9]:
        rows = gates[gates["edge"] == edge]["measurement"]
        now = max((m.fraction for m in rows), key=lambda v: (math.isnan(v), v))
        worst[edge], _ = worst_over(history, {m.key for m in rows}, now)
    finite = [v for series in worst.values() for v in series if v is not None and math.isfinite(v)]
    # A failure with a tolerance of 0 has an infinite share; it is drawn above all others.
    top = 10.0 * max([1.0, *finite])
    lines = [
        Line(edge_name(edge), f"v{i}", _points(series, top))
        for i, (edge, series) in enumerate(worst.items())
    ]
    moved = sorted(
        (move for m in gates["measurement"] if (move := _moved(m, history))),
        key=lambda item: -abs(math.log(item["factor"])),
    )
    return {
        "nights": nights + 1,
        "first": history.runs[0],
        "lines": lines,
        "moved": moved[:DRIFTS],
        "omitted": max(0, len(moved) - DRIFTS),
        "infinite": any(v == math.inf for series in worst.values() for v in series),
        "sentence": _sentence(nights + 1, len(moved), len(gates)),
    }


def _sentence(nights: int, moved: int, gates: int) -> str:
    spread = f"{100 * (STEADY - 1):.0f} %"
    if not moved:
        return f"Over {nights} nights no gate left {spread} of its median."
    return (
        f"Over {nights} nights {count(moved, 'gate')} of {gates:,} "
        f"{'is' if moved == 1 else 'are'} more than {spread} from the median of the nights before."
    )


def _points(series: Sequence[float | None], top: float) -> list[tuple[float, float]]:
    """Return one point (x, y) per night: y is the log10 of its share, clipped to 1e-6 ... `top`.

    x is 0 for the night of the page, -1 for the night before, and so on. y is NaN, which interrupts
    the line, for a night without the gate or with a NaN.

    Args:
        series: Share of the tolerance in each night, oldest first; None without the gate.
        top: Largest share to draw.
    """
    last = len(series) - 1
    return [
        (i - last, math.nan if v is None or math.isnan(v) else math.log10(min(max(v, 1e-6), top)))
        for i, v in enumerate(series)
    ]


def _moved(m: Measurement, history: History) -> dict[str, Any] | None:
    series = history.series.get(m.key, ())
    past = [v for v in series if v is not None and math.isfinite(v) and v > 0]
    now = m.fraction
    if not past or not (math.isfinite(now) and now > 0):
        return None
    usual = median(past)
    factor = now / usual
    if 1 / STEADY <= factor <= STEADY:
        return None
    return {
        "edge": edge_name(m.edge),
        "cell": cell(m),
        "factor": factor,
        "times": f"{factor:.2f}×" if factor < 100 else f"{factor:.1e}×",
        "usual": share(usual),
        "series": (*series, now),
    }
