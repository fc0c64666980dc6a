"""Page that compares more than two runs: one column per run, one row per gate that differs.

Source: docs/reports.md "Two runs side by side".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parity.engine.measure.measurement import Verdict
from reports.page.glossary import once
from reports.page.render import environment, script, style
from reports.page.sections import facts
from reports.page.sections.starts import page_link
from reports.page.side_by_side import facts_of
from reports.store.runs import Run
from reports.text import contrast_all, edge_name, edge_rank, label, metric_name, record_id
from reports.verdict.several import Row, Several

ROWS = 400
"""Largest number of rows in the table of changes; the page says how many are omitted."""
CASES = 60
"""Largest number of rows in the table of cases that fail in any of the runs."""


def render(several: Several, folders: Sequence[str]) -> str:
    """Return the page of several runs as one HTML text; equal arguments give equal bytes.

    Args:
        several: The runs, judged against the first.
        folders: Relative URL from the page to the folder of each run, in their order, for links.
    """
    runs, gravest = several.runs, several.gravest
    word = several.decisions[gravest].word
    hrefs = [page_link(f, run.manifest) for f, run in zip(folders, runs, strict=True)]
    context = {
        "style": style(),
        "more_style": script("several.css"),
        "script": script("page.js"),
        "word": word,
        "slug": _slug(word),
        "gravest": gravest,
        "sentence": several.decisions[gravest].sentence,
        "columns": [
            {
                "name": label(run.id, 60),
                "href": href,
                "when": facts.moment(run.manifest.created),
                "word": decision.word,
                "slug": _slug(decision.word),
                "sentence": decision.sentence,
            }
            for run, decision, href in zip(runs, several.decisions, hrefs, strict=True)
        ],
        "edges": _edges(runs),
        "cases": (cases := _cases(several))[:CASES],
        "cases_omitted": max(0, len(cases) - CASES),
        "rows": [_row(row, hrefs) for row in several.rows[:ROWS]],
        "rows_omitted": max(0, len(several.rows) - ROWS),
        "facts": _facts(runs),
    }
    return once(environment().get_template("several.html.j2").render(context))


def _slug(word: str) -> str:
    return word.lower().replace(" ", "-")


def _edges(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return one row per edge (comparison): its name and, for each run, its counts.

    The counts are [passing gates, all gates], or None for a run without gates on the edge.
    """
    sides = []
    for run in runs:
        counts: dict[str, list[int]] = {}
        for m in run.measurements:
            if m.verdict is not Verdict.INFO:
                held = counts.setdefault(m.edge, [0, 0])
                held[0] += m.verdict is Verdict.PASS
                held[1] += 1
        sides.append(counts)
    edges = sorted({edge for side in sides for edge in side}, key=edge_rank)
    return [
        {"name": edge_name(edge), "cells": [side.get(edge) for side in sides]} for edge in edges
    ]


def _cases(several: Several) -> list[dict[str, Any]]:
    """Return one row per case and edge that fails in any run, with one cell per run.

    A cell has the first divergence of the run. Without one its state is "pass", or "" if the run
    has no gate of this case and edge.
    """
    starts = [{(m.case, m.edge): m for m in d.starts} for d in several.decisions]
    judged = [
        {(m.case, m.edge) for m in run.measurements if m.verdict is not Verdict.INFO}
        for run in several.runs
    ]
    keys = dict.fromkeys(key for of_run in reversed(starts) for key in of_run)

    def cell(start: Any, measured: bool) -> dict[str, str]:
        if start is None:
            return {"state": "pass" if measured else "", "quantity": ""}
        state = "fail" if start.verdict is Verdict.FAIL else "blocked"
        return {"state": state, "quantity": label(start.quantity)}

    return [
        {
            "case": label(key[0], 48),
            "edge": edge_name(key[1]),
            "cells": [
                cell(of_run.get(key), key in there)
                for of_run, there in zip(starts, judged, strict=True)
            ],
        }
        for key in keys
    ]


def _row(row: Row, hrefs: Sequence[str]) -> dict[str, Any]:
    case, edge, quantity, metric = row.key
    values = contrast_all([cell.value if cell else None for cell in row.cells])
    return {
        "quantity": label(quantity),
        "case": label(case, 48),
        "edge": edge_name(edge) if edge else "",
        "metric": metric_name(metric),
        "cells": [
            {
                "value": value,
                "state": cell.state,
                "other_work": cell.other_work,
                "what": cell.what.value if cell.what else "",
                "href": f"{href}#r-{record_id(*row.key)}" if href and edge else "",
            }
            if cell
            else None
            for cell, value, href in zip(row.cells, values, hrefs, strict=True)
        ],
    }


def _facts(runs: Sequence[Run]) -> list[dict[str, Any]]:
    columns = [facts_of(run) for run in runs]
    rows = [(name, [column[name] for column in columns]) for name in columns[0]]
    return [{"name": n, "values": v, "differs": len(set(v)) > 1} for n, v in rows]
