"""Both architectures side by side, as the page shows them.

Megalodon's numbers are this run's; those of MLA + MoE were measured by `megalodon-numerics subject`
and are stored with the code. Source: spec/reports.md "The page".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from parity.results import Kind, Measurement, Verdict
from reports.page.svg import Line
from reports.store import Run
from reports.text import label, number
from stability.findings import Severity

_EDGES = (
    ("our float32 against the reference's", "jax32:reference32", "port32:original32"),
    ("our float32 against float64", "jax32:oracle", "port32:port64"),
    ("the reference's float32 against float64", "reference32:oracle", "original32:port64"),
    ("float64 against float64", "jax64:oracle", "port64:original64"),
)
_STYLES = {"healthy": "v0", "broken": "v1", "guarded": "v2", "emergency": "v3"}


def architectures(run: Run) -> dict[str, Any] | None:
    """Return what the section shows, or None in a run that knows one architecture only."""
    found = (run.manifest.get("stability") or {}).get("mla_moe")
    if not found:
        return None
    cases, planted = found["parity"]["cases"], found["defects"]["defects"]
    training = found["training"]
    flagged = sum(f.severity in (Severity.WARNING, Severity.ERROR) for f in run.findings)
    return {
        "rows": [_edge(run.measurements, cases, *edge) for edge in _EDGES],
        "gates": (_held(run.measurements), _both(cases)),
        "probes": (
            f"{len(run.findings):,} findings, {flagged:,} of them warnings or errors",
            f"{_findings(found['defects'])}; {sum(d['caught'] for d in planted)} of {len(planted)} "
            "planted defects caught",
        ),
        "cases": [_case(c) for c in cases],
        "defects": [_defect(d) for d in planted],
        "reference": ", ".join(sorted({label(c["reference"], 60) for c in cases})),
        "refusals": sorted({label(c["refusal"], 200) for c in cases if "alive" in c["refusal"]}),
        "plan": [(label(str(k), 40), label(str(v), 40)) for k, v in training["plan"].items()],
        "curves": _curves(training, "loss"),
        "router": _curves(training, "router_z"),
        "runs": [_run(v) for v in training["variants"]],
    }


def _edge(
    rows: Iterable[Measurement], cases: Iterable[Mapping[str, Any]], said: str, ours: str, port: str
) -> dict[str, str]:
    """Return the worst relative L2 of logits on one edge, for both."""
    first = [
        m.value
        for m in rows
        if (m.edge, m.kind, m.metric) == (ours, Kind.LOGITS, "rel_l2") and math.isfinite(m.value)
    ]
    second = [c["logits"][port] for c in cases]
    return {"edge": said, "megalodon": _most(first), "mla_moe": _most(second)}


def _findings(content: Mapping[str, Any]) -> str:
    counted = content.get("examined", {}).get("findings", {})
    flagged = sum(counted.get(s.value, 0) for s in (Severity.WARNING, Severity.ERROR))
    return (
        f"{sum(counted.values())} findings on a fresh model, {flagged} of them warnings or errors"
    )


def _most(values: list[float]) -> str:
    return number(max(values)) if values else "–"


def _held(rows: Iterable[Measurement]) -> str:
    judged = [m for m in rows if m.verdict is not Verdict.INFO]
    return f"{sum(m.verdict is Verdict.PASS for m in judged):,} of {len(judged):,}"


def _both(cases: Iterable[Mapping[str, Any]]) -> str:
    gates = [(c["gates"], c["broken"]) for c in cases]
    total = sum(g for g, _ in gates)
    return f"{total - sum(b for _, b in gates):,} of {total:,}"


def _case(c: Mapping[str, Any]) -> dict[str, Any]:
    worst, value = c["worst"]["port32:original32"]
    margin = c["smallest_margin"]
    return {
        "name": label(c["case"], 40),
        "why": label(c["why"], 120),
        "state": "fail" if c["broken"] else "pass",
        "gates": f"{c['gates'] - c['broken']:,} / {c['gates']:,}",
        "logits": number(c["logits"]["port32:original32"]),
        "wide": number(c["logits"]["port64:original64"]),
        "worst": number(value),
        "where": label(worst),
        "margin": "–" if margin is None else number(margin),
    }


def _defect(d: Mapping[str, Any]) -> dict[str, str]:
    return {
        "metric": label(d["metric"], 60),
        "probe": label(d["probe"], 40),
        "what": label(d["what"], 120),
        **{name: number(d[name]) for name in ("healthy", "planted", "threshold")},
        "state": d["severity"] if d["caught"] else "fail",
    }


def _curves(training: Mapping[str, Any], key: str) -> list[Line]:
    return [
        Line(label(v["name"], 24), _STYLES.get(v["name"], "v4"), _points(v[key]))
        for v in training["variants"]
    ]


def _points(pairs: Iterable[tuple[int, float | None]]) -> list[tuple[float, float]]:
    return [(float(x), math.nan if y is None else float(y)) for x, y in pairs]


def _run(v: Mapping[str, Any]) -> dict[str, str]:
    return {
        "name": label(v["name"], 24),
        "what": label(v["what"], 80),
        "held_out": "not finite" if v["held_out"] is None else f"{v['held_out']:.3f}",
        **{kind: str(v["events"][kind]) for kind in ("skip", "clip", "rollback", "cut")},
        "rate": f"{v['rate']:g}",
    }
