"""Measurements as tables: overview, cases by edge, parameters, trajectory, precision, changes.

Pure functions from a run to plain data, without markup. Source: docs/reports.md "The page".
"""

# The unions in the type hints of pandas cannot be narrowed.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import takewhile

import pandas as pd

from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.engine.measure.quantity import Quantity, Role
from reports.text import (
    contrast,
    edge_name,
    edge_question,
    edge_rank,
    label,
    metric_name,
    metric_value,
    number,
    record_id,
    share,
)
from reports.verdict.changes import Change, What
from reports.verdict.history import History, worst_over

ROWS = 120
"""Largest number of rows of a table. The worst have priority; the page counts the omitted ones."""

FOLDED = 30
"""Smallest length, in characters, of an ending shared by all notes of a table for which it is cut
from the notes and shown once, above the table."""

_METRICS = (
    "max_abs",
    "max_rel",
    "ulp_p50",
    "ulp_p99",
    "ulp_max",
    "cosine",
    "kl_p50",
    "kl_p99",
    "kl_max",
    "top1_agreement",
    "top1_flips",
    "topk_jaccard",
    "nll_difference",
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement as text for a table: value, tolerance, share of tolerance used, state."""

    value: str
    tolerance: str
    share: str
    state: str
    """"pass", "fail", "blocked" (not comparable) or "info"."""
    percent: float
    """Length of the bar that shows the share of the tolerance, 0 to 100."""
    quantity: str = ""
    case: str = ""
    metric: str = ""
    id: str = ""
    """Id of the measurement's row on the page, for links."""


def frame(rows: Sequence[Measurement]) -> pd.DataFrame:
    """Return the measurements as a table, one row each, with the fields of `Measurement`.

    Further columns: `used`, the share of tolerance used; `rank` (`rank_of`); `row`, the position in
    `rows`; and `measurement`, the object itself.
    """
    names = [field.name for field in fields(Measurement)]
    data = pd.DataFrame([[getattr(m, name) for name in names] for m in rows], columns=names)
    data["used"] = [m.fraction for m in rows]
    data["rank"] = [rank_of(m) for m in rows]
    data["row"] = range(len(rows))
    data["measurement"] = rows
    return data


def rank_of(m: Measurement) -> float:
    """Return a sort key, largest for the worst measurement.

    Infinity for a gate that is not comparable or has no finite share of tolerance. Next come
    failures and then passing gates, both by the share used; -1 for one without a tolerance.
    """
    if m.verdict is Verdict.INFO:
        return -1.0
    fraction = m.fraction
    if m.verdict is Verdict.NOT_COMPARABLE or not math.isfinite(fraction):
        return math.inf
    return fraction + (1e6 if m.verdict is Verdict.FAIL else 0.0)


STATES = {
    Verdict.PASS: "pass",
    Verdict.FAIL: "fail",
    Verdict.NOT_COMPARABLE: "blocked",
    Verdict.INFO: "info",
}


def state_of(rows: Iterable[Measurement]) -> str:
    """Return the state of a group of measurements.

    "fail" if a gate failed, else "blocked" if a gate could not be compared, else "pass", or "info"
    without any gate.
    """
    verdicts = {m.verdict for m in rows} - {Verdict.INFO}
    if not verdicts:
        return "info"
    if Verdict.FAIL in verdicts:
        return "fail"
    return "pass" if verdicts == {Verdict.PASS} else "blocked"


def cell(m: Measurement) -> Cell:
    """Return one measurement as a cell: formatted numbers, state and link."""
    fraction = m.fraction
    percent = 0.0 if math.isnan(m.tolerance) else 100.0
    if math.isfinite(fraction):
        percent = min(100.0, max(0.0, 100 * fraction))
    return Cell(
        value=number(m.value) if m.verdict is not Verdict.NOT_COMPARABLE else "not comparable",
        tolerance=number(None if math.isnan(m.tolerance) else m.tolerance),
        share=share(None if math.isnan(m.tolerance) else fraction),
        state=STATES[m.verdict],
        percent=round(percent, 1),
        quantity=label(m.quantity),
        case=label(m.case, 48),
        metric=metric_name(m.metric),
        id=record_id(*m.key),
    )


def gates_of(data: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of gates: measurements that have a tolerance or could not be compared."""
    return data[data["verdict"] != Verdict.INFO]


def _worst(data: pd.DataFrame) -> Measurement:
    """Return the gate with the largest `rank`; of equal ones the first in order of computation."""
    top = data[data["rank"] == data["rank"].max()]
    return min(top["measurement"], key=lambda m: (m.stage < 0, m.stage))


def edges_of(data: pd.DataFrame) -> list[str]:
    """Return the distinct edges of the data, in the order of `reports.text.edge_rank`."""
    return sorted(set(data["edge"]), key=edge_rank)


def overview(
    data: pd.DataFrame,
    history: History,
    starts: Sequence[Measurement] = (),
    scopes: Mapping[str, str] | None = None,
) -> list[dict[str, object]]:
    """Return one row per edge (comparison): passing gates, the most important gate, and a trend.

    The most important gate is the first divergence if `starts` has one on the edge, else the worst
    gate. The worst gate would mislead: errors grow downstream, and a flipped token is an infinite
    share of a tolerance of 0.

    Args:
        data: Measurements of the run, from `frame`.
        history: Earlier runs; the trend is that of the edge's worst share of tolerance.
        starts: First divergences.
        scopes: Text by edge on which positions it compares; None for no such text.
    """
    rows = []
    first = {m.edge: m for m in reversed(starts)}
    gates = gates_of(data)
    for edge in edges_of(gates):
        part = gates[gates["edge"] == edge]
        worst = _worst(part)
        keys = {m.key for m in part["measurement"]}
        series, _ = worst_over(history, keys, worst.fraction)
        rows.append(
            {
                "name": edge_name(edge),
                "question": edge_question(edge),
                "scope": (scopes or {}).get(edge, ""),
                "passed": int((part["verdict"] == Verdict.PASS).sum()),
                "gates": len(part),
                "state": state_of(part["measurement"]),
                "starts": edge in first,
                "gate": cell(first.get(edge, worst)),
                "series": series,
            }
        )
    return rows


def matrix(data: pd.DataFrame, kind: Kind) -> dict[str, object]:
    """Return a table of cases by edges; a cell is the worst gate of a kind, None without gates.

    Only gates of the kind's main metric count: `disagreement` for tokens, else `rel_l2`.
    """
    metric = "disagreement" if kind is Kind.TOKENS else "rel_l2"
    part = gates_of(data[(data["kind"] == kind) & (data["metric"] == metric)])
    edges = edges_of(part)
    worst = {pair: _worst(group) for pair, group in part.groupby(["case", "edge"], sort=False)}
    order = part.groupby("case", sort=False)["rank"].max()
    # Cases keep the order of the run; if they are too many, the worst come first.
    cases = list(order.index)
    if len(cases) > ROWS:
        cases = list(order.sort_values(ascending=False, kind="stable").index)
    rows = [
        {
            "case": label(case, 48),
            "cells": [cell(worst[case, e]) if (case, e) in worst else None for e in edges],
        }
        for case in cases[:ROWS]
    ]
    return {"rows": rows, "omitted": max(0, len(cases) - ROWS), **_summary(part)}


def _summary(part: pd.DataFrame) -> dict[str, object]:
    """Return the summary of a table's gates: edges, number of gates and failures, worst gate."""
    worst = _worst(part) if len(part) else None
    return {
        "edges": [edge_name(e) for e in edges_of(part)],
        "gates": len(part),
        "failing": int((part["verdict"] != Verdict.PASS).sum()),
        "worst": worst and {**asdict(cell(worst)), "edge": edge_name(worst.edge)},
    }


def metric_tables(data: pd.DataFrame, kind: Kind, history: History) -> list[dict[str, object]]:
    """Return one table per edge (comparison), with a row per relative L2 gate of a kind.

    Worst gates come first. A row also has all other metrics of the gate's tensor, and the gate's
    share of tolerance in earlier runs.
    """
    part = data[(data["kind"] == kind) & (data["metric"] != "error_over_reference")]
    info = part[part["metric"] != "rel_l2"]
    part = part[part["metric"] == "rel_l2"]
    values = {m.key: metric_value(m.metric, m.value) for m in info["measurement"]}
    present = set(info["metric"])
    metrics = [m for m in _METRICS if m in present] + sorted(present - set(_METRICS))
    tables = []
    for edge in edges_of(gates_of(part)):
        gates = gates_of(part[part["edge"] == edge]).sort_values(
            ["rank", "row"], ascending=[False, True]
        )
        rows = [
            {
                "cell": cell(m),
                "values": [values.get((m.case, edge, m.quantity, k), "–") for k in metrics],
                "series": worst_over(history, {m.key}, m.fraction)[0],
            }
            for m in gates["measurement"][:ROWS]
        ]
        tables.append(
            {
                "name": edge_name(edge),
                # A good cosine rounds to 1, so its distance from 1 is shown.
                "metrics": ["1 − cosine" if m == "cosine" else metric_name(m) for m in metrics],
                "rows": rows,
                "omitted": max(0, len(gates) - ROWS),
                "failing": int((gates["verdict"] != Verdict.PASS).sum()),
            }
        )
    return tables


def parameter_tables(data: pd.DataFrame) -> list[dict[str, object]]:
    """Return for each edge one row per parameter: the worst gate (`rank_of`) of its gradient.

    The gate is the worst over all cases. Rows are ordered by it, the worst first.
    """
    part = gates_of(data[data["kind"] == Kind.GRADIENT])
    tables = []
    for edge in edges_of(part):
        grouped = part[part["edge"] == edge].groupby("quantity", sort=False)
        parameters = sorted(
            ((_worst(g), len(g), int((g["verdict"] != Verdict.PASS).sum())) for _, g in grouped),
            key=lambda item: -rank_of(item[0]),
        )
        rows = [
            {
                "parameter": label(m.quantity.removeprefix(Role.GRADIENT)),
                "cell": cell(m),
                "cases": cases,
                "failing": failing,
            }
            for m, cases, failing in parameters[: 2 * ROWS]
        ]
        tables.append(
            {
                "name": edge_name(edge),
                "rows": rows,
                "omitted": max(0, len(parameters) - 2 * ROWS),
                "failing": sum(failing for _, _, failing in parameters),
            }
        )
    return tables


def trajectory_rows(data: pd.DataFrame) -> dict[str, object]:
    """Return a table of trajectory quantities by edges; a cell is the worst gate, None without.

    All parameters share a row for each moment and step.
    """
    part = gates_of(data[data["kind"] == Kind.TRAJECTORY])
    edges = edges_of(part)
    # Parameters share one row per moment; other quantities, such as losses, have their own.
    what = part["quantity"].map(lambda quantity: Quantity(quantity).moment or quantity)
    rows = []
    for name in dict.fromkeys(what):
        group = part[what == name]
        by_edge = [group[group["edge"] == e] for e in edges]
        cells = [cell(_worst(one)) if len(one) else None for one in by_edge]
        words = {"mu": "first moment", "nu": "second moment", "drift": "drift of the parameters"}
        step, moment = name if isinstance(name, tuple) else ("", "")
        title = f"{words[moment]} after step {step}" if moment in words else str(name)
        rows.append({"case": label(title, 60), "cells": cells})
    return {"rows": rows, "omitted": 0, **_summary(part)}


def precision_rows(data: pd.DataFrame) -> list[dict[str, object]]:
    """Return a row per case and bfloat16 program (JAX, reference): its errors against the oracle.

    The errors of logits and loss are relative L2. The rows of a case are sorted by the error of the
    logits, smallest first.
    """
    part = data[(data["dtype"] == "bfloat16") & data["edge"].str.endswith(":oracle")]
    values = {m.key: m.value for m in part["measurement"]}
    rows = []
    for case in dict.fromkeys(part["case"]):
        of_case = part[part["case"] == case]
        sides = [
            (values.get((case, e, "logits", "rel_l2"), math.nan), e)
            for e in sorted(set(of_case["edge"]))
        ]
        least = min((error for error, _ in sides if math.isfinite(error)), default=0.0)
        # A side without a finite error is the worst, wherever NaN would sort.
        for error, edge in sorted(sides, key=lambda side: (not math.isfinite(side[0]), side[0])):
            metrics = ("kl_p50", "kl_max", "top1_agreement", "nll_difference")
            extras = [values.get((case, edge, "logits", m)) for m in metrics]
            rows.append(
                {
                    "case": label(case, 48),
                    "side": edge_name(edge).removesuffix(" vs oracle"),
                    "logits": number(error),
                    "times": f"{error / least:.2f}" if least and math.isfinite(error) else "–",
                    "loss": number(values.get((case, edge, "loss", "rel_l2"))),
                    "values": [
                        "–" if v is None else metric_value(m, v)
                        for m, v in zip(metrics, extras, strict=True)
                    ],
                }
            )
    return rows


_STANDING = {
    What.NEW: "fail",
    What.PERSISTING: "fail",
    What.WORSE: "fail",
    What.DRIFTED: "fail",
    What.FIXED: "pass",
    What.GONE: "warning",
    What.CHANGED: "warning",
    What.BETTER: "pass",
    What.NOT_COMPARABLE: "blocked",
}


def group_id(what: What) -> str:
    """Return the HTML id of the table with the changes of one kind."""
    return f"changes-{what.name.lower().replace('_', '-')}"


def _id(c: Change) -> str:
    """Return the HTML id of the row that a change is about; "" if this run has no such row."""
    if c.what is What.GONE or c.kind:
        return ""
    case = c.case if c.edge else c.case.removeprefix("probe ")
    return record_id(case, c.edge, c.quantity, c.metric)


def _fold(notes: Sequence[str]) -> tuple[str, list[str]]:
    """Split the notes of a table into their common endings and the remainder of each note.

    A note consists of parts separated by semicolons. For each part, the words at its end that all
    notes share are moved to the first result. An ending of fewer than `FOLDED` characters stays in
    the notes, and so does everything if the notes have different numbers of parts.
    """
    parts = [note.split("; ") for note in notes]
    if len(notes) < 2 or len({len(part) for part in parts}) != 1:
        return "", list(notes)
    shared, left = [], [[] for _ in notes]
    for column in zip(*parts, strict=True):
        words = [part.split(" ") for part in column]
        turned = zip(*(w[::-1] for w in words), strict=False)
        n = sum(1 for _ in takewhile(lambda same: len(set(same)) == 1, turned))
        end = " ".join(words[0][len(words[0]) - n :])
        if len(end) < FOLDED:
            n, end = 0, ""
        shared += [end] if end else []
        for rest, w in zip(left, words, strict=True):
            rest += [" ".join(w[: len(w) - n])] if len(w) > n else []
    return "; ".join(shared), ["; ".join(rest) for rest in left]


def change_rows(
    changes: Sequence[Change], baseline: bool = True, limit: int = 60
) -> list[dict[str, object]]:
    """Return one table per kind of change, most severe kind first.

    Args:
        changes: All changes.
        baseline: Whether there is a baseline; without one no failure is called new.
        limit: Largest number of rows of each table.
    """
    groups = []
    for what in What:
        part = [c for c in changes if c.what is what]
        rows = [
            {
                "id": _id(c),
                "state": _STANDING[c.what],
                "case": label(c.case, 48),
                "edge": edge_name(c.edge) if c.edge else "",
                "quantity": label(c.quantity),
                "metric": metric_name(c.metric),
                "before": contrast(c.before, c.now)[0],
                "now": contrast(c.before, c.now)[1],
                "tolerance": number(None if math.isnan(c.tolerance) else c.tolerance),
                "note": "",
                # Terms that select the gates of a drifted group and few others.
                "filter": f"{c.case} {edge_name(c.edge)} {metric_name(c.metric)}" if c.kind else "",
            }
            for c in part[:limit]
        ]
        if part:
            shared, notes = _fold([c.note for c in part[:limit]])
            for row, note in zip(rows, notes, strict=True):
                row["note"] = label(note, 320)
            shared = label(shared, 400)
            noted = any(row["note"] for row in rows)
            named = {"id": group_id(what), "what": what.wording(baseline)}
            group = {**named, "rows": rows, "noted": noted, "shared": shared}
            groups.append({**group, "total": len(part)})
    return groups
