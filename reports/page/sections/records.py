"""All measurements and findings of a run as rows for the page's script, compressed, worst first.

Pure functions from a run to text, without markup. Source: docs/reports.md "The page".
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from parity.engine.measure.measurement import Measurement, Verdict
from reports.page.sections.tables import rank_of
from reports.store.runs import Run
from reports.text import edge_name, label, metric_name, record_id
from reports.verdict.history import History
from reports.verdict.replays import command, suite_of
from stability.core.findings import Finding, Severity

COLUMNS = (
    "id", "suite", "case", "edge", "quantity", "metric", "value", "tolerance", "verdict", "dtype",
    "device", "note",
)  # fmt: skip
"""Columns of a row, in the order of the page's download. A finding has its probe as case, its
subject as quantity, and its threshold as tolerance."""
TRENDS = 10_000
"""Largest number of gates whose trend is stored in the page; the worst gates have priority."""
LONGEST = 400
"""Largest number of characters of a text in a row; longer texts are shortened."""

_SEVERITY = {
    Severity.OK: "pass",
    Severity.NOTE: "info",
    Severity.WARNING: "warning",
    Severity.ERROR: "fail",
}
_FINDING_RANK = {"fail": 5e5, "warning": 1.0, "pass": -0.5, "info": -0.75}


def id_of(m: Measurement) -> str:
    """Return the id of a measurement's row, by which links on the page find it."""
    return record_id(*m.key)


def id_of_finding(f: Finding) -> str:
    """Return the id of a finding's row, by which links on the page find it."""
    return record_id(f.probe, "", f.subject, f.metric)


def embed(
    rows: Sequence[Measurement],
    run: Run,
    history: History,
    drilldowns: Mapping[tuple[str, str, str], str],
) -> str:
    """Return rows, trends and drill-downs of a run as base64 of gzipped JSON.

    Args:
        rows: Measurements of the run.
        run: The run, for its findings and manifest.
        history: Earlier runs. A trend has one entry per run: the share of tolerance used, as
            100 log10 rounded to an integer; null without the gate, "x" if it is not finite.
        drilldowns: Markup of failing tensors, by case, edge and quantity.
    """
    ranked: list[tuple[float, tuple[Any, ...]]] = [(rank_of(m), _measurement(m)) for m in rows]
    ranked += [_finding(f) for f in run.findings]
    ranked.sort(key=lambda item: -item[0])
    table = [row for _, row in ranked]
    series = ((i, history.series.get(row[2:6])) for i, row in enumerate(table) if row[0])
    trends = [(i, shares) for i, shares in series if shares][:TRENDS]
    document = {
        "columns": {name: _column(name, [r[i] for r in table]) for i, name in enumerate(COLUMNS)},
        # The script looks up names of edges and metrics by the texts in the columns.
        "edges": {
            label(edge, LONGEST): edge_name(edge)
            for edge in dict.fromkeys(r[3] for r in table)
            if edge
        },
        "metrics": {
            label(metric, LONGEST): metric_name(metric)
            for metric in dict.fromkeys(r[5] for r in table)
        },
        "nights": [label(name, LONGEST) for name in history.runs],
        "trends": {str(i): [_level(v) for v in series] for i, series in trends},
        "tensors": {
            str(i): drilldowns[row[2:5]]
            for i, row in enumerate(table)
            if row[0] and row[5] == "rel_l2" and row[2:5] in drilldowns
        },
        "replay": {
            label(case, LONGEST): label(command(case, run.manifest), 10 * LONGEST)
            for case in sorted(
                {case.name for case in run.manifest.cases} & {row[2] for row in table}
            )
        },
    }
    text = json.dumps(document, ensure_ascii=True, separators=(",", ":"))
    # No time in the gzip header, so that equal input gives equal bytes.
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def suites(run: Run) -> list[str]:
    """Return the names of the run's suites, by which the page can filter the rows."""
    names = dict.fromkeys(suite_of(m) for m in run.measurements)
    return [*names, *(["stability"] if run.findings else [])]


def _measurement(m: Measurement) -> tuple[Any, ...]:
    named = "" if m.verdict is Verdict.INFO else id_of(m)
    what = (named, suite_of(m), m.case, m.edge, m.quantity, m.metric)
    return (*what, m.value, m.tolerance, m.verdict.value, m.dtype, m.device, m.note)


def _finding(f: Finding) -> tuple[float, tuple[Any, ...]]:
    verdict = _SEVERITY[f.severity]
    note = f"{f.message} Remedy: {f.remedy}" if f.remedy else f.message
    what = (id_of_finding(f), "stability", f.probe, "", f.subject, f.metric)
    return _FINDING_RANK[verdict], (*what, f.value, f.threshold, verdict, "", "", note)


def _column(name: str, values: Sequence[Any]) -> Any:
    """Return a column as JSON: numbers and ids as a list, texts as distinct texts and indices."""
    if name == "id":
        return list(values)
    if name in ("value", "tolerance"):
        # JSON has no NaN and no infinity; JavaScript reads these words back as numbers.
        return [v if math.isfinite(v) else str(v).replace("inf", "Infinity") for v in values]
    names = {text: i for i, text in enumerate(dict.fromkeys(values))}
    # `label` makes characters visible that would change the direction of text.
    return {"names": [label(text, LONGEST) for text in names], "at": [names[t] for t in values]}


def _level(share: float | None) -> int | str | None:
    if share is None:
        return None
    if not math.isfinite(share):
        return "x"
    return round(100 * math.log10(max(share, 1e-9)))
