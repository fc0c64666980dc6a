"""Heat maps: one per case, layers down, modules across, log10(error / tolerance) in every cell.

Pure functions from a run to plain data. Source: docs/reports.md "The page".
"""

# The unions in the type hints of pandas cannot be narrowed.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from parity.engine.measure.measurement import Kind, Measurement, Verdict
from reports.page.sections.tables import STATES, edges_of, gates_of, rank_of
from reports.text import edge_name, label, number, share
from reports.verdict.decide import Decision

MAPS = 16
"""Largest number of heat maps per edge (comparison); each map shows one case."""


@dataclass(frozen=True, slots=True)
class HeatCell:
    """One stage of a heat map.

    Attributes:
        quantity: name of the stage.
        title: text of its tooltip.
        log10: log10 of error over tolerance; -inf for an error of 0, None for NaN or a stage that
            could not be compared.
        state: "pass", "fail" or "blocked" (not comparable).
        first: whether the stage is the first divergence of its case.
    """

    quantity: str
    title: str
    log10: float | None
    state: str
    first: bool


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Heat map of one case in one comparison (edge), in order of computation."""

    case: str
    edge: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[HeatCell | None, ...]], ...]
    """Each row: its label, and one cell per column, None where there is no stage. The only
    cell of a row with one cell spans all columns."""
    summary: str


def _heat_cell(m: Measurement, first: Measurement | None) -> HeatCell:
    fraction = m.fraction
    if m.verdict is Verdict.NOT_COMPARABLE or math.isnan(fraction):
        exponent = None
    elif fraction <= 0:
        exponent = -math.inf
    else:
        exponent = math.log10(fraction)
    return HeatCell(
        quantity=label(m.quantity),
        title=f"{label(m.quantity)}: {number(m.value)}, tolerance {number(m.tolerance)}",
        log10=exponent,
        state=STATES[m.verdict],
        first=first is not None and m.quantity == first.quantity,
    )


def _heat_map(stages: Sequence[Measurement], first: Measurement | None) -> HeatMap:
    """Build the heat map of one case and edge.

    Args:
        stages: One gate per stage, in order of computation.
        first: First divergence of the case, or None.
    """
    layered = [re.fullmatch(r"layers\.(\d+)\.(.+)", m.quantity) for m in stages]
    columns = tuple(dict.fromkeys(match[2] for match in layered if match)) or ("",)
    rows: dict[str, list[HeatCell | None]] = {}
    for m, match in zip(stages, layered, strict=True):
        shown = _heat_cell(m, first)
        if match is None:
            rows[label(m.quantity, 24)] = [shown]
        else:
            row = rows.setdefault(f"layer {match[1]}", [None] * len(columns))
            row[columns.index(match[2])] = shown
    worst = max(stages, key=rank_of)
    bad = sum(m.verdict is not Verdict.PASS for m in stages)
    summary = f"{bad} of {len(stages)} stages outside tolerance; " if bad else "All stages hold; "
    where = f"first at {label(first.quantity)}, " if first is not None and bad else ""
    return HeatMap(
        case=label(stages[0].case, 48),
        edge=edge_name(stages[0].edge),
        columns=tuple(label(c, 16) for c in columns),
        rows=tuple((name, tuple(cells)) for name, cells in rows.items()),
        summary=f"{summary}{where}worst {label(worst.quantity)} at {share(worst.fraction)}",
    )


def _stages(gates: Iterable[Measurement]) -> list[Measurement]:
    """Return the worst gate of each stage, in order of computation."""
    worst: dict[str, Measurement] = {}
    for m in gates:
        if m.quantity not in worst or rank_of(m) > rank_of(worst[m.quantity]):
            worst[m.quantity] = m
    return sorted(worst.values(), key=lambda m: m.stage)


def heat_map_of(
    rows: Iterable[Measurement], case: str, edge: str, first: Measurement | None
) -> HeatMap | None:
    """Return the heat map of one case in one comparison; None if none of its stages was measured.

    Args:
        rows: Measurements of a run.
        case: Name of the case.
        edge: Name of the comparison, such as "jax32:oracle".
        first: First divergence of the case in this comparison, or None.
    """
    there = [
        m
        for m in rows
        if (m.case, m.edge) == (case, edge)
        and m.kind in (Kind.BLOCK, Kind.LOGITS)
        and m.stage >= 0
        and m.verdict is not Verdict.INFO
    ]
    return _heat_map(_stages(there), first) if there else None


def heat_maps(data: pd.DataFrame, decision: Decision) -> list[dict[str, object]]:
    """Return for each edge (comparison) heat maps of at most `MAPS` cases, the gravest first.

    Failing cases are ordered as in `decision.starts`; cases that pass follow, ordered by their
    worst gate.
    """
    starts = {(m.case, m.edge): m for m in decision.starts}
    rank = {pair: i for i, pair in enumerate(starts)}
    gates = gates_of(data[data["kind"].isin([Kind.BLOCK, Kind.LOGITS]) & (data["stage"] >= 0)])
    # A stream has no stages, and a map of logits alone would be useless.
    layered = set(gates[gates["kind"] == Kind.BLOCK]["case"])
    gates = gates[gates["case"].isin(layered)] if layered else gates
    out = []
    for edge in edges_of(gates):
        groups = {
            case: _stages(group["measurement"])
            for case, group in gates[gates["edge"] == edge].groupby("case", sort=False)
        }

        def grave(
            case: str, edge: str = edge, groups: dict[str, list[Measurement]] = groups
        ) -> tuple[int, float]:
            return rank.get((case, edge), len(rank)), -max(rank_of(m) for m in groups[case])

        cases = sorted(groups, key=grave)
        maps = [_heat_map(groups[case], starts.get((case, edge))) for case in cases[:MAPS]]
        out.append(
            {
                "name": edge_name(edge),
                "worst": maps[0],
                "others": maps[1:],
                "omitted": max(0, len(cases) - MAPS),
            }
        )
    return out
