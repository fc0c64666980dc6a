"""Stored runs as steps of an experiment tracker: each step has one number per curve.

Curves are named by suite, edge and kind of quantity, never by case or run, so there are only dozens
and every night continues them. Source: docs/commands.md "For other tools".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from parity.engine.measure.measurement import Verdict
from reports.exports.levels import largest_shares
from reports.store.manifest import Manifest
from reports.store.runs import Run
from reports.text import label
from reports.verdict.decide import Decision
from reports.verdict.replays import suite_of

PROJECT = "megalodon-numerics"
"""Name of the tracker's project or experiment if its own environment variable names none."""
LONGEST = 60
"""Largest number of characters of a part of a curve's name; MLflow allows 250 in all."""
LONGEST_FACT = 2000
"""Largest number of characters of a fact's text."""


@dataclass(frozen=True, slots=True)
class Step:
    """One stored run, in the form that experiment trackers log."""

    run: str
    created: datetime
    exit_code: int
    values: Mapping[str, float]
    """Number of each curve at this step, by the curve's name. A curve
    `tolerance_used/SUITE/EDGE/KIND` is infinite if a gate of this suite, edge and kind of quantity
    could not be compared."""
    facts: Mapping[str, str]
    """Texts about the run by name, such as verdict, commit, device, reference, planted fault."""


def step(run: Run, decision: Decision) -> Step:
    """Convert a run and its verdict to a step of an experiment tracker."""
    manifest = run.manifest
    facts = {
        "run": run.id,
        "kind": manifest.kind.value,
        "verdict": str(decision.word),
        "sentence": decision.sentence,
        "commit": manifest.commit or "",
        "device": manifest.environment.device.kind or "",
        "reference": manifest.environment.reference.kind or "",
        "fault": manifest.fault or "",
    }
    return Step(
        label(run.id, LONGEST_FACT),
        datetime.fromisoformat(manifest.created),
        int(decision.exit_code),
        _values(run, decision),
        {name: label(text, LONGEST_FACT) for name, text in facts.items()},
    )


def _values(run: Run, decision: Decision) -> dict[str, float]:
    environment = run.manifest.environment
    values = {"exit_code": float(decision.exit_code)}
    # Curves continue over devices and over live and recorded references; these two values tell them
    # apart at each step.
    values["reference_live"] = float(environment.reference.kind == "live")
    values[curve("device", environment.device.kind or "unknown")] = 1.0
    values |= {f"count/{name}": float(n) for name, n in asdict(decision.counts).items()}
    gates = [m for m in run.measurements if m.verdict is not Verdict.INFO]
    every = Counter(suite_of(m) for m in gates)
    held = Counter(suite_of(m) for m in gates if m.verdict is Verdict.PASS)
    for suite, n in every.items():
        # Names of curves are shortened, so two suites may share one.
        for name, part in (("gates", n), ("gates_held", held[suite])):
            of_suite = curve(name, suite)
            values[of_suite] = values.get(of_suite, 0.0) + part
    for (suite, _, edge, kind), share in largest_shares(gates).items():
        name = curve("tolerance_used", suite, edge, kind)
        values[name] = max(share, values.get(name, 0.0))
    for severity, n in Counter(f.severity.value for f in run.findings).items():
        values[curve("findings", severity)] = float(n)
    for suite, seconds in run.manifest.durations.items():
        values[curve("seconds", suite)] = float(seconds)
    return values | _losses(run.manifest)


def _losses(manifest: Manifest) -> dict[str, float]:
    """Return the final losses of the probed checkpoint's training, in nats per token, by curve:
    `loss/train` and `loss/validation`.

    {} if they are unknown.
    """
    training = (manifest.checkpoint and manifest.checkpoint.training) or {}
    ends = {
        "train": (training.get("train_loss") or (None,))[-1],
        "validation": training.get("final_val_loss"),
    }
    return {f"loss/{name}": float(loss) for name, loss in ends.items() if loss is not None}


def curve(*parts: str) -> str:
    """Return the name of a curve: the parts joined by `/`, with characters that trackers accept.

    These are letters, digits, `_`, `-` and `.`; so `jax32:oracle` becomes `jax32-oracle`.
    """
    return "/".join(re.sub(r"[^A-Za-z0-9_.-]|^\.+", "-", part[:LONGEST]) for part in parts)


def files(folder: Path) -> list[Path]:
    """Return the files of a stored run, page included, to attach to the tracker's run."""
    return sorted(path for path in folder.iterdir() if path.is_file())
