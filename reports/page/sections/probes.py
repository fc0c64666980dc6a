"""Findings of the probes: parameters that bfloat16 storage freezes, and results of the audits.

Pure functions from a run to plain data. Source: docs/reports.md "The page".
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from reports.page.sections.records import id_of_finding
from reports.page.sections.tables import ROWS
from reports.store.runs import Run
from reports.text import label, metric_name, number, share
from stability.core.findings import Finding, Severity

_GRAVITY = {severity: i for i, severity in enumerate(Severity)}
_TITLES = {"dtypes": "Dtypes", "values": "Values"}
_MORE_TITLES = {
    "poles": "EMA poles",
    "embedding_rows": "Embedding rows",
    "dtype_golden": "Dtype audits against the committed ones",
    "what_if": "Low-precision products",
    "agreement": "Agreement with itself",
}


def _worst_first(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(
        findings,
        key=lambda f: (-_GRAVITY[f.severity], -f.value if math.isfinite(f.value) else -math.inf),
    )


def module_kind(parameter: str) -> str:
    """Return the module of a parameter without its layer: `attn.cema`, `ffn`, `embed`.

    A weight directly inside a block belongs to the block: `layers.0.attn.wz.weight` is `attn`.
    """
    name = parameter.removeprefix("model.")
    parts = re.sub(r"^layers\.\d+\.", "", name).split(".")
    if parts[-1] in ("weight", "bias") and len(parts) > 1:
        parts = parts[:-1]
    return ".".join(parts[:-1]) or parts[0]


def _survival_row(subject: str, metrics: dict[str, Finding], names: Sequence[str]) -> dict:
    main = metrics["frozen_fraction"]
    finite = math.isfinite(main.value)
    return {
        "parameter": label(subject),
        "share": share(main.value),
        "percent": round(100 * min(1.0, max(0.0, main.value)), 1) if finite else 100.0,
        "severity": max((f.severity for f in metrics.values()), key=_GRAVITY.__getitem__).value,
        "values": [f"{metrics[n].value:.3g}" if n in metrics else "–" for n in names],
        "remedy": label(main.remedy, 160),
        "order": main.value if finite else math.inf,
    }


def survival(run: Run) -> dict | None:
    """Return the frozen fraction of each parameter in bfloat16 storage; None if not probed.

    Of the returned keys, "worst" has the eight worst parameters, and "groups" all parameters by
    kind of module (`module_kind`), worst first.
    """
    by_parameter: dict[str, dict[str, Finding]] = {}
    for f in run.findings:
        if f.probe == "survival":
            by_parameter.setdefault(f.subject, {})[f.metric] = f
    by_parameter = {
        s: metrics for s, metrics in by_parameter.items() if "frozen_fraction" in metrics
    }
    if not by_parameter:
        return None
    names = sorted({n for metrics in by_parameter.values() for n in metrics} - {"frozen_fraction"})
    rows = [(s, _survival_row(s, metrics, names)) for s, metrics in by_parameter.items()]
    rows.sort(key=lambda item: (-item[1]["order"], item[0]))
    groups: dict[str, list[dict]] = {}
    for subject, row in rows:
        groups.setdefault(module_kind(subject), []).append(row)
    flagged = [row for _, row in rows if row["severity"] in ("warning", "error")]
    first = next(iter(by_parameter.values()))["frozen_fraction"]
    return {
        "metrics": [metric_name(n) for n in names],
        "total": len(rows),
        "flagged": len(flagged),
        "threshold": share(None if math.isnan(first.threshold) else first.threshold),
        "source": label(first.source, 160),
        "worst": [row for _, row in rows[:8]],
        "groups": [
            {
                "kind": label(kind, 48),
                "rows": part[:ROWS],
                "omitted": max(0, len(part) - ROWS),
                "worst": part[0],
                "middle": share(part[len(part) // 2]["order"]),
                "flagged": sum(row["severity"] in ("warning", "error") for row in part),
            }
            for kind, part in groups.items()
        ],
    }


def _finding_row(f: Finding) -> dict[str, object]:
    return {
        "id": id_of_finding(f),
        "severity": f.severity.value,
        "subject": label(f.subject),
        "metric": metric_name(f.metric),
        "value": number(f.value),
        "threshold": number(None if math.isnan(f.threshold) else f.threshold),
        "message": label(f.message, 240),
        "remedy": label(f.remedy, 160),
    }


def _asks(f: Finding) -> bool:
    """Return whether a finding needs attention: a warning, an error, or a note with a message."""
    return f.severity in (Severity.WARNING, Severity.ERROR) or (
        f.severity is Severity.NOTE and bool(f.message)
    )


def audits(run: Run) -> list[dict]:
    """Return one entry per probe except survival: counts by severity, and findings, worst first.

    The dtype and value audits come first, and are listed even without any finding.
    """
    probes = dict.fromkeys(_TITLES) | dict.fromkeys(
        f.probe for f in run.findings if f.probe != "survival"
    )
    out = []
    for probe in probes:
        part = _worst_first([f for f in run.findings if f.probe == probe])
        bad = [f for f in part if _asks(f)]
        fine = [f for f in part if not _asks(f)]
        out.append(
            {
                "title": (_TITLES | _MORE_TITLES).get(probe, label(probe, 48)),
                "total": len(part),
                "counts": [(s.value, sum(f.severity is s for f in part)) for s in Severity],
                "rows": [_finding_row(f) for f in bad[:ROWS]],
                "omitted": max(0, len(bad) - ROWS),
                "fine": [_finding_row(f) for f in fine[:ROWS]],
                "fine_omitted": max(0, len(fine) - ROWS),
            }
        )
    return out
