"""Section of the page that shows both architectures, Megalodon and MLA + MoE, side by side.

The gates are those of the shown run. Results about planted defects and broken training runs come
from documents that `python -m tools.experiments` wrote once; they are committed with the code.
Source: docs/reports.md "The page".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from parity.deepseek_v3 import SUBJECT
from parity.deepseek_v3.cases import CASES
from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.megalodon.edges import MegalodonEdge
from parity.port_tolerances import PortEdge
from reports.page.sections import documents
from reports.page.sections.tables import state_of
from reports.page.svg import Line
from reports.store.runs import Run
from reports.text import label, number
from reports.verdict.replays import suite_of
from stability.core.findings import Severity
from stability.moe.fixed_bugs import LIVE_BUG

_EDGES = (
    (
        "our float32 against the reference's",
        MegalodonEdge.JAX32_REFERENCE32,
        (PortEdge.PORT32_ORIGINAL32,),
    ),
    ("our float32 against float64", MegalodonEdge.JAX32_ORACLE, (PortEdge.PORT32_PORT64,)),
    (
        "the reference's float32 against float64",
        MegalodonEdge.REFERENCE32_ORACLE,
        # The original's own float64, or the port's if a recording has none.
        (PortEdge.ORIGINAL32_ORIGINAL64, PortEdge.ORIGINAL32_PORT64),
    ),
    ("float64 against float64", MegalodonEdge.JAX64_ORACLE, (PortEdge.PORT64_ORIGINAL64,)),
)
_STYLES = {"healthy": "v0", "broken": "v1", "guarded": "v2", "emergency": "v3"}


def architectures(run: Run) -> dict[str, Any] | None:
    """Return the data of the section, or None for a run without the second architecture."""
    content = documents.second_architecture(run)
    second = [m for m in run.measurements if suite_of(m) == SUBJECT]
    if not content and not second:
        return None
    groups: dict[str, list[Measurement]] = {}
    for m in second:
        groups.setdefault(m.case, []).append(m)
    first = [m for m in run.measurements if m.edge not in tuple(PortEdge)]
    flagged = sum(f.severity in (Severity.WARNING, Severity.ERROR) for f in run.findings)
    megalodon = f"{len(run.findings):,} findings, {flagged:,} of them warnings or errors"
    return {
        "rows": [
            {"edge": words, "megalodon": _logits(first, ours), "mla_moe": _logits(second, *port)}
            for words, ours, port in _EDGES
        ],
        "gates": (_gates(first), _gates(second)),
        "cases": [_case(case, group) for case, group in groups.items()],
        "refusals": [label(f.message, 200) for f in run.findings if f.metric == LIVE_BUG],
        "probes": (megalodon, _findings(content["defects"]) if content else "not in this run"),
        **_documents(content),
    }


def _documents(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the planted defects and broken training runs in `content`, as data of the section.

    `content` is from `documents.second_architecture`; {} gives empty lists.
    """
    training = content.get("training") or {"plan": {}, "variants": []}
    return {
        "defects": [_defect(d) for d in (content.get("defects") or {}).get("defects", ())],
        "plan": [(label(str(k), 40), label(str(v), 40)) for k, v in training["plan"].items()],
        "curves": _curves(training, "loss"),
        "router": _curves(training, "router_z"),
        "runs": [_run(v) for v in training["variants"]],
    }


def _logits(rows: Iterable[Measurement], *edges: str) -> str:
    """Return the largest relative L2 error of logits on `edges` as text, a dash if there is none.

    NaN counts as the largest.
    """
    values = [
        m.value for m in rows if m.edge in edges and (m.kind, m.metric) == (Kind.LOGITS, "rel_l2")
    ]
    return number(max(values, key=lambda v: (math.isnan(v), v))) if values else "–"


def _findings(content: Mapping[str, Any]) -> str:
    counted = content.get("examined", {}).get("findings", {})
    flagged = sum(counted.get(s.value, 0) for s in (Severity.WARNING, Severity.ERROR))
    planted = content["defects"]
    return (
        f"{sum(counted.values())} findings on a fresh model, {flagged} of them warnings or errors; "
        f"{sum(d['caught'] for d in planted)} of {len(planted)} planted defects caught"
    )


def _gates(rows: Iterable[Measurement]) -> str:
    judged = [m for m in rows if m.verdict is not Verdict.INFO]
    if not judged:
        return "not in this run"
    return f"{sum(m.verdict is Verdict.PASS for m in judged):,} of {len(judged):,}"


def _case(name: str, rows: Sequence[Measurement]) -> dict[str, Any]:
    why = next((case.why for case in CASES if case.title == name), "")
    judged = [m for m in rows if m.verdict is not Verdict.INFO]
    passed = sum(m.verdict is Verdict.PASS for m in judged)
    between = [m for m in rows if (m.edge, m.metric) == (PortEdge.PORT32_ORIGINAL32, "rel_l2")]
    worst = max(between, key=lambda m: (math.isnan(m.value), m.value), default=None)
    margins = [m.value for m in rows if m.metric == "smallest_margin"]
    return {
        "name": label(name, 40),
        "why": label(why, 120),
        "state": state_of(rows),
        "gates": f"{passed:,} / {len(judged):,}",
        "logits": _logits(rows, PortEdge.PORT32_ORIGINAL32),
        "wide": _logits(rows, PortEdge.PORT64_ORIGINAL64),
        "worst": number(worst.value) if worst else "–",
        "where": label(worst.quantity) if worst else "–",
        "margin": number(min(margins)) if margins else "–",
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
        Line(
            label(v["name"], 24),
            _STYLES.get(v["name"], "v4"),
            [(float(x), math.nan if y is None else float(y)) for x, y in v[key]],
        )
        for v in training["variants"]
    ]


def _run(v: Mapping[str, Any]) -> dict[str, str]:
    return {
        "name": label(v["name"], 24),
        "what": label(v["what"], 80),
        "held_out": "not finite" if v["held_out"] is None else f"{v['held_out']:.3f}",
        **{kind: str(v["events"][kind]) for kind in ("skip", "clip", "rollback", "cut")},
        "rate": f"{v['rate']:g}",
    }
