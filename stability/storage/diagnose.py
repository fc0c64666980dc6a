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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megalodon_jax.config import MegalodonConfig
from megalodon_jax.convert import read_config
from megalodon_jax.weights import EMBEDDING, HEAD
from stability.core.checkpoint_files import CheckpointFiles, open_checkpoint
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
    sample,
)
from stability.storage import ema_pole_findings, embedding_rows
from stability.storage.optimiser_state import audit_state
from stability.storage.remedies import NOTHING, REMEDIES, SIZE, Remedy, Trial, try_remedies
from stability.storage.remedies import STEPS as REMEDY_STEPS
from stability.storage.simulate import (
    FLOAT32,
    GRADIENTS,
    SAMPLE,
    STEPS,
    Gradients,
    Storage,
    Survival,
    run,
)
from stability.storage.survival import (
    FROZEN_SHARE,
    SOURCE,
    Prediction,
    frozen_finding,
    measure,
    numbers_of,
    predict,
)
from stability.storage.torch_recipe import recipe
from stability.storage.torch_state import TorchState, audit_torch, idle_rows, read_state, trained_by
from stability.storage.update_rules import Optimiser
from stability.storage.whole_run import WholeRun, whole_run

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
    whole: WholeRun | None = None
    """What storage costs the run; None where there are no parameters."""
    storage: str = BF16.name
    torch: tuple[str, ...] = ()
    """Where torch trains it: what helps, as lines of a torch script."""

    def worst(self) -> Severity:
        """Return the worst severity there is."""
        return max((f.severity for f in self.findings), key=Severity.gravity)

    def text(self) -> str:
        """Return the diagnosis for a terminal: one entry per problem and kind of leaf."""
        groups: dict[tuple[str, str, str], list[Finding]] = defaultdict(list)
        for f in self.findings:
            if f.severity.gravity() >= Severity.WARNING.gravity():
                # Moments are of one kind across parameters: what is wrong is how they are kept.
                moment = f"optimiser state *.{f.subject.rpartition('.')[2]}"
                kind = moment if f.probe == "optimiser" else kind_of(f.subject)
                groups[f.probe, kind, f.metric].append(f)
        lines = [line for key, found in groups.items() for line in self._entry(key[1], found)]
        if not lines:
            rows = any(f.probe == "embedding_rows" for f in self.findings)
            looked_at = ", and no embedding row is zero" if rows else ""
            lines = [f"Nothing found: no parameter freezes, collapses or is not finite{looked_at}."]
            if not self.predictions:
                lines = ["Nothing found: every moment decays, is finite and does not underflow."]
        run = ["", *self.whole.lines(self.storage)] if self.whole is not None else []
        wrong = any(
            f.probe in ("survival", "optimiser") for group in groups.values() for f in group
        )
        torch = ["", *self.torch] if self.torch and wrong else []
        return "\n".join([*lines, *run, *torch, "", *self.basis, f"{self.seconds:.1f} s"])

    def _entry(self, kind: str, findings: Sequence[Finding]) -> list[str]:
        first = findings[0]
        name = first.subject if len(findings) == 1 else f"{kind} ({len(findings)} leaves)"
        lines = [f"{first.severity.upper()} {name}: {first.message}"]
        if first.metric == "frozen_fraction" and kind in self.trials:
            trials = self.trials[kind]
            torch = bool(self.torch)
            lines += [f"    fix: {t.describe(torch)}" for t in trials[:SHOWN]]
            lines += [f"    not: {t.describe(torch)}" for t in trials if not t.works][:SHOWN]
        elif first.remedy:
            lines.append(f"    fix: {first.remedy}")
        return lines


def report(
    source: Any,
    optimiser: Optimiser | str | None = None,
    *,
    settings: Mapping[str, float] | None = None,
    config: MegalodonConfig | None = None,
    fmt: Format = BF16,
    batches: Any = None,
    loss: Any = None,
    state: Any = None,
    gradients: Gradients = GRADIENTS,
    remedies: Sequence[Remedy] = (NOTHING, *REMEDIES),
    say: Callable[[str], None] = lambda line: None,
    step: Callable[[int, int], None] = lambda done, planned: None,
) -> Diagnosis:
    """Diagnose a pytree, a torch state dict or a checkpoint on disk.

    Args:
        source: see `leaves.leaves_of`, or files that are open already. A `config.json` in their
            folder, if it is a Megalodon's, says which names are expected.
        optimiser: what trains it, or its name; None takes that of an optimiser state beside the
            parameters, and AdamW where there is none.
        settings: of an optimiser by name, such as `lr`, which replace those of the state.
        config: the Megalodon it must be; None checks names only against a `config.json` beside it.
        fmt: the storage in question.
        batches: data for `loss`, one entry per step; None measures on synthetic gradients.
        loss: (parameters, batch) -> scalar; None with batches takes a Megalodon's own.
        state: an optimiser state to audit as well (optax, or torch's `state_dict()`).
        gradients: the distribution of synthetic gradients.
        remedies: which are tried on the worst leaf of each frozen kind.
        say: gets a line at each stage.
        step: gets how many parts are done, and of how many.

    Raises:
        FileNotFoundError: the path holds no checkpoint.
        ValueError: nothing in it can be trained, the names are another model's, the optimiser is
            unknown, or batches came without a loss.
    """
    clock = time.perf_counter()
    files, leaves = _expected_leaves(source, config)
    states = [read_state(at, kept, leaves) for at, kept in files.states.items()] if files else []
    if isinstance(optimiser, Optimiser):
        rule, whose = optimiser, ""
    else:
        rule, whose = trained_by(states, optimiser, **(settings or {}))
    findings = _audited(states, state, rule)
    origin = [f"{files.summary[0].upper()}{files.summary[1:]}."] if files else []
    if not leaves:
        if not findings:
            raise ValueError(
                "no parameters, and an optimiser state from before its first step: name a "
                "checkpoint that was saved while training."
            )
        basis = [*origin, f"No parameters here, the optimiser state alone; {rule.describe()}."]
        return Diagnosis(ranked(findings, {}), {}, {}, {}, basis, time.perf_counter() - clock)
    walk = _walk(leaves, rule, lambda done: step(done, len(leaves) + len(remedies) + 2))
    leaves, predictions = walk.leaves, walk.predictions
    findings += walk.findings
    planned = walk.seen + len(remedies) + 2
    say(f"training samples of {len(leaves)} leaves, in {fmt.name} and in float32")

    def measured(storage: Format | None) -> dict[str, Survival]:
        if batches is not None:
            return measure(source, batches, rule, storage, loss=loss)
        shapes = {n: leaf.shape for n, leaf in leaves.items()}
        stored = FLOAT32 if storage is None else Storage("nearest", storage.name)
        outcomes = run(walk.samples, rule, stored, gradients, STEPS, SAMPLE, shapes)
        return {n: outcome.survival() for n, outcome in outcomes.items()}

    narrow, control = measured(fmt), measured(None)
    step(walk.seen + 2, planned)
    worst_of_kind = _representatives(leaves, narrow)
    worst = {n: leaves[n] for n in worst_of_kind.values()}
    if worst:
        say(f"trying {len(remedies)} remedies on {len(worst)} kinds of leaves")
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
    whole = whole_run(
        leaves, walk.samples, rule, fmt, gradients, say=say, **_weighed(states, leaves, rule)
    )
    step(planned, planned)
    sizes = {n: leaf.size for n, leaf in leaves.items()}
    basis = [*origin, *_basis(rule, whose, fmt, batches, gradients, leaves), *walk.left()]
    basis += [line for each in states for line in each.schedule()]
    seconds = time.perf_counter() - clock
    findings += [f for each in states for f in idle_rows(each, leaves, rule, fmt)]
    found = ranked(findings, sizes)
    torch = tuple(recipe(rule)) if _of_torch(source, files, leaves) else ()
    return Diagnosis(
        found, trials, worst_of_kind, predictions, basis, seconds, whole, fmt.name, torch
    )


def _of_torch(source: Any, files: CheckpointFiles | None, leaves: Mapping[str, Leaf]) -> bool:
    """Whether torch trains it: files are its own but for those of a Megalodon, which are both's."""
    if files is not None:
        return not is_megalodon(leaves)
    return isinstance(source, Mapping) and any(hasattr(x, "detach") for x in source.values())


def _weighed(
    states: Sequence[TorchState], leaves: Mapping[str, Leaf], rule: Optimiser
) -> dict[str, Any]:
    """Return what optimiser states say of the run: sizes of gradients, and how moments are kept."""
    drawn = {}
    for each in states:
        for name in set(each.moments) & set(leaves):
            if (rows := each.gradients(name)) is not None:
                matrix = rule.matrix(leaves[name].shape)
                drawn[name] = rows.sampled(name, SAMPLE, matrix)
    known = len(drawn) == len(leaves)
    wide = [each.wide_moments() for each in states if each.moments]
    narrow = any(leaf.dtype not in ("float32", "float64") for leaf in leaves.values())
    return {
        "sizes": {n: d[0] for n, d in drawn.items()} if known else None,
        "signals": {n: d[1] for n, d in drawn.items()} if known else None,
        "wide_moments": narrow and bool(wide) and all(wide),
    }


def _audited(states: Sequence[TorchState], state: Any, rule: Optimiser) -> list[Finding]:
    """Return the findings on the optimiser states of a checkpoint, and on one that was passed."""
    findings = [f for each in states for f in audit_torch(each)]
    if state is not None:
        beta1, beta2 = getattr(rule, "beta1", 0.9), getattr(rule, "beta2", 0.999)
        findings += audit_state(state, beta2, beta1=beta1)
    return findings


def _expected_leaves(
    source: Any, config: MegalodonConfig | None
) -> tuple[CheckpointFiles | None, dict[str, Leaf]]:
    """Return the files and leaves of the source, which must be those of the Megalodon it says."""
    files = open_checkpoint(source) if isinstance(source, (str, os.PathLike)) else None
    if isinstance(source, CheckpointFiles):
        files = source
    leaves = leaves_of(source) if files is None else dict(files.leaves)
    expected = config or (_config_beside(files.path) if files and leaves else None)
    if expected is not None:
        check_names(leaves, expected)
        if expected.tied:
            # A tied head in a file is a copy of the embedding, not another parameter.
            leaves.pop(HEAD, None)
    return files, leaves


def ranked(findings: Sequence[Finding], sizes: Mapping[str, int]) -> list[Finding]:
    """Order findings: worst severity first, then by how many elements they concern."""

    def weight(f: Finding) -> float:
        concerned = f.value if f.metric.endswith("_fraction") and np.isfinite(f.value) else 1.0
        return concerned * sizes.get(f.subject, 1)

    return sorted(findings, key=lambda f: (-f.severity.gravity(), -weight(f)))


def _config_beside(path: Path) -> MegalodonConfig | None:
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


@dataclass
class _Walk:
    """What one reading of every leaf gives."""

    seen: int = 0
    leaves: dict[str, Leaf] = field(default_factory=dict)
    """Those that can be probed."""
    samples: dict[str, np.ndarray] = field(default_factory=dict)
    predictions: dict[str, dict[str, Prediction]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    others: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Leaves that no optimiser moves, by dtype."""

    def left(self) -> list[str]:
        """Return in words what was not probed, and why."""
        kinds = [f"{len(names)} of {kind} ({listed(names)})" for kind, names in self.others.items()]
        return [f"Not probed, no optimiser moves them as they are: {'; '.join(kinds)}."] * any(
            kinds
        )


def _walk(leaves: Mapping[str, Leaf], rule: Optimiser, step: Callable[[int], None]) -> _Walk:
    """Read every leaf once: what can be probed, its sample and predictions, what to say of others.

    Raises:
        ValueError: nothing can be probed.
    """
    walk, megalodon = _Walk(), is_megalodon(leaves)
    for name, leaf in leaves.items():
        walk.seen += 1
        step(walk.seen)
        if not leaf.floating:
            why = "a buffer" if leaf.buffer else "not a floating-point parameter"
            message, nan = f"{leaf.dtype}: {why}, not probed", math.nan
            note, size = Severity.NOTE, leaf.size
            walk.others[leaf.dtype + (", buffers" if leaf.buffer else "")].append(name)
            walk.findings.append(
                Finding("leaves", note, name, "elements", size, nan, SOURCE, message)
            )
            continue
        values = leaf.read()
        if count := int(values.size - np.count_nonzero(np.isfinite(values))):
            walk.findings.append(non_finite(name, count, leaf.size, SOURCE, ", not probed"))
        elif leaf.size:
            decay = decays(name, leaf.shape, megalodon)
            walk.leaves[name] = leaf
            walk.samples[name] = sample(values, name, SAMPLE, rule.matrix(leaf.shape))
            walk.predictions[name] = {f.name: predict(values, rule, f, decay) for f in FORMATS}
    if not walk.leaves:
        raise ValueError(
            f"none of {len(leaves)} leaves can be probed: expected finite floating-point "
            f"parameters, found {listed([f'{n} ({x.dtype})' for n, x in leaves.items()])} with "
            "integers, NaN or infinity only; restore an earlier checkpoint."
        )
    return walk


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
    rule: Optimiser,
    whose: str,
    fmt: Format,
    batches: Any,
    gradients: Gradients,
    good: Mapping[str, Leaf],
) -> list[str]:
    total = sum(leaf.size for leaf in good.values())
    sampled = sum(min(SAMPLE, leaf.size) for leaf in good.values())
    lines = [f"{len(good)} leaves, {total:,} parameters; "
             f"{rule.describe()}{whose and f', {whose}'}; storage "
             f"{fmt.name}."]  # fmt: skip
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
