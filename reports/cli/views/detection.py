"""Output of `parity faults`: tables of detected faults, and false alarms of healthy cases."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from parity.engine.measure.measurement import Measurement
from parity.engine.measure.quantity import kind_of
from parity.faults.detection import EDGES, Detection, DetectionTable, missed
from parity.megalodon.edges import MegalodonEdge
from reports.text import edge_name


def print_table(detections: Sequence[Detection], console: Console) -> None:
    """Print one row per fault: the stage reported as wrong first, and its error / tolerance."""
    table = Table("fault", "found at", "edge", "case", "signal", box=None)
    table.columns[-1].justify = "right"
    family = None
    for row in detections:
        if row.fault.family is not family:
            family = row.fault.family
            table.add_row(f"[bold]{family}[/bold]")
        style = "" if row.localised else "bold red"
        where = row.found or "not detected"
        cells = (f"  {row.fault.name}", where, row.edge, row.case, f"{row.signal:.1e}")
        table.add_row(*cells, style=style)
    console.print(table)
    console.print("signal: error / tolerance; inf: weights rejected, another dtype, or no number")


def summary(detections: Sequence[Detection]) -> str:
    """Return a line that counts detected and localised faults, then a line per missed fault."""
    detected = sum(row.detected for row in detections)
    localised = sum(row.localised for row in detections)
    lines = [f"{len(detections)} faults: {detected} detected, {localised} localised"]
    for row in missed(detections):
        where = f"reported at {row.found}" if row.detected else "not detected"
        lines.append(f"  {row.fault.name}: {where}, expected {row.fault.stage} in {row.case}")
    return "\n".join(lines)


def alarm_lines(alarms: Iterable[Measurement]) -> list[str]:
    """Return one line per false alarm: a measurement above its tolerance without a fault."""
    return [
        f"{m.case} {m.edge} {m.quantity}: {m.metric} {m.value:.2e} over {m.tolerance:.2e} {m.note}"
        for m in alarms
    ]


def markdown(table: DetectionTable) -> str:
    """Return the text of docs/tables/detection.md.

    `table` must have one row per fault and edge of `EDGES`, as `detection.run(each=True)` returns.
    """
    # `detection.run` returns the rows of each fault in the order of `EDGES`.
    by_edge = {edge: table.detections[i :: len(EDGES)] for i, edge in enumerate(EDGES)}
    parts = ["# The detection table", _COUNTS, _counts(by_edge), _SIDES, _two_sided(table, by_edge)]
    families: dict[str, list[tuple[Detection, ...]]] = {}
    for row in zip(*by_edge.values(), strict=True):
        families.setdefault(str(row[0].fault.family), []).append(row)
    parts.append("## Every fault\n\n" + _SIGNAL)
    for family, rows in families.items():
        parts.append(f"### {family}\n\n{_faults(rows)}")
    return "\n\n".join(parts) + "\n"


_COUNTS = """Written by `megalodon-numerics parity faults --markdown`, which plants every fault of
`tools/faults/` in the JAX model, one after the other, and asks two edges of the triangle about it
under the shipped tolerances. A fault is detected when its witness case leaves a tolerance, and
localised when what is reported first is where it was planted."""
_SIDES = """## Two-sided

A tolerance is right when it is far above what a healthy model does, and far below the weakest bug.
The first column is the largest share of a tolerance that the witnesses use without a fault, the
second the weakest fault found there, in tolerances. The room on both sides is the choice."""
_SIGNAL = """The signal is error over tolerance where the fault was reported. ∞: the strict loader
refuses the weights, a dtype differs, or there is no number. A dash: that edge does not see it."""


def _counts(by_edge: dict[MegalodonEdge, list[Detection]]) -> str:
    rows = ["| edge | faults | detected | at the right stage |", "| --- | --- | --- | --- |"]
    for edge, detections in by_edge.items():
        numbers = (
            len(detections),
            sum(d.detected for d in detections),
            sum(d.localised for d in detections),
        )
        rows.append(f"| {edge_name(edge)} | {' | '.join(map(str, numbers))} |")
    either = list(zip(*by_edge.values(), strict=True))
    detected = sum(any(k.detected for k in row) for row in either)
    localised = sum(any(k.localised for k in row) for row in either)
    return "\n".join([*rows, f"| either | {len(either)} | {detected} | {localised} |"])


def _two_sided(table: DetectionTable, by_edge: dict[MegalodonEdge, list[Detection]]) -> str:
    rows = [
        "| edge | kind | healthy, at most | weakest fault | named |",
        "| --- | --- | --- | --- | --- |",
    ]
    for (edge, kind), share in sorted(table.used.items()):
        candidates = [
            k
            for k in by_edge[edge]
            if k.localised and kind_of(k.found) == kind and math.isfinite(k.signal)
        ]
        weakest = min(candidates, key=lambda k: k.signal, default=None)
        cells = "–", "none of the catalogue"
        if weakest is not None:
            cells = _signal(weakest), f"`{weakest.fault.name}`"
        rows.append(f"| {edge_name(edge)} | {kind} | {share:.1g} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _faults(rows: Sequence[tuple[Detection, ...]]) -> str:
    sides = " | ".join(edge_name(edge).removesuffix(" vs oracle") for edge in EDGES)
    lines = [f"| fault | how it is made | case | reported at | {sides} |"]
    lines.append("| --- | --- | --- | --- |" + " --- |" * len(EDGES))
    for row in rows:
        fault = row[0].fault
        where = next((k.found for k in row if k.detected), "nothing")
        how = fault.how.replace("|", "\\|")
        signals = " | ".join(_signal(detection) for detection in row)
        lines.append(f"| `{fault.name}` | {how} | {row[0].case} | `{where}` | {signals} |")
    return "\n".join(lines)


def _signal(row: Detection) -> str:
    if not row.detected:
        return "–"
    return f"{row.signal:.1g}" if math.isfinite(row.signal) else "∞"
