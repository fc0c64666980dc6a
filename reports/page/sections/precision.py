"""Sections of the page about storage in bfloat16: memory of the EMA, remedies, training drill.

Pure functions from a run's manifest to plain data. Source: docs/reports.md "The page".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from reports.page.sections import documents
from reports.page.sections.tables import ROWS
from reports.page.svg import Line
from reports.store.runs import Run
from reports.text import label, number
from stability.core.findings import Severity

STYLES = 9
"""Largest number of curves in a chart: the style sheet has nine line styles."""
_SHOWN = (0.05, 0.5, 0.95, 1.0)
"""Quantiles of the memory shown in the table; the chart shows all of them."""


def poles(run: Run, drilled: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return quantiles of the memory of the EMA's poles by layer and state, with two charts.

    The memory of a pole q is 1 / (1 - |q|) tokens; quantiles are over the poles of a layer. A state
    is a storage format, before or after training. None if the poles were not probed.

    Each layer also has the fraction of stored poles that round to 1 ("collapsed").

    Args:
        run: The run; `stability["poles"]` of its manifest holds the rows of
            `stability.storage.ema_pole_findings.memory_rows`.
        drilled: Document of the training drill, for the effect of real training on the memory; {}
            for none.
    """
    rows = _section(run, "poles")
    if not rows:
        return None
    layers: dict[str, dict[str, dict[float, float]]] = {}
    for row in rows:
        state = layers.setdefault(str(row["layer"]), {}).setdefault(str(row["state"]), {})
        state[float(row["quantile"])] = _memory(row["memory"])
    worst = max(layers, key=lambda n: max(layers[n].get("float32", {0.0: 0.0}).values()))
    collapse = {f.subject: f for f in run.findings if f.metric == "collapsed_fraction"}
    return {
        "layer": label(worst),
        "chart": _memory_lines(layers[worst]),
        "trained": _trained_lines(drilled),
        "quantiles": [f"{100 * q:g} %" if q < 1 else "longest" for q in _SHOWN],
        "steps": max(int(row["steps"]) for row in rows),
        "rows": [
            {
                "layer": label(layer),
                "state": label(state, 40),
                "values": [steps(memory.get(q)) for q in _SHOWN],
                # Only a stored |q| can round to 1.
                "collapsed": _share(collapse[layer].value if layer in collapse else None)
                if state.startswith("q in")
                else "",
                "severity": collapse[layer].severity.value if layer in collapse else "note",
            }
            for layer, states in layers.items()
            for state, memory in states.items()
        ][: 2 * ROWS],
        "omitted": max(0, sum(map(len, layers.values())) - 2 * ROWS),
    }


def steps(memory: float | None) -> str:
    """Format a memory length in tokens; an infinite one as "forever", None or NaN as a dash."""
    if memory is None or math.isnan(memory):
        return "–"
    if math.isinf(memory):
        return "forever"
    return f"{memory:,.0f}" if memory >= 100 else f"{memory:.3g}"


def remedies(run: Run) -> dict[str, Any] | None:
    """Return the table of remedies by kind of parameter; None if no remedy was tried.

    A row is a remedy, a column a kind of parameter; a cell has the fidelity and the frozen fraction
    with this remedy, for the parameter of this kind that is the most frozen without one.
    """
    trials = _section(run, "remedies")
    kinds = list(dict.fromkeys(str(row["kind"]) for row in trials))
    if not kinds:
        return None
    names = list(dict.fromkeys(str(row["remedy"]) for row in trials))
    cells = {(str(row["remedy"]), str(row["kind"])): row for row in trials}
    first = {kind: next(r for r in trials if r["kind"] == kind) for kind in kinds}
    return {
        "basis": label(str(trials[0]["basis"]), 240),
        "kinds": [{"kind": label(k, 60), "leaf": label(str(first[k]["leaf"]))} for k in kinds],
        "rows": [
            {
                "remedy": label(name, 48),
                "what": label(str(row["what"]), 160),
                "bytes": str(row["bytes"]),
                "cells": [_remedy_cell(cells.get((name, k))) for k in kinds],
            }
            for name in names
            for row in [next(r for r in trials if r["remedy"] == name)]
        ],
    }


def _remedy_cell(row: Mapping[str, Any] | None) -> dict[str, str] | None:
    if row is None:
        return None
    state = Severity.OK if row["works"] else Severity.WARNING
    return {
        "state": state.value,
        "fidelity": _fixed(row["fidelity"]),
        "frozen": _share(row["frozen"]),
    }


def drill(run: Run) -> dict[str, Any] | None:
    """Return the data of the training drill: conclusion, curves, and one row per variant.

    None if there is no drill document.
    """
    content = documents.drill(run)
    if not content.get("variants"):
        return None
    variants = content["variants"][:STYLES]
    plan = content.get("plan") or {}
    control = next((v for v in content["variants"] if v["kind"] == "control"), None)
    return {
        "setting": f"{plan.get('steps', '–')} steps of AdamW at lr {plan.get('lr', '–')}",
        "conclusion": [label(str(line), 600) for line in content.get("conclusion") or ()],
        "plan": [(label(str(k), 40), label(str(v), 60)) for k, v in plan.items()],
        "versions": [
            (label(str(k), 40), label(str(v), 60))
            for k, v in (content.get("versions") or {}).items()
        ],
        "loss": _lines(variants, "loss"),
        "gap": [line for line in _gap_lines(variants, control) if line.points],
        "norms": _lines(variants, "norm_drift"),
        "poles": _lines(variants, "pole_drift"),
        "rows": [_variant_row(v, control) for v in variants],
    }


def _variant_row(v: Mapping[str, Any], control: Mapping[str, Any] | None) -> dict[str, str]:
    loss, base = v["held_out"], control["held_out"] if control else None
    return {
        "name": label(str(v["name"]), 48),
        "what": label(str(v["what"]), 120),
        "held_out": _fixed(loss),
        "gap": "–" if loss is None or base is None else f"{loss - base:+.3f}",
        "norm_frozen": _share(v["norms"]["frozen"]),
        "norm_fidelity": _fixed(v["norms"]["fidelity"]),
        "norm_drift": number(v["norm_drift"][-1][1]),
        "pole_frozen": _share(v["poles"]["frozen"]),
        "pole_drift": number(v["pole_drift"][-1][1]),
        "fidelity": _fixed(v["whole"]["fidelity"]),
        "bytes": f"{v['bytes']:.0f}",
    }


def _lines(variants: Sequence[Mapping[str, Any]], key: str) -> list[Line]:
    return [
        Line(label(str(v["name"]), 32), f"v{i}", [(float(x), _memory(y)) for x, y in v[key]])
        for i, v in enumerate(variants)
    ]


def _gap_lines(
    variants: Sequence[Mapping[str, Any]], control: Mapping[str, Any] | None
) -> list[Line]:
    """Return a curve per variant but the control (float32): its training loss minus the control's.

    A curve has the steps at which both have a loss, and is empty without a control.
    """
    base = {x: _memory(y) for x, y in control["loss"]} if control else {}
    return [
        Line(line.name, line.style, [(x, y - base[x]) for x, y in line.points if x in base])
        for line, v in zip(_lines(variants, "loss"), variants, strict=True)
        if v is not control
    ]


def _memory_lines(states: Mapping[str, Mapping[float, float]]) -> list[Line]:
    return [
        Line(label(state, 32), f"v{i}", [(100 * q, _log(m)) for q, m in sorted(memory.items())])
        for i, (state, memory) in enumerate(list(states.items())[:STYLES])
    ]


def _trained_lines(drilled: Mapping[str, Any]) -> list[Line]:
    """Return a curve per variant of the drill: how much training lengthened the poles' memory.

    Each quantile of the memory is a point: x is its level in percent, such as 50 for the median, y
    the change of its value by training, in percent of the value before. Variants with a remedy are
    left out.
    """
    if not drilled:
        return []

    def points(v: Mapping[str, Any]) -> list[tuple[float, float]]:
        pairs = zip(v["memory"]["start"], v["memory"]["end"], strict=True)
        changes = [
            100 * (end / start - 1) if start and end is not None else math.inf
            for start, end in pairs
        ]
        return [(100 * q, c) for q, c in zip(drilled["quantiles"], changes, strict=True)]

    variants = [v for v in drilled["variants"][:STYLES] if v["kind"] != "remedy"]
    return [Line(label(str(v["name"]), 32), f"v{i}", points(v)) for i, v in enumerate(variants)]


def _section(run: Run, name: str) -> list[dict[str, Any]]:
    return list(run.manifest.stability.get(name) or ())


def _memory(value: float | None) -> float:
    # JSON has no infinity: None is an infinite memory, or a loss that is not finite.
    return math.inf if value is None else float(value)


def _log(memory: float) -> float:
    return math.log2(memory) if memory > 0 and math.isfinite(memory) else math.inf


def _share(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:.0f} %"


def _fixed(value: float | None) -> str:
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.3f}"
