"""Diagnosis of a checkpoint: each problem with its size, its remedy, and that remedy's effect.

Leaves (parameter arrays) are read one at a time. Predicted frozen fractions are exact: they count
every distinct stored value. Measurements run on a sample of each leaf, seeded by the leaf's name.
Source: docs/stability.md "Diagnose a checkpoint".
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
from stability.core.number_formats import BF16, FORMATS, Format, format_of
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
from stability.storage import ema_pole_findings, embedding_rows, simulate
from stability.storage.adapters import merge_findings, summary_of
from stability.storage.diagnosis import SHOWN, Diagnosis, StateUse
from stability.storage.known_gradients import KnownGradients, RowGradients, nothing
from stability.storage.optimiser_state import audit_state
from stability.storage.remedies import NOTHING, REMEDIES, SIZE, Remedy, Trial, try_remedies
from stability.storage.remedies import STEPS as REMEDY_STEPS
from stability.storage.schedule import Schedule
from stability.storage.simulate import FLOAT32, GRADIENTS, Simulated, Storage, Survival, run
from stability.storage.survival import (
    FROZEN_SHARE,
    SOURCE,
    Prediction,
    frozen_finding,
    measure,
    numbers_of,
    predict_each,
)
from stability.storage.torch_recipe import recipe
from stability.storage.torch_state import (
    ParameterOrder,
    TorchState,
    audit_torch,
    exchanged,
    idle_rows,
    read_states,
    trained_by,
)
from stability.storage.update_rules import GRADIENT_RMS, Optimiser
from stability.storage.whole_run import whole_run


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
    order: Sequence[str] | None = None,
    gradients: simulate.Gradients = GRADIENTS,
    known: Callable[[Mapping[str, Leaf]], KnownGradients] | None = None,
    schedule: Schedule | None = None,
    remedies: Sequence[Remedy] = (NOTHING, *REMEDIES),
    base: Any = None,
    say: Callable[[str], None] = lambda line: None,
    step: Callable[[int, int], None] = lambda done, planned: None,
) -> Diagnosis:
    """Return a `Diagnosis`: what storing parameters in `fmt` does to training, and what helps.

    Args:
        source: the parameters: anything that `parameter_leaves.leaves_of` accepts (a pytree, a
            torch state dict, a path), or an opened checkpoint. If the checkpoint's folder has a
            Megalodon's `config.json`, parameter names and shapes are checked against it.
        optimiser: the training optimiser or its name. None: that of the optimiser state stored with
            the parameters, or AdamW if there is no such state.
        settings: optimiser settings by name, such as `lr`; they override those of the stored state.
            Ignored if `optimiser` is an `Optimiser`.
        config: the Megalodon whose parameter names are expected; None uses the folder's
            `config.json`, if there is one.
        fmt: the storage format to diagnose.
        batches: data for `loss`, one entry per step, on which the source is trained; None: training
            on synthetic gradients.
        loss: (parameters, batch) -> scalar; None with batches uses a Megalodon's own loss.
        state: a further optimiser state to audit (optax, or torch's `state_dict()`).
        order: parameter names in the order in which the optimiser states number them; needed only
            if the states have no names and the order cannot be derived.
        gradients: distribution of synthetic gradients, where real ones are unknown.
        known: maps the trained parameters to their gradient statistics, as
            `known_gradients.measured` does; None derives them from the optimiser states.
        schedule: learning-rate schedule of the run; None: the optimiser's constant learning rate.
        remedies: remedies to try. Leaves whose names differ only in the layer number are one kind;
            remedies are tried on the leaf of each kind with the largest frozen fraction.
        base: base model for `source`, in any form that `leaves_of` accepts, if `source` is a folder
            of LoRA adapters; merging the adapters is then diagnosed too.
        say: called with one line of progress text at each stage.
        step: called as (finished units of work, all units), for a progress bar.

    Raises:
        FileNotFoundError: the path holds no checkpoint.
        ValueError: there is nothing to train; parameter names or gradients belong to another model;
            the optimiser or one of its settings is unknown; batches come without a loss for a model
            that is no Megalodon; an order was given but the checkpoint has no optimiser state; or a
            numbered optimiser state fits the parameters in several ways.
    """
    clock = time.perf_counter()
    files, leaves = _expected_leaves(source, config)
    # Merging runs first: adapters of another base model should fail before the slow stages.
    merging = _of_adapters(files.folder if files else source, base, fmt)
    if order is not None and not (files and files.states):
        raise ValueError(
            "an order of parameters was given, but the checkpoint has no optimiser state to apply "
            "it to: leave out --order (order=), or name a checkpoint with its optimiser state."
        )
    states = read_states(files.states, leaves, _order(files, order)) if files else []
    if known is None and batches is None:
        for each in states:
            each.check_settled()
    leaves = {n: leaf for n, leaf in leaves.items() if not any(n in s.copies for s in states)}
    rule, whose = optimiser, ""
    if not isinstance(rule, Optimiser):
        rule, whose = trained_by(states, rule, **(settings or {}))
    findings = _audited(states, state, rule)
    if not leaves:
        if not findings:
            raise ValueError(
                "the checkpoint has no parameters, and its optimiser state holds no moments, as "
                "before the first step: name a checkpoint that was saved while training."
            )
        basis = [
            *_taken(files, states, ()),
            f"No parameters here, the optimiser state alone; {rule.describe()}.",
        ]
        return Diagnosis(ranked(findings, {}), {}, {}, {}, basis, time.perf_counter() - clock)
    # Progress: reading dominates for a large model, the three later stages for a small one.
    stage = max(10, 2 * len(leaves) // 5)
    planned = len(leaves) + 3 * stage
    trainable = {n: leaf for n, leaf in leaves.items() if leaf.floating}
    push, used = _pushes(known, states, trainable)
    for each in (use for use in used if use.unused):
        say(each.describe())
    walk = _walk(leaves, rule, push, lambda done: step(done, planned))
    leaves, findings = walk.leaves, findings + walk.findings
    say(f"training samples of {len(leaves)} leaves, in {fmt.name} and in float32")
    if batches is not None:
        narrow, control = (measure(source, batches, rule, kind, loss=loss) for kind in (fmt, None))
    else:
        narrow, control = (
            {n: o.survival() for n, o in _train(walk, rule, kind, gradients, push).items()}
            for kind in (Storage("nearest", fmt.name), FLOAT32)
        )
    step(walk.seen + stage, planned)
    worst_of_kind = _representatives(leaves, narrow)
    trials = _trials(worst_of_kind, leaves, rule, fmt, remedies, gradients, push, say)
    step(walk.seen + 2 * stage, planned)
    for name, leaf in leaves.items():
        of_kind = trials.get(kind_of(name), [])
        survivals = narrow[name], control[name]
        known_rows = push.rows.get(name) if push is not None else None
        idle = float(np.mean(known_rows.idle())) if known_rows is not None else 0.0
        findings += _leaf_findings(
            leaf, *survivals, walk.predictions[name], fmt, rule, of_kind, idle
        )
    findings += _of_megalodon(leaves) + merging
    findings += [f for each in states for f in idle_rows(each, leaves, rule, fmt)]
    whole = whole_run(
        leaves, walk.samples, rule, fmt, gradients, known=push, schedule=schedule, say=say,
        wide_moments=_wide_moments(states, leaves),
    )  # fmt: skip
    step(planned, planned)
    basis = [
        *_taken(files, states, used),
        *_basis(rule, whose, fmt, batches, gradients, push, leaves),
        *walk.left(),
        *summary_of(merging),
    ]
    basis += [line for each in states for line in each.schedule()]
    return Diagnosis(
        ranked(findings, {n: leaf.size for n, leaf in leaves.items()}), trials, worst_of_kind,
        walk.predictions, basis, time.perf_counter() - clock, whole, fmt.name,
        tuple(recipe(rule)) if _of_torch(source, files, leaves) else (), used,
    )  # fmt: skip


def _order(files: CheckpointFiles, names: Sequence[str] | None) -> ParameterOrder:
    """Return the sources from which the order of a checkpoint's parameters can be derived.

    The sources are the order in the files, if they keep the module's order; the names given by the
    user (`names`); and the folder, whose config.json may name the architecture.
    """
    return ParameterOrder(files.ordered, names, files.folder)


def _taken(
    files: CheckpointFiles | None, states: Sequence[TorchState], used: Sequence[StateUse]
) -> list[str]:
    """Return the report's lines on the parts of a checkpoint: which are used or skipped, and why.

    Empty if there is no checkpoint, since the source was a pytree or state dict.
    """
    if files is None:
        return []
    unused = "; ".join(use.describe() for use in used if use.unused)
    lines = [f"{files.summary[0].upper()}{files.summary[1:]}{unused and '; '}{unused}."]
    lines += [f"Moments of {use.place} are given to parameters {use.identified}." for use in used
              if not use.unused]  # fmt: skip
    twice = {n: first for each in states for n, first in each.copies.items()}
    shown = listed([f"{n} is {first}" for n, first in twice.items()])
    return lines + [f"Stored twice, one parameter: {shown}."] * bool(twice)


def _train(
    walk: _Walk, rule: Optimiser, storage: Storage, gradients: simulate.Gradients,
    known: KnownGradients | None,
) -> dict[str, Simulated]:  # fmt: skip
    shapes, rows = {n: leaf.shape for n, leaf in walk.leaves.items()}, known and known.rows
    return run(
        walk.samples, rule, storage, gradients, simulate.STEPS, simulate.SAMPLE, shapes, rows
    )


def _trials(
    worst_of_kind: Mapping[str, str], leaves: Mapping[str, Leaf], rule: Optimiser, fmt: Format,
    remedies: Sequence[Remedy], gradients: simulate.Gradients, known: KnownGradients | None,
    say: Callable[[str], None],
) -> dict[str, list[Trial]]:  # fmt: skip
    """Try all remedies on the worst leaf of each kind; return the trials by kind."""
    worst = {n: leaves[n] for n in worst_of_kind.values()}
    if worst:
        say(f"trying {len(remedies)} remedies on {len(worst)} kinds of leaves")
    rows = known and known.rows
    by_leaf = try_remedies(worst, rule, fmt, remedies=remedies, gradients=gradients, known=rows)
    return {kind: by_leaf[name] for kind, name in worst_of_kind.items()}


def _of_megalodon(leaves: Mapping[str, Leaf]) -> list[Finding]:
    """Return the findings on parameters that only a Megalodon has."""
    findings = []
    if any(n.endswith("cema.alpha") for n in leaves):
        of_ema = {n: x.load() for n, x in leaves.items() if ".cema." in n}
        findings += ema_pole_findings.findings(of_ema)
    if EMBEDDING in leaves:
        findings += embedding_rows.findings({EMBEDDING: leaves[EMBEDDING]})
    return findings


def _of_adapters(folder: Any, base: Any, fmt: Format) -> list[Finding]:
    """Return the findings on merging the adapters in a folder, if their base model is given."""
    return [] if base is None else list(merge_findings(folder, base, fmt))


def _of_torch(source: Any, files: CheckpointFiles | None, leaves: Mapping[str, Leaf]) -> bool:
    """Whether the source is a torch model, for which remedies in torch are shown.

    That is a mapping with torch tensors, or files that are not of a Megalodon. A Megalodon's files
    are read by JAX and torch alike.
    """
    if files is not None:
        return not is_megalodon(leaves)
    return isinstance(source, Mapping) and any(hasattr(x, "detach") for x in source.values())


def _pushes(
    known: Callable[[Mapping[str, Leaf]], KnownGradients] | None,
    states: Sequence[TorchState],
    leaves: Mapping[str, Leaf],
) -> tuple[KnownGradients | None, tuple[StateUse, ...]]:
    """Return gradient statistics (None if unknown), and the use made of each optimiser state."""
    given = known(leaves) if known is not None else None
    of_states, why = _of_states(states, leaves)
    uses = []
    for each in states:
        unused = each.problem or why
        if given is not None:
            unused = f"gradients {given.source} are used"
            if pairs := exchanged(each, leaves, given.rows):
                unused += (
                    f"; by these, {listed(pairs)} have each other's moments: check their order"
                )
        uses.append(StateUse(each.place, len(each.moments), each.identified, unused))
    return given or of_states, tuple(uses)


def _of_states(
    states: Sequence[TorchState], leaves: Mapping[str, Leaf]
) -> tuple[KnownGradients | None, str]:
    """Return gradient statistics derived from optimiser states and "", or None and the reason."""
    rows: dict[str, RowGradients] = {}
    without: list[str] = []
    for each in states:
        for name in each.moments:
            if name in leaves:
                found = each.gradients(name)
                rows |= {name: found} if found is not None else {}
                without += [name] * (found is None)
    if without := [n for n in without if n not in rows]:
        return None, f"no finite first and second moments of {listed(without)}"
    if not rows:
        return None, "it has no moments of the model's parameters"
    if any(each.problem for each in states):
        return None, "another optimiser state is not used"
    idle = [n for n in leaves if n not in rows]
    rows |= {n: nothing(leaves[n]) for n in idle}
    remark = f"Assumed untrained, since they have no optimiser state: {listed(idle)}."
    return KnownGradients(rows, "as in the optimiser state", (remark,) * bool(idle)), ""


def _wide_moments(states: Sequence[TorchState], leaves: Mapping[str, Leaf]) -> bool:
    """Whether some parameters are narrower than float32 and all moments are at least float32."""
    wide = [each.wide_moments() for each in states if each.moments]
    narrow = any(leaf.dtype not in ("float32", "float64") for leaf in leaves.values())
    return narrow and bool(wide) and all(wide)


def _audited(states: Sequence[TorchState], state: Any, rule: Optimiser) -> list[Finding]:
    """Return the findings on the checkpoint's optimiser states and on `state`, if it is given."""
    findings = [f for each in states for f in audit_torch(each)]
    if state is not None:
        beta1, beta2 = getattr(rule, "beta1", 0.9), getattr(rule, "beta2", 0.999)
        findings += audit_state(state, beta2, beta1=beta1)
    return findings


def _expected_leaves(
    source: Any, config: MegalodonConfig | None
) -> tuple[CheckpointFiles | None, dict[str, Leaf]]:
    """Return the opened checkpoint (None for a pytree) and the source's leaves by name.

    Raises:
        ValueError: the names are not those of `config`, or of the `config.json` in the folder.
    """
    files = open_checkpoint(source) if isinstance(source, (str, os.PathLike)) else None
    if isinstance(source, CheckpointFiles):
        files = source
    leaves = leaves_of(source) if files is None else dict(files.leaves)
    expected = config or (_config_beside(files.folder) if files and leaves else None)
    if expected is not None:
        check_names(leaves, expected)
        if expected.tied:
            # The head of a tied model is stored as a copy of the embedding, not a parameter.
            leaves.pop(HEAD, None)
    return files, leaves


def ranked(findings: Sequence[Finding], sizes: Mapping[str, int]) -> list[Finding]:
    """Sort findings by severity, worst first, then by the elements concerned, most first.

    Within one severity, findings on rows without a gradient come last: training does not use such
    rows.

    Args:
        findings: findings in any order.
        sizes: number of elements by parameter name; other subjects count as one element.
    """

    def weight(f: Finding) -> float:
        concerned = f.value if f.metric.endswith("_fraction") and np.isfinite(f.value) else 1.0
        return concerned * sizes.get(f.subject, 1)

    def order(f: Finding) -> tuple[float, bool, float]:
        return -f.severity.gravity(), f.metric == "idle_row_fraction", -weight(f)

    return sorted(findings, key=order)


def _config_beside(folder: Path) -> MegalodonConfig | None:
    file = folder / "config.json"
    if not file.is_file():
        return None
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{file} is not readable JSON: {error}; copy it again, or move it away to probe the "
            "checkpoint like that of any other model"
        ) from error
    ours = isinstance(fields, dict) and (
        fields.get("model_type") == "megalodon" or "cema_ndim" in fields
    )
    return read_config(file) if ours else None


@dataclass
class _Walk:
    """Results of one pass that reads all leaves: samples, predictions and findings."""

    seen: int = 0
    """Number of leaves read so far."""
    leaves: dict[str, Leaf] = field(default_factory=dict)
    """The leaves that can be probed: finite floating-point parameters with elements."""
    samples: dict[str, np.ndarray] = field(default_factory=dict)
    predictions: dict[str, dict[str, Prediction]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    others: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Names of the leaves that no optimiser updates, by dtype."""

    def left(self) -> list[str]:
        """Return a list with one line on the leaves not probed; empty if there are none."""
        kinds = [f"{len(names)} of {kind} ({listed(names)})" for kind, names in self.others.items()]
        return [f"Not probed, since no optimiser can update this type: {'; '.join(kinds)}."] * any(
            kinds
        )


def _walk(
    leaves: Mapping[str, Leaf],
    rule: Optimiser,
    known: KnownGradients | None,
    step: Callable[[int], None],
) -> _Walk:
    """Read every leaf once: sample it and predict its frozen fraction, or add a finding why not.

    `step` is called with the number of leaves read so far.

    Raises:
        ValueError: a leaf cannot be read, or none can be probed.
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
        try:
            values = leaf.load()
        except ValueError as error:
            raise ValueError(
                f"{name} cannot be read: {error}; copy the checkpoint again"
            ) from error
        if format_of(values.dtype) is None:
            values = np.asarray(values, np.float32)
        if count := int(values.size - np.count_nonzero(np.isfinite(values))):
            walk.findings.append(non_finite(name, count, leaf.size, SOURCE, ", not probed"))
        elif leaf.size:
            decay = decays(name, leaf.shape, megalodon)
            walk.leaves[name] = leaf
            walk.samples[name] = sample(values, name, simulate.SAMPLE, rule.matrix(leaf.shape))
            rows = known.rows[name] if known is not None else None
            rms, idle = (rows.rms(), rows.idle()) if rows is not None else (GRADIENT_RMS, None)
            walk.predictions[name] = predict_each(values, rule, FORMATS, decay, rms, idle)
    if not walk.leaves:
        raise ValueError(_nothing_to_probe(leaves))
    return walk


def _nothing_to_probe(leaves: Mapping[str, Leaf]) -> str:
    """Return the message of the error for a checkpoint without a leaf that can be probed."""
    shown = listed([f"{n} ({x.dtype})" for n, x in leaves.items()])
    if any(leaf.floating for leaf in leaves.values()):
        return (
            f"no finite value in {len(leaves)} tensors: {shown} are empty or hold NaN or infinity; "
            "restore an earlier checkpoint."
        )
    integers = all(leaf.dtype.startswith(("int", "uint")) for leaf in leaves.values())
    kind = "integers" if integers else "a type that no optimiser can update"
    count = "one tensor" if len(leaves) == 1 else f"{len(leaves)} tensors"
    return (
        f"found {count} of {kind}, {shown}: expected floating-point parameters, such as those of "
        "model.state_dict()."
    )


def _representatives(good: Mapping[str, Leaf], narrow: Mapping[str, Survival]) -> dict[str, str]:
    """Return the name of the leaf with the largest frozen fraction, by kind of leaf.

    Kinds of which no leaf has a frozen fraction above `FROZEN_SHARE` are left out.
    """
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
    idle: float,
) -> list[Finding]:
    stored = "stored" if leaf.dtype == fmt.name else "if it were stored"
    here = predicted[fmt.name]
    message = (
        f"{stored} in {fmt.name}, {narrow.frozen:.0%} of its {leaf.size:,} elements never move at "
        f"lr {rule.lr:g} (predicted {here.frozen:.0%}), and {narrow.fidelity:.0%} of the intended "
        f"change is applied; half of them would move from lr {here.min_lr:.1e}"
    )
    # Without any gradient (idle = 1) the trials run on weight decay alone and count all elements.
    if 0 < idle < 1:
        message += f"; {idle:.0%} have no gradient and count neither for nor against a remedy"
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
    gradients: simulate.Gradients,
    known: KnownGradients | None,
    good: Mapping[str, Leaf],
) -> list[str]:
    total = sum(leaf.size for leaf in good.values())
    sampled = sum(min(simulate.SAMPLE, leaf.size) for leaf in good.values())
    lines = [f"{len(good)} leaves, {total:,} parameters; "
             f"{rule.describe()}{whose and f', {whose}'}; storage "
             f"{fmt.name}."]  # fmt: skip
    lines.append("Predicted shares count every element.")
    if batches is None:
        lines.append(
            f"Measured: {simulate.STEPS} steps once moments have settled, on {sampled:,} elements, "
            f"at most {simulate.SAMPLE:,} of a leaf, drawn by its name; "
            f"{(known or gradients).describe()}."
        )
        lines += known.remarks if known is not None else ()
    else:
        lines.append(f"Measured: training on {len(batches)} batches.")
    lines.append(
        f"Remedies: {REMEDY_STEPS:,} steps on at most {SIZE:,} elements of the worst leaf of each "
        "kind, gradients drawn likewise; bytes per parameter leave out the optimiser's moments."
    )
    return lines
