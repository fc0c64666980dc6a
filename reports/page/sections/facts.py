"""What a run says about itself, as the page shows it: machine, reference, cases, checkpoint, bench.

Pure functions from a run's manifest to plain data. Source: docs/reports.md "The page".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from parity.engine.measurement import Measurement, Verdict
from reports.page.sections import speed
from reports.provenance.host import fingerprint, processor
from reports.store.runs import Run
from reports.text import count, edge_name, label, number

Manifest = Mapping[str, Any]


def moment(created: str) -> str:
    """Write a time stamp; one that is none is shown as it is."""
    try:
        found = datetime.fromisoformat(created)
    except ValueError:
        return label(created, 40)
    return found.strftime("%Y-%m-%d %H:%M UTC")


def _pairs(mapping: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    return [(label(str(k), 60), label(str(v), 120)) for k, v in (mapping or {}).items()]


def reference(manifest: Manifest) -> dict[str, str]:
    """Return what answered for megalodon-hf."""
    found = manifest.get("reference") or {}
    return {
        "kind": label(str(found.get("kind") or "absent"), 40),
        "commit": label(str(found.get("commit") or "unknown"), 40),
        "versions": ", ".join(f"{k} {v}" for k, v in _pairs(found.get("versions"))),
        "detail": label(str(found.get("detail") or ""), 240),
    }


def machine(manifest: Manifest) -> list[tuple[str, str]]:
    """Return code, device, threads, versions and flags by name."""
    device = manifest.get("device") or {}
    kind, name = device.get("kind", "unknown"), processor(manifest)
    commit = label(str(manifest.get("commit") or "unknown"), 60)
    return [
        ("commit", f"{commit} with uncommitted changes" if manifest.get("dirty") else commit),
        ("device", label(f"{kind}: {name}", 120)),
        ("fingerprint", fingerprint(manifest) or "unknown"),
        ("threads", str(manifest.get("threads", "unknown"))),
        *_pairs(manifest.get("versions")),
        *_pairs(manifest.get("flags")),
    ]


def environment(manifest: Manifest, before: Manifest | None) -> dict[str, Any]:
    """Return the environment beside that of the baseline, what differs first.

    Each row is (name, then, now); `then` is "" without a baseline and "absent" where only the
    baseline lacks it.
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
    found = reference(manifest)
    told = manifest.get("reference") or {}
    named = [(f"reference {name}", found[name]) for name in ("kind", "commit")]
    return [
        *machine(manifest),
        *named,
        *((f"reference {name}", value) for name, value in _pairs(told.get("versions"))),
    ]


def cases(manifest: Manifest, rows: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Return each case with how many of its gates hold, and why the others were not measured."""
    verdicts: dict[str, Counter[Verdict]] = {}
    reasons: dict[str, dict[str, None]] = {}
    for m in rows:
        verdicts.setdefault(m.case, Counter())[m.verdict] += 1
        if m.verdict is Verdict.NOT_COMPARABLE:
            reason = f"{edge_name(m.edge)}: {m.note or 'not comparable'}"
            reasons.setdefault(m.case, {})[label(reason, 160)] = None
    return [
        _case(case, verdicts.get(str(case.get("name")), Counter()), reasons)
        for case in manifest.get("cases") or ()
    ]


def _case(
    case: Manifest, counts: Counter[Verdict], reasons: Mapping[str, Mapping[str, None]]
) -> dict[str, Any]:
    name, title, why = (str(case.get(key, "")) for key in ("name", "title", "why"))
    gates = sum(counts.values()) - counts[Verdict.INFO]
    if not counts:
        state, held = "warning", "not run"
    else:
        bad = "fail" if counts[Verdict.FAIL] else "blocked"
        state = "pass" if counts[Verdict.PASS] == gates else bad
        held = f"{counts[Verdict.PASS]:,} / {gates:,}"
    return {
        "name": label(name, 48),
        "why": label(title, 160) + (f": {label(why, 300)}" if why != title else ""),
        "batch": case.get("batch", "–"),
        "length": case.get("length", "–"),
        "hash": label(str(case.get("hash", "")), 16),
        "state": state,
        "held": held,
        "reasons": list(reasons.get(name, ())),
    }


def suites(manifest: Manifest) -> dict[str, Any]:
    """Return what was planned and what ran, with a sentence for the whole."""
    durations = manifest.get("durations") or {}
    rows = []
    for suite in manifest.get("suites") or ():
        executed, planned = suite.get("executed") or 0, suite.get("planned") or 0
        whole = suite.get("status") == "ran" and executed >= planned
        rows.append(
            {
                "name": label(str(suite.get("name")), 60),
                "status": label(str(suite.get("status")), 40),
                "state": "pass" if whole else "warning",
                "executed": executed,
                "planned": planned,
                "seconds": durations.get(suite.get("name")),
                "reason": label(str(suite.get("reason") or ""), 300),
            }
        )
    partial = sum(row["state"] != "pass" for row in rows)
    ran, wanted = (sum(row[k] for row in rows) for k in ("executed", "planned"))
    how = f"{count(partial, 'suite')} not whole" if partial else "every suite is whole"
    return {"rows": rows, "sentence": f"{ran:,} of {wanted:,} checks ran; {how}."}


def _points(training: Manifest, step: str, loss: str) -> Sequence[tuple[float, float]]:
    pairs = zip(training.get(step) or (), training.get(loss) or (), strict=False)
    return [(float(x), float(y)) for x, y in pairs]


def checkpoint(manifest: Manifest) -> dict[str, Any] | None:
    """Return the probed checkpoint and its training curves, or None."""
    found = manifest.get("checkpoint")
    if not found:
        return None
    training = found.get("training") or {}
    final = training.get("final_val_loss")
    facts = [
        ("name", label(str(found.get("name", "")), 60)),
        ("parameters", f"{found.get('parameters', 0):,}"),
        ("final validation loss, nats per token", "–" if final is None else f"{float(final):.4f}"),
        ("learning rate", number(training.get("lr"))),
        ("seed", str(training.get("seed", "–"))),
        *_pairs(found.get("config")),
    ]
    return {
        "facts": facts,
        "train": _points(training, "step", "train_loss"),
        "validation": _points(training, "val_step", "val_loss"),
    }


def bench(benches: Sequence[Run]) -> dict[str, Any] | None:
    """Return the newest bench with its trend over all of `benches`, oldest first, or None."""
    if not benches:
        return None
    manifest, rows = benches[-1].manifest, speed.rows(benches)
    work = manifest.get("workload") or {}
    other, threads = reference(manifest), (manifest.get("reference") or {}).get("threads")
    facts = [
        *machine(manifest),
        ("reference", " ".join(other[k] for k in ("kind", "commit", "versions")).strip()),
        ("reference threads", label(str(threads or "–"), 20)),
        *_pairs({k: v for k, v in work.items() if k != "config"}),
        *_pairs(work.get("config")),
    ]
    return {
        "when": moment(manifest["created"]),
        "id": label(benches[-1].id),
        "machine": dict(machine(manifest)),
        "alone": other["kind"] == "absent",
        "repeats": label(str(work.get("repeats", "unknown")), 20),
        "facts": facts,
        "rows": rows,
        "notes": speed.notes(rows),
        "runs": len(benches),
    }
