"""From a run and its verdict to one HTML file. Source: spec/reports.md "The page"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from parity.results import Kind
from reports import architectures, heat, precision, probes, speed, tables
from reports.history import History
from reports.page import svg
from reports.store import Run
from reports.text import edge_name, label, metric_name, number
from reports.verdicts import Decision, ExitCode

_HERE = Path(__file__).parent
_BY_SHARE = "% of the poles remember less"
_DEFAULTS = {
    "dirty": False,
    "fault": None,
    "device": {},
    "tolerances": [],
    "seams": [],
    "cases": [],
    "replay": [],
}


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        label=lambda value, limit=96: label(str(value), limit),
        number=number,
        edge=edge_name,
        metric=metric_name,
        breakable=_breakable,
    )
    environment.globals.update(
        sparkline=svg.sparkline,
        trend=svg.trend,
        heat_map=svg.heat_map,
        loss_curve=svg.loss_curve,
        drill_chart=lambda lines, text: svg.chart(lines, "optimiser step", text),
        batch_chart=lambda lines, text: svg.chart(lines, "batch", text),
        memory_chart=_memory_chart,
        change_chart=lambda lines, text: svg.chart(lines, _BY_SHARE, text),
    )
    return environment


def _memory_chart(lines: Sequence[svg.Line], text: str) -> Markup:
    return svg.chart(lines, _BY_SHARE, text, lambda y: f"{2.0**y:,.3g}")


def _breakable(text: str) -> Markup:
    """Let a long dotted name wrap after its dots; the pieces are escaped as they are joined."""
    return Markup("<wbr>").join(re.split(r"(?<=[./])", text))


def _when(created: str) -> str:
    try:
        moment = datetime.fromisoformat(created)
    except ValueError:
        return label(created, 40)
    return moment.strftime("%Y-%m-%d %H:%M UTC")


def _pairs(mapping: dict[str, Any] | None) -> list[tuple[str, str]]:
    return [(label(str(k), 60), label(str(v), 120)) for k, v in (mapping or {}).items()]


def _reference(manifest: dict[str, Any]) -> dict[str, str]:
    reference = manifest.get("reference") or {}
    versions = ", ".join(f"{k} {v}" for k, v in _pairs(reference.get("versions")))
    return {
        "kind": label(str(reference.get("kind") or "absent"), 40),
        "commit": label(str(reference.get("commit") or "unknown"), 40),
        "versions": versions,
        "detail": label(str(reference.get("detail") or ""), 240),
    }


def _machine(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    device = manifest.get("device") or {}
    commit = label(str(manifest.get("commit") or "unknown"), 60)
    return [
        ("commit", f"{commit} with uncommitted changes" if manifest.get("dirty") else commit),
        ("device", label(f"{device.get('kind', 'unknown')} ({device.get('name', '')})", 120)),
        ("threads", str(manifest.get("threads", "unknown"))),
        *_pairs(manifest.get("versions")),
        *_pairs(manifest.get("flags")),
    ]


def _points(training: dict[str, Any], step: str, loss: str) -> Sequence[tuple[float, float]]:
    pairs = zip(training.get(step) or (), training.get(loss) or (), strict=False)
    return [(float(x), float(y)) for x, y in pairs]


def _checkpoint(manifest: dict[str, Any]) -> dict[str, Any] | None:
    checkpoint = manifest.get("checkpoint")
    if not checkpoint:
        return None
    training = checkpoint.get("training") or {}
    final = training.get("final_val_loss")
    facts = [
        ("name", label(str(checkpoint.get("name", "")), 60)),
        ("parameters", f"{checkpoint.get('parameters', 0):,}"),
        ("final validation loss, nats per token", "–" if final is None else f"{float(final):.4f}"),
        ("learning rate", number(training.get("lr"))),
        ("seed", str(training.get("seed", "–"))),
        *_pairs(checkpoint.get("config")),
    ]
    return {
        "facts": facts,
        "train": _points(training, "step", "train_loss"),
        "validation": _points(training, "val_step", "val_loss"),
    }


def _speed(benches: Sequence[Run]) -> dict[str, Any] | None:
    if not benches:
        return None
    manifest, rows = benches[-1].manifest, speed.rows(benches)
    work = manifest.get("workload") or {}
    reference, threads = _reference(manifest), (manifest.get("reference") or {}).get("threads")
    facts = [
        *_machine(manifest),
        ("reference", " ".join(reference[k] for k in ("kind", "commit", "versions")).strip()),
        ("reference threads", label(str(threads or "–"), 20)),
        *_pairs({k: v for k, v in work.items() if k != "config"}),
        *_pairs(work.get("config")),
    ]
    return {
        "when": _when(manifest["created"]),
        "id": label(benches[-1].id),
        "machine": dict(_machine(manifest)),
        "alone": reference["kind"] == "absent",
        "repeats": label(str(work.get("repeats", "unknown")), 20),
        "facts": facts,
        "rows": rows,
        "notes": speed.notes(rows),
        "runs": len(benches),
    }


def render(run: Run, decision: Decision, history: History) -> str:
    """Return the page of a run as one HTML text: no network, no fonts, no time of its own.

    Equal input gives equal bytes. Names from the run are data: they are escaped, never markup.
    """
    manifest = {**_DEFAULTS, **run.manifest}
    data = tables.frame(run)
    parameters = tables.parameter_tables(data)
    durations = manifest.get("durations") or {}
    drilled = (manifest.get("stability") or {}).get("drill")
    context = {
        "style": Markup((_HERE / "style.css").read_text(encoding="utf-8")),
        "script": Markup((_HERE / "script.js").read_text(encoding="utf-8")),
        "run": run,
        "manifest": manifest,
        "decision": decision,
        "exit_name": ExitCode(decision.exit_code).name.replace("_", " ").lower(),
        "slug": decision.word.value.lower().replace(" ", "-"),
        "history": history,
        "unreadable": [(label(f.name), label(why, 300)) for f, why in history.unreadable],
        "when": _when(manifest["created"]),
        "overview": tables.overview(data, history),
        "changes": tables.change_rows(decision.changes),
        "logits": tables.matrix(data, Kind.LOGITS),
        "logit_metrics": tables.metric_tables(data, Kind.LOGITS, history),
        "losses": tables.matrix(data, Kind.LOSS),
        "states": tables.matrix(data, Kind.STATE),
        "tokens": tables.matrix(data, Kind.TOKENS),
        "gradients": tables.matrix(data, Kind.GRADIENT),
        "trajectory": tables.trajectory_rows(data),
        "precision": tables.precision_rows(data),
        "speed": _speed(history.benches),
        "parameters": parameters,
        "heats": heat.heat_maps(data, decision),
        "survival": probes.survival(run),
        "audits": probes.audits(run),
        "remedies": precision.remedies(run),
        "poles": precision.poles(run, drilled),
        "drill": precision.drill(run),
        "architectures": architectures.architectures(run),
        "checkpoint": _checkpoint(manifest),
        "reference": _reference(manifest),
        "machine": _machine(manifest),
        "suites": [
            {**suite, "seconds": durations.get(suite.get("name"))}
            for suite in manifest.get("suites") or ()
        ],
        "duration": sum(float(v) for v in durations.values()),
    }
    return _environment().get_template("page.html.j2").render(context)
