"""Facts about a run: machine, reference, cases, checkpoint, bench.

Pure functions from a run's manifest to plain data. Source: docs/reports.md "The page".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from parity.engine.measure.measurement import Measurement, Verdict
from reports.page.sections import speed
from reports.provenance.host import fingerprint, processor
from reports.store.manifest import CaseInfo, Manifest, ReferenceInfo
from reports.store.runs import Run
from reports.text import count, edge_name, label, number
from reports.verdict.change_points import FALSE_ALARM, LEAST_RUNS


def moment(created: str) -> str:
    """Format an ISO 8601 time as UTC, to the minute; text that is no time is shown unchanged."""
    try:
        time = datetime.fromisoformat(created)
    except ValueError:
        return label(created, 40)
    # A time without an offset is in UTC.
    time = time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    return time.strftime("%Y-%m-%d %H:%M UTC")


def _pairs(mapping: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    return [(label(str(k), 60), label(str(v), 120)) for k, v in (mapping or {}).items()]


def reference(info: ReferenceInfo) -> dict[str, str]:
    """Return kind, commit, versions and detail of the run's reference implementation as text."""
    return {
        "kind": label(info.kind or "absent", 40),
        "commit": label(info.commit or "unknown", 40),
        "versions": ", ".join(f"{k} {v}" for k, v in _pairs(info.versions)),
        "detail": label(info.detail, 240),
    }


def machine(manifest: Manifest) -> list[tuple[str, str]]:
    """Return a run's commit, device, fingerprint, threads, hosts, versions and flags.

    The result is a list of (name, text).
    """
    here = manifest.environment
    commit = label(manifest.commit or "unknown", 60)
    return [
        ("commit", f"{commit} with uncommitted changes" if manifest.dirty else commit),
        ("device", label(f"{here.device.kind or 'unknown'}: {processor(here)}", 120)),
        ("fingerprint", fingerprint(here) or "unknown"),
        ("threads", str(here.threads or "unknown")),
        *_hosts(manifest),
        *_pairs(here.versions),
        *_pairs(here.flags),
    ]


def _hosts(manifest: Manifest) -> list[tuple[str, str]]:
    """Return a row (host, names of the parts it measured) for each host of a distributed night.

    The host is text: node name, processor, threads and fingerprint. If workers died, a last row
    has the number of dead workers of each part. Other runs have no rows.
    """
    parts: dict[str, list[str]] = {}
    for part in manifest.parts:
        host = f"{part.processor}, {part.threads} threads, fingerprint {part.fingerprint or '?'}"
        parts.setdefault(f"measured on {label(part.node, 40)}: {label(host, 160)}", []).append(
            part.name
        )
    rows = [(host, label(", ".join(names), 2000)) for host, names in parts.items()]
    died = [f"{p.name}: {p.attempts - 1}" for p in manifest.parts if p.attempts > 1]
    if died:
        rows.append(("workers that died and were replaced", label(", ".join(died), 400)))
    return rows


def environment(manifest: Manifest, before: Manifest | None) -> dict[str, Any]:
    """Return each setting of the run's environment beside that of the baseline.

    Each row is (name, baseline's text, this run's text). A setting that a run lacks is "absent".
    Rows with different texts are under the key "changed", others under "same". Without a baseline
    its texts are "", and all rows are under "same".

    Args:
        manifest: Manifest of the run.
        before: Manifest of the baseline; None without one.
    """
    now = dict(_environment(manifest))
    then = dict(_environment(before)) if before is not None else {}
    rows = [
        (name, then.get(name, "absent") if then else "", now.get(name, "absent"))
        for name in dict.fromkeys((*now, *then))
    ]
    changed = [row for row in rows if then and row[1] != row[2]]
    return {
        "baseline": before is not None,
        "changed": changed,
        "same": [row for row in rows if row not in changed],
    }


def _environment(manifest: Manifest) -> list[tuple[str, str]]:
    info = manifest.environment.reference
    # The original of a port has a version, but no known commit.
    others = manifest.ports or manifest.without_megalodon
    names = ("kind",) if others else ("kind", "commit")
    named = [(name, reference(info)[name]) for name in names]
    return [
        *machine(manifest),
        *((f"reference {name}", value) for name, value in (*named, *_pairs(info.versions))),
    ]


def cases(manifest: Manifest, rows: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Return a row per case: how many of its gates pass, and why any could not be compared."""
    verdicts: dict[str, Counter[Verdict]] = {}
    reasons: dict[str, dict[str, None]] = {}
    for m in rows:
        verdicts.setdefault(m.case, Counter())[m.verdict] += 1
        if m.verdict is Verdict.NOT_COMPARABLE:
            reason = f"{edge_name(m.edge)}: {m.note or 'not comparable'}"
            reasons.setdefault(m.case, {})[label(reason, 160)] = None
    return [
        _case(case, verdicts.get(case.name, Counter()), reasons.get(case.name, ()))
        for case in manifest.cases
    ]


def _case(case: CaseInfo, counts: Counter[Verdict], reasons: Iterable[str]) -> dict[str, Any]:
    title, why = case.title, case.why
    gates = sum(counts.values()) - counts[Verdict.INFO]
    if not counts:
        state, tally = "warning", "not run"
    elif not gates:
        state, tally = "warning", "no gate"
    else:
        bad = "fail" if counts[Verdict.FAIL] else "blocked"
        state = "pass" if counts[Verdict.PASS] == gates else bad
        tally = f"{counts[Verdict.PASS]:,} / {gates:,}"
    return {
        "name": label(case.name, 48),
        "why": label(title, 160) + (f": {label(why, 300)}" if why != title else ""),
        "batch": "–" if case.batch is None else case.batch,
        "length": "–" if case.length is None else case.length,
        "hash": label(case.hash, 16),
        "state": state,
        "held": tally,
        "reasons": list(reasons),
    }


def known_differences(manifest: Manifest) -> list[dict[str, str]]:
    """Return a row per known difference from the reference.

    Its state is "pass", "fail", or "info" if it was not measured.
    """
    return [
        {
            "name": label(str(entry.get("id", "")), 60),
            "state": _difference_state(entry),
            "value": number(entry.get("value")),
            **{
                name: label(str(entry.get(name) or ""), limit)
                for name, limit in (("measured", 160), ("bound", 160), ("reason", 400))
            },
        }
        for entry in manifest.seams
    ]


def _difference_state(entry: Mapping[str, Any]) -> str:
    if not entry.get("holds", True):
        return "fail"
    return "info" if entry.get("value") is None else "pass"


def suites(manifest: Manifest) -> dict[str, Any]:
    """Return a row per suite with its numbers of planned and executed checks, and a sentence
    about the totals."""
    rows = [
        {
            "name": label(suite.name, 60),
            "status": label(suite.status, 40),
            "state": "pass" if suite.whole else "warning",
            "executed": suite.executed,
            "planned": suite.planned,
            "seconds": manifest.durations.get(suite.name),
            "reason": label(suite.reason, 300),
        }
        for suite in manifest.suites
    ]
    partial = sum(row["state"] != "pass" for row in rows)
    ran, wanted = (sum(row[k] for row in rows) for k in ("executed", "planned"))
    how = f"{count(partial, 'suite')} not complete" if partial else "every suite is complete"
    return {"rows": rows, "sentence": f"{ran:,} of {wanted:,} checks ran; {how}."}


def _points(training: Mapping[str, Any], step: str, loss: str) -> Sequence[tuple[float, float]]:
    pairs = zip(training.get(step) or (), training.get(loss) or (), strict=False)
    return [(float(x), float(y)) for x, y in pairs]


def checkpoint(manifest: Manifest) -> dict[str, Any] | None:
    """Return facts about the probed checkpoint and its loss curves; None if none was probed."""
    info = manifest.checkpoint
    if info is None:
        return None
    training = info.training or {}
    final = training.get("final_val_loss")
    facts = [
        ("name", label(info.name, 60)),
        ("parameters", f"{info.parameters:,}"),
        ("final validation loss, nats per token", "–" if final is None else f"{float(final):.4f}"),
        ("learning rate", number(training.get("lr"))),
        ("seed", str(training.get("seed", "–"))),
        *_pairs(info.config),
    ]
    return {
        "facts": facts,
        "train": _points(training, "step", "train_loss"),
        "validation": _points(training, "val_step", "val_loss"),
    }


def bench(benches: Sequence[Run]) -> dict[str, Any] | None:
    """Return the data of the last of `benches`, with trends over all of them; None without any.

    `benches` are ordered oldest first.
    """
    if not benches:
        return None
    manifest, rows = benches[-1].manifest, speed.rows(benches)
    work, info = manifest.workload or {}, manifest.environment.reference
    other = reference(info)
    facts = [
        *machine(manifest),
        ("reference", " ".join(other[k] for k in ("kind", "commit", "versions")).strip()),
        ("reference threads", label(str(info.threads or "–"), 20)),
        *_pairs({k: v for k, v in work.items() if k != "config"}),
        *_pairs(work.get("config")),
    ]
    return {
        "when": moment(manifest.created),
        "id": label(benches[-1].id),
        "machine": dict(machine(manifest)),
        "alone": other["kind"] == "absent",
        "repeats": label(str(work.get("repeats", "unknown")), 20),
        "facts": facts,
        "rows": rows,
        "notes": speed.notes(rows),
        "runs": len(benches),
        "changes": [
            {**change, "when": moment(change["created"])} for change in speed.changes(benches)
        ],
        "watched": speed.watched(benches),
        "false_alarm": f"{FALSE_ALARM:.0%}",
        "least": LEAST_RUNS,
    }
