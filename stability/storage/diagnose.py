"""Diagnose a checkpoint: what is wrong, the number, the fix, and its measured effect on its leaves.

Leaves are read one at a time, predictions are exact over distinct stored values, and measurements
run on a sample of each leaf that its name decides. Source: docs/stability.md
"Diagnose a checkpoint".
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megalodon_jax.config import MegalodonConfig
from megalodon_jax.convert import read_config
from megalodon_jax.weights import EMBEDDING, HEAD
from stability.core.findings import Finding, Severity, non_finite, notes
from stability.core.number_formats import BF16, FORMATS, Format
from stability.core.parameter_leaves import (
    Leaf,
    check_names,
    decays,
    is_megalodon,
    kind_of,
    leaves_of,
    listed,
)
from stability.storage import ema_pole_findings, embedding_rows
from stability.storage.optimiser_state import audit_state
from stability.storage.remedies import NOTHING, REMEDIES, SIZE, Remedy, Trial, try_remedies
from stability.storage.remedies import STEPS as REMEDY_STEPS
from stability.storage.simulate import GRADIENTS, SAMPLE, STEPS, Gradients, Survival
from stability.storage.survival import (
    FROZEN_SHARE,
    SOURCE,
    Prediction,
    frozen_finding,
    measure,
    numbers_of,
    predict,
)
from stability.storage.update_rules import AdamW, Optimiser
from stability.storage.update_rules import optimiser as optimiser_by_name

SHOWN = 3
"""Remedies named for each kind of leaf, best first."""


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a checkpoint, worst first, and what each remedy would do."""

    findings: list[Finding]
    """Worst severity first; within one, what concerns most elements first."""
    trials: dict[str, list[Trial]]
    """By kind of leaf (path with layer numbers replaced by *): remedies, best first."""
    representatives: dict[str, str]
    """By kind: the leaf its remedies were tried on, the worst of its kind."""
    predictions: dict[str, dict[str, Prediction]]
    """By leaf and format name."""
    basis: list[str]
    """What the numbers rest on: optimiser, gradients, samples."""
    seconds: float

    def worst(self) -> Severity:
        """Return the worst severity there is."""
        return max((f.severity for f in self.findings), key=Severity.gravity)

    def text(self) -> str:
        """Return the diagnosis for a terminal: one entry per problem and kind of leaf."""
        groups: dict[tuple[str, str, str], list[Finding]] = defaultdict(list)
        for f in self.findings:
            if f.severity.gravity() >= Severity.WARNING.gravity():
                groups[f.probe, kind_of(f.subject), f.metric].append(f)
        lines = [line for findings in groups.values() for line in self._entry(findings)]
        if not lines:
            rows = any(f.probe == "embedding_rows" for f in self.findings)
            looked_at = ", and no embedding row is zero" if rows else ""
            lines = [f"Nothing found: no parameter freezes, collapses or is not finite{looked_at}."]
        return "\n".join([*lines, "", *self.basis, f"{self.seconds:.1f} s"])

    def _entry(self, findings: Sequence[Finding]) -> list[str]:
        first = findings[0]
        kind = kind_of(first.subject)
        name = first.subject if len(findings) == 1 else f"{kind} ({len(findings)} leaves)"
        lines = [f"{first.severity.upper()} {name}: {first.message}"]
        if first.probe == "survival" and kind in self.trials:
            trials = self.trials[kind]
            lines += [f"    fix: {t.describe()}" for t in trials[:SHOWN]]
            lines += [f"    not: {t.describe()}" for t in trials if not t.works][:SHOWN]
        elif first.remedy:
            lines.append(f"    fix: {first.remedy}")
        return lines


def report(
    source: Any,
    optimiser: Optimiser | str = AdamW(),  # noqa: B008 - frozen
    *,
    config: MegalodonConfig | None = None,
    fmt: Format = BF16,
    batches: Any = None,
    loss: Any = None,
    state: Any = None,
    gradients: Gradients = GRADIENTS,
    remedies: Sequence[Remedy] = (NOTHING, *REMEDIES),
) -> Diagnosis:
    """Diagnose a pytree, a torch state dict or a checkpoint on disk.

    Args:
        source: see `leaves.leaves_of`. A directory's `config.json`, if it is a Megalodon's, says
            which names are expected.
        optimiser: what trains it, or its name.
        config: the Megalodon it must be; None checks names only against a `config.json` beside it.
        fmt: the storage in question.
        batches: data for `loss`, one entry per step; None measures on synthetic gradients.
        loss: (parameters, batch) -> scalar; None with batches takes a Megalodon's own.
        state: an optimiser state to audit as well (optax, or torch's `state_dict()`).
        gradients: the distribution of synthetic gradients.
        remedies: which are tried on the worst leaf of each frozen kind.

    Raises:
        FileNotFoundError: the path holds no checkpoint.
        ValueError: nothing in it can be trained, the names are another model's, the optimiser is
            unknown, or batches came without a loss.
    """
    clock = time.perf_counter()
    rule = optimiser_by_name(optimiser) if isinstance(optimiser, str) else optimiser
    leaves, findings = _suited(_expected_leaves(source, config))
    megalodon, predictions = is_megalodon(leaves), {}
    for name, leaf in leaves.items():
        values, decay = leaf.read(), decays(name, leaf.shape, megalodon)
        predictions[name] = {each.name: predict(values, rule, each, decay) for each in FORMATS}

    def measured(storage: Format | None) -> dict[str, Survival]:
        if batches is None:
            return measure(leaves, None, rule, storage, gradients=gradients)
        return measure(source, batches, rule, storage, loss=loss)

    narrow, control = measured(fmt), measured(None)
    worst_of_kind = _representatives(leaves, narrow)
    worst = {n: leaves[n] for n in worst_of_kind.values()}
    by_leaf = try_remedies(worst, rule, fmt, remedies=remedies, gradients=gradients)
    trials = {kind: by_leaf[name] for kind, name in worst_of_kind.items()}
    for name, leaf in leaves.items():
        of_kind = trials.get(kind_of(name), [])
        survivals = narrow[name], control[name]
        findings += _leaf_findings(leaf, *survivals, predictions[name], fmt, rule, of_kind)
    if any(n.endswith("cema.alpha") for n in leaves):
        findings += ema_pole_findings.findings(
            {n: x.load() for n, x in leaves.items() if ".cema." in n}
        )
    if EMBEDDING in leaves:
        findings += embedding_rows.findings({EMBEDDING: leaves[EMBEDDING]})
    if state is not None:
        findings += audit_state(state, getattr(rule, "beta2", 0.999))
    sizes = {n: leaf.size for n, leaf in leaves.items()}
    basis = _basis(rule, fmt, batches, gradients, leaves)
    seconds = time.perf_counter() - clock
    return Diagnosis(ranked(findings, sizes), trials, worst_of_kind, predictions, basis, seconds)


def _expected_leaves(source: Any, config: MegalodonConfig | None) -> dict[str, Leaf]:
    """Return the leaves of the source, which must be those of the Megalodon it says it is."""
    leaves = leaves_of(source)
    expected = config or _config_beside(source)
    if expected is not None:
        check_names(leaves, expected)
        if expected.tied:
            # A tied head in a file is a copy of the embedding, not another parameter.
            leaves.pop(HEAD, None)
    return leaves


def ranked(findings: Sequence[Finding], sizes: Mapping[str, int]) -> list[Finding]:
    """Order findings: worst severity first, then by how many elements they concern."""

    def weight(f: Finding) -> float:
        concerned = f.value if f.metric.endswith("_fraction") and np.isfinite(f.value) else 1.0
        return concerned * sizes.get(f.subject, 1)

    return sorted(findings, key=lambda f: (-f.severity.gravity(), -weight(f)))


def _config_beside(source: Any) -> MegalodonConfig | None:
    if not isinstance(source, (str, os.PathLike)):
        return None
    path = Path(source)
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return None
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not readable JSON: {error}") from error
    ours = isinstance(fields, dict) and (
        fields.get("model_type") == "megalodon" or "cema_ndim" in fields
    )
    return read_config(file) if ours else None


def _suited(leaves: Mapping[str, Leaf]) -> tuple[dict[str, Leaf], list[Finding]]:
    """Return the leaves that can be probed, and what is to be said of the others."""
    good, findings = {}, []
    for name, leaf in leaves.items():
        if not leaf.floating:
            message = f"{leaf.dtype}: not a floating-point parameter, not probed"
            size, nan = leaf.size, math.nan
            findings.append(
                Finding("leaves", Severity.NOTE, name, "elements", size, nan, SOURCE, message)
            )
        elif count := leaf.non_finite():
            findings.append(non_finite(name, count, leaf.size, SOURCE, ", not probed"))
        elif leaf.size:
            good[name] = leaf
    if not good:
        raise ValueError(
            f"none of {len(leaves)} leaves can be probed: expected finite floating-point "
            f"parameters, found {listed([f'{n} ({x.dtype})' for n, x in leaves.items()])} with "
            "integers, NaN or infinity only; restore an earlier checkpoint."
        )
    return good, findings


def _representatives(good: Mapping[str, Leaf], narrow: Mapping[str, Survival]) -> dict[str, str]:
    """Return by kind the leaf that is frozen worst, for the kinds that have a frozen one."""
    frozen = [n for n, survival in narrow.items() if n in good and survival.frozen > FROZEN_SHARE]
    worst: dict[str, str] = {}
    for name in sorted(frozen, key=lambda n: (-narrow[n].frozen, -good[n].size)):
        worst.setdefault(kind_of(name), name)
    return worst


def _leaf_findings(
    leaf: Leaf,
    narrow: Survival,
    control: Survival,
    predicted: Mapping[str, Prediction],
    fmt: Format,
    rule: Optimiser,
    trials: Sequence[Trial],
) -> list[Finding]:
    stored = "stored" if leaf.dtype == fmt.name else "if it were stored"
    here = predicted[fmt.name]
    message = (
        f"{stored} in {fmt.name}, {narrow.frozen:.0%} of its {leaf.size:,} elements never move at "
        f"lr {rule.lr:g} (predicted {here.frozen:.0%}), and {narrow.fidelity:.0%} of the intended "
        f"change is applied; half of them would move from lr {here.min_lr:.1e}"
    )
    fix = "; or ".join([t.describe() for t in trials if t.works][:SHOWN])
    others = {f"predicted_frozen_{n}": p.frozen for n, p in predicted.items() if n != fmt.name}
    return [
        frozen_finding(leaf.name, narrow.frozen, message, fix),
        *notes("survival", leaf.name, numbers_of(narrow, control, here) | others, SOURCE),
    ]


def _basis(
    rule: Optimiser, fmt: Format, batches: Any, gradients: Gradients, good: Mapping[str, Leaf]
) -> list[str]:
    total = sum(leaf.size for leaf in good.values())
    sampled = sum(min(SAMPLE, leaf.size) for leaf in good.values())
    lines = [f"{len(good)} leaves, {total:,} parameters; {rule.describe()}; storage {fmt.name}."]
    lines.append("Predicted shares count every element.")
    if batches is None:
        lines.append(
            f"Measured: {STEPS} steps on {sampled:,} elements, at most {SAMPLE:,} of a leaf, drawn "
            f"by its name; {gradients.describe()}."
        )
    else:
        lines.append(f"Measured: training on {len(batches)} batches.")
    lines.append(
        f"Remedies: {REMEDY_STEPS:,} steps on at most {SIZE:,} elements of the worst leaf of each "
        "kind, synthetic gradients; bytes per parameter leave out the optimiser's moments."
    )
    return lines
