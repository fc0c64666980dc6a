"""The stability suite of a nightly run: probes the committed checkpoint in low precision."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megalodon_jax.convert import load_from_pretrained
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.weights import named_leaves
from parity.megalodon.reference import why_unavailable
from stability.core.findings import Finding, Severity
from stability.core.parameter_leaves import kind_of
from stability.dtype_audit import PROGRAMS, pinned_findings, read_pinned
from stability.dtype_audit.pinned_rows import PROBE
from stability.products import what_if
from stability.repeat import agreement
from stability.storage import ema_pole_findings, embedding_rows
from stability.storage.remedies import STEPS as REMEDY_STEPS
from stability.storage.remedies import try_remedies
from stability.storage.survival import AdamW, probe
from stability.storage.value_audit import audit_parameters

STEPS, BATCH_SIZE, LENGTH = 20, 4, 128
"""Optimiser steps, rows per batch and tokens per row of the survival probe, which trains the model
twice: with parameters stored in bfloat16, and in float32."""
POLE_STEPS = 200
"""Number of simulated optimiser steps after which the memory of EMA poles is reported; the same as
`simulate.STEPS`."""
KINDS = 3
"""Number of kinds of leaf (leaves that differ only in the layer number) on which remedies are
tried. The command `megalodon-numerics stability` tries them on all kinds."""

SIZE = 128
"""Largest number of elements per leaf in the trials of remedies. It covers small leaves whole, and
samples of equal length share one compiled program."""


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint to probe, and the text on which probes compute gradients."""

    folder: Path
    """Folder with `model.safetensors`, `config.json` and optionally `training.json`."""
    text: Path
    """File whose bytes are the token ids."""

    @property
    def training(self) -> dict[str, Any] | None:
        """Contents of `training.json`; None if there is no such file."""
        path = self.folder / "training.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    @property
    def optimiser(self) -> AdamW:
        """AdamW with the settings in `training.json`; a missing lr is 3e-4 (founding case)."""
        training = self.training or {}
        return AdamW(
            lr=training.get("lr", 3e-4),
            beta2=training.get("beta2", 0.999),
            weight_decay=training.get("weight_decay", 0.0),
        )

    def load(self) -> MegalodonForCausalLM:
        """Load the model; raises as `megalodon_jax.convert.load_from_pretrained`."""
        return load_from_pretrained(self.folder)

    def batches(self) -> np.ndarray:
        """Return token ids, int32 (STEPS, BATCH_SIZE, LENGTH), from evenly spaced windows."""
        ids = self.windows(STEPS * BATCH_SIZE, LENGTH)
        return ids.reshape(BATCH_SIZE, STEPS, LENGTH).swapaxes(0, 1)

    def windows(self, count: int, length: int) -> np.ndarray:
        """Return evenly spaced windows of the text, token ids int32 (count, length)."""
        text = np.frombuffer(self.text.read_bytes(), np.uint8)
        starts = np.linspace(0, len(text) - length, count).astype(int)
        return text[starts[:, None] + np.arange(length)].astype(np.int32)


@dataclass
class ProbeResults:
    """Results of one run of all `PROBES`; a function that fails does not stop the others."""

    findings: list[Finding] = field(default_factory=list)
    shown: dict[str, Any] = field(default_factory=dict)
    """JSON data for the nightly HTML report, by key of `PROBES`: "poles", "remedies", "what if"."""
    executed: int = 0
    """Number of functions in `PROBES` that finished."""
    failures: list[str] = field(default_factory=list)
    """Key and error of each function in `PROBES` that failed."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration in seconds by `Finding.probe`. A probe is left out if its function also returned
    findings of another probe, or if several functions returned findings of it."""


def run(checkpoint: Checkpoint, model: MegalodonForCausalLM) -> ProbeResults:
    """Run all functions in `PROBES` on a checkpoint and return their results.

    Args:
        checkpoint: the checkpoint, for optimiser settings and text.
        model: the model loaded from it.
    """
    results = ProbeResults()
    shared: set[str] = set()
    for name, probe_one in PROBES.items():
        start = time.perf_counter()
        try:
            findings, section = probe_one(checkpoint, model, results)
        except (ArithmeticError, OSError, LookupError, RuntimeError, TypeError, ValueError) as e:
            results.failures.append(f"{name}: {type(e).__name__}: {e}"[:400])
            continue
        results.findings += findings
        results.shown |= {name: section} if section is not None else {}
        results.executed += 1
        made = {finding.probe for finding in findings}
        shared |= made if len(made) > 1 else made & results.seconds.keys()
        results.seconds |= dict.fromkeys(made, time.perf_counter() - start)
    results.seconds = {n: taken for n, taken in results.seconds.items() if n not in shared}
    return results


ProbeAnswer = tuple[list[Finding], Any]
"""Findings, and JSON data for a section of the page; None if the page has no such section."""


def _survival(
    checkpoint: Checkpoint, model: MegalodonForCausalLM, earlier: ProbeResults
) -> ProbeAnswer:
    batches, rule = checkpoint.batches(), checkpoint.optimiser
    return [*audit_parameters(model), *probe(model, batches, rule)], None


def _poles(
    checkpoint: Checkpoint, model: MegalodonForCausalLM, earlier: ProbeResults
) -> ProbeAnswer:
    rows = ema_pole_findings.memory_rows(model, checkpoint.optimiser, steps=POLE_STEPS)
    # JSON has no infinity, so None stands for the memory of a pole that never forgets.
    for row in rows:
        row["memory"] = row["memory"] if math.isfinite(row["memory"]) else None
    return ema_pole_findings.findings(model), rows


def _embedding_rows(
    checkpoint: Checkpoint, model: MegalodonForCausalLM, earlier: ProbeResults
) -> ProbeAnswer:
    return embedding_rows.findings(model), None


def _remedies(
    checkpoint: Checkpoint, model: MegalodonForCausalLM, earlier: ProbeResults
) -> ProbeAnswer:
    frozen = {
        f.subject: f.value
        for f in earlier.findings
        if f.probe == "survival" and f.metric == "frozen_fraction" and f.value > 0
    }
    if not any(f.probe == "survival" for f in earlier.findings):
        raise ValueError(
            "no remedies were tried, since the survival probe, which finds the frozen leaves, did "
            "not finish: correct its error, which this run reports too"
        )
    worst: dict[str, str] = {}
    for name in sorted(frozen, key=lambda n: (-frozen[n], n)):
        worst.setdefault(kind_of(name), name)
    worst = dict(list(worst.items())[:KINDS])
    leaves, rule = named_leaves(model), checkpoint.optimiser
    trials = try_remedies({n: np.asarray(leaves[n]) for n in worst.values()}, rule, size=SIZE)
    basis = f"bfloat16 storage, {rule.describe()}, {REMEDY_STEPS:,} steps, synthetic gradients"
    return [], [
        {
            "kind": kind,
            "leaf": name,
            "basis": basis,
            "remedy": trial.remedy.name,
            "what": trial.remedy.what,
            "bytes": trial.bytes,
            "fidelity": trial.survival.fidelity,
            "frozen": trial.survival.frozen,
            "works": trial.works,
        }
        for kind, name in worst.items()
        for trial in trials[name]
    ]


def _pinned_dtypes(
    checkpoint: Checkpoint, model: MegalodonForCausalLM, earlier: ProbeResults
) -> ProbeAnswer:
    """Return findings on the differences between dtype audits of `PROGRAMS` and their pinned rows.

    The arguments, those of every function in `PROBES`, are not used. Compiled programs are not
    compared, since compiling is slow. Each table that is not compared in full has a note with the
    reason.
    """
    findings: list[Finding] = []
    reason = why_unavailable()
    for name, audit in PROGRAMS.items():
        torch, pinned = name.startswith("torch"), read_pinned(name)
        if torch and reason is not None:
            why = f"torch cannot be audited: {reason}"
            findings.append(_not_compared(name, len(pinned.rows), why))
            continue
        rows = audit() if torch else audit(compiled=False)
        views = {row.view for row in rows}
        others = [row for row in pinned.rows if row.view not in views]
        findings += pinned_findings(name, [*rows, *others])
        if others:
            why = "the compiled program is compared by `megalodon-numerics dtypes check`"
            findings.append(_not_compared(name, len(others), why))
    return findings, None


def _not_compared(name: str, rows: int, why: str) -> Finding:
    source, message = f"stability/data/audits/{name}.json", f"{rows} rows not compared here: {why}"
    note, nan = Severity.NOTE, math.nan
    return Finding(PROBE, note, name, "not_compared", rows, nan, source, message)


def _what_if(
    checkpoint: Checkpoint, model: MegalodonForCausalLM, earlier: ProbeResults
) -> ProbeAnswer:
    costs = list(what_if.costs(what_if.captured(model, checkpoint.batches()[0, :2])))
    return what_if.findings(costs), what_if.rows(costs)


def _agreement(
    checkpoint: Checkpoint, model: MegalodonForCausalLM, earlier: ProbeResults
) -> ProbeAnswer:
    return agreement.findings(model, checkpoint.windows(agreement.ROWS, agreement.LENGTH)), None


PROBES: dict[str, Callable[[Checkpoint, MegalodonForCausalLM, ProbeResults], ProbeAnswer]] = {
    "survival": _survival,
    "poles": _poles,
    "embedding rows": _embedding_rows,
    "remedies": _remedies,
    "dtypes against pinned rows": _pinned_dtypes,
    "what if": _what_if,
    "agreement": _agreement,
}
"""Functions that run the probes of a night, by name and in order: "remedies" uses findings of
"survival". Slow measurements are not repeated every night; their results are committed documents
(`stability.core.documents`)."""
