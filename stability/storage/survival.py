"""Update survival: which parameters freeze when weights are stored in few bits.

An update u of a stored number p is lost when p + u rounds back to p. That is the case when |u| is
less than half the distance to p's neighbour in the direction of u, or exactly half and p's
significand is even. AdamW moves every element by about its learning rate, so weights at 1 freeze
in bfloat16 if lr is at most 2^-9. An element is frozen if all its updates are lost.
Source: docs/stability.md "Update survival".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtr

from stability.core.findings import RESTORE, Finding, Severity, judge, notes
from stability.core.number_formats import BF16, Format, format_of
from stability.core.parameter_leaves import Leaf, decays, is_megalodon, leaves_of, parameters_of
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
from stability.storage.training import Loss, train_stored
from stability.storage.update_rules import GRADIENT_RMS, AdamW, Optimiser, Step

FROZEN_SHARE = 0.5
"""Frozen fraction of a leaf above which it gets a warning: most of it then does not train."""
SOURCE = 'docs/stability.md "Update survival"'
REMEDY = (
    "store parameters in float32 and compute in bfloat16 (param_dtype=float32, "
    "compute_dtype=bfloat16); a larger learning rate for this group, a zero-centred "
    "parametrisation or stochastic rounding also help"
)


def half_gap(p: np.ndarray, u: np.ndarray, fmt: Format = BF16) -> np.ndarray:
    """Return half the distance from p to its neighbour in `fmt` in the direction of u, float64.

    A smaller update is lost. From a power of two, the neighbour toward zero is half as far as the
    one away from zero.

    Args:
        p: numbers of the format.
        u: updates, of which only the sign counts; its shape broadcasts with that of p.
        fmt: the storage format.
    """
    p, u = np.asarray(p, np.float64), np.asarray(u, np.float64)
    mantissa, exponent = np.frexp(np.abs(p))
    power_of_two = (mantissa == 0.5) & (exponent - 1 > fmt.min_exponent)
    inward = power_of_two & (np.sign(u) == -np.sign(p))
    return fmt.spacing(p) / np.where(inward, 4.0, 2.0)


def is_lost(p: np.ndarray, u: np.ndarray, fmt: Format = BF16) -> np.ndarray:
    """Return, for each stored number p, whether p + u rounds back to p (ties to even), bool."""
    u = np.asarray(u, np.float64)
    gap = half_gap(p, u, fmt)
    even = np.rint(np.abs(np.asarray(p, np.float64)) / fmt.spacing(p)) % 2 == 0
    return (np.abs(u) < gap) | ((np.abs(u) == gap) & even)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted effect of storage on one optimiser step of a leaf, from its stored values alone."""

    frozen: float
    """Fraction of the elements whose step is lost, averaged over steps up and down."""
    min_lr: float
    """Learning rate from which at least half of the elements move; 0 for an untrained leaf."""


def predict(
    leaf: np.ndarray,
    optimiser: Optimiser | float,
    fmt: Format = BF16,
    decay: bool = False,
    rms: float = GRADIENT_RMS,
) -> Prediction:
    """Predict which fraction of a leaf's elements loses a step, from all distinct stored values.

    Args:
        leaf: values of any shape, float32 or a narrow format.
        optimiser: determines the size of a step. A number means AdamW with that learning rate.
        fmt: the storage format.
        decay: whether weight decay applies to this leaf.
        rms: root mean square of the leaf's gradients.
    """
    return predict_each(leaf, optimiser, (fmt,), decay, rms)[fmt.name]


def predict_each(
    leaf: np.ndarray,
    optimiser: Optimiser | float,
    formats: Sequence[Format],
    decay: bool = False,
    rms: float = GRADIENT_RMS,
    idle: np.ndarray | None = None,
) -> dict[str, Prediction]:
    """Return the predictions of `predict` for several formats, by format name.

    The distinct values of a leaf in a narrow format are counted once, and converted to each format.

    Args:
        leaf, optimiser, decay, rms: as for `predict`.
        formats: the storage formats.
        idle: mask of the leaf's rows that never have a gradient, bool (rows,), or () for the whole
            leaf. Only weight decay moves such rows. None: every row has a gradient.
    """
    leaf = np.asarray(leaf)
    rule = optimiser if isinstance(optimiser, Optimiser) else AdamW(optimiser)
    parts = _parts(leaf, rule.step(leaf.shape, decay, rms), idle)
    if not parts:
        # A leaf that neither gradient nor decay moves is not trained, so no update is lost.
        return {fmt.name: Prediction(0.0, 0.0) for fmt in formats}
    own = format_of(leaf.dtype)
    counted = [(own.distinct(p) if own is not None else (p, None), step) for p, step in parts]
    return {
        fmt.name: _predict([(*fmt.distinct(*p), step) for p, step in counted], rule, fmt)
        for fmt in formats
    }


def _parts(leaf: np.ndarray, step: Step, idle: np.ndarray | None) -> list[tuple[np.ndarray, Step]]:
    """Split a leaf into at most two pairs (values, optimiser step of these values).

    The first pair has the elements with a gradient, the second those of the `idle` rows, which only
    weight decay moves. Elements that neither moves, and empty pairs, are left out.
    """
    if idle is None or not np.any(idle):
        parts = [(leaf, step)]
    else:
        rows = np.broadcast_to(idle, leaf.shape[: max(idle.ndim, 1)])
        still = leaf[rows]
        # Decay leaves a zero unchanged.
        parts = [(leaf[~rows], step), (still[still != 0], Step(0.0, False, step.decay))]
    return [(p, how) for p, how in parts if p.size and (how.size or how.decay)]


def _predict(
    parts: Sequence[tuple[np.ndarray, np.ndarray, Step]], rule: Optimiser, fmt: Format
) -> Prediction:
    total = sum(int(counts.sum()) for _, counts, _ in parts)

    def lost(factor: float) -> float:
        return sum(float(n @ _lost_share(p, step, factor, fmt)) for p, n, step in parts)

    # Bisection over a factor on the learning rate, which scales the whole step including decay.
    frozen = lost(1.0) / total
    low, high = -60.0, 60.0
    while high - low > _BISECTION:
        middle = (low + high) / 2
        if lost(2.0**middle) > FROZEN_SHARE * total:
            low = middle
        else:
            high = middle
    return Prediction(frozen, float(rule.lr * 2.0**high))


_BISECTION = 1e-3
"""Precision of `min_lr` in log2, 0.07 % of the rate: about float16's relative spacing (0.05 to
0.1 %), and finer than that of the other formats."""


def _lost_share(p: np.ndarray, step: Step, factor: float, fmt: Format) -> np.ndarray:
    """Return, for each value in p, the fraction of its steps that rounding loses, in [0, 1].

    Steps are upward and downward equally often; their size is `step` with lr times `factor`.
    """
    size, drift = step.size * factor, -step.decay * factor * p
    if not step.normal:
        return np.mean([is_lost(p, sign * size + drift, fmt) for sign in (1.0, -1.0)], axis=0)
    up, down = (half_gap(p, np.full(p.shape, sign), fmt) for sign in (1.0, -1.0))
    return ndtr((up - drift) / size) - ndtr((-down - drift) / size)


def measure(
    source: Any,
    batches: Any = None,
    optimiser: Optimiser = AdamW(),  # noqa: B008 - frozen
    fmt: Format | None = BF16,
    *,
    loss: Loss | None = None,
    gradients: Gradients = GRADIENTS,
    steps: int = STEPS,
    size: int = SAMPLE,
) -> dict[str, Survival]:
    """Measure the survival of updates: train with every leaf rounded to `fmt` after each step.

    Moments are float32. With batches, the whole pytree is trained. Without batches, a sample of
    every leaf is trained on synthetic gradients (`simulate.Gradients`), and leaves are read one at
    a time.

    Args:
        source: a pytree; without batches also a torch state dict or the path of a checkpoint. It
            is not changed.
        batches: data for the loss, one entry per step; token ids (steps, B, L) for a Megalodon.
        optimiser: the optimiser.
        fmt: storage format; None stores float32, the control.
        loss: (parameters, batch) -> scalar, for batches; None uses a Megalodon's own loss.
        gradients: distribution of synthetic gradients, if there are no batches.
        steps: optimiser steps, if there are no batches.
        size: largest number of elements sampled per leaf, if there are no batches.

    Returns:
        Survival by parameter name.

    Raises:
        ValueError: there are no leaves; a leaf holds integers, NaN or infinity; batches come
            without a loss and the source is no Megalodon; or XLA cannot convert to `fmt` here.
        RuntimeError: the compiler removed the rounding.
    """
    leaves = parameters_of(source)
    if batches is not None:
        return train_stored(source, batches, optimiser, fmt, loss)
    storage = FLOAT32 if fmt is None else Storage("nearest", fmt.name)
    outcomes = run(leaves, optimiser, storage, gradients, steps, size)
    return {n: outcome.survival() for n, outcome in outcomes.items()}


def probe(
    model: Any, batches: Any, optimiser: Optimiser, *, loss: Loss | None = None
) -> list[Finding]:
    """Train a model in bfloat16 and in float32; return findings on each leaf's frozen fraction.

    Notes give the predicted frozen fraction, the fidelities in bfloat16 and float32, and `min_lr`.
    If a leaf holds NaN or infinity, nothing is trained, and each such leaf is an error finding.

    Args:
        model: pytree of parameters.
        batches: data for the loss, one entry per step; None uses synthetic gradients.
        optimiser: the optimiser.
        loss: (parameters, batch) -> scalar; None uses a Megalodon's own loss.

    Raises:
        ValueError, RuntimeError: see `measure`.
    """
    leaves = leaves_of(model)
    spoiled = {n: count for n, leaf in leaves.items() if (count := leaf.non_finite())}
    if spoiled:
        why = "not measured: {:,} of {:,} values are NaN or infinite"
        return [
            frozen_finding(n, math.nan, why.format(k, leaves[n].size), RESTORE, Severity.ERROR)
            for n, k in spoiled.items()
        ]
    narrow = measure(model, batches, optimiser, BF16, loss=loss)
    control = measure(model, batches, optimiser, None, loss=loss)
    megalodon = is_megalodon(leaves)
    return [
        finding
        for name, leaf in leaves.items()
        for finding in survival_findings(leaf, narrow[name], control[name], optimiser, megalodon)
    ]


def frozen_finding(
    name: str, share: float, message: str, remedy: str, severity: Severity = Severity.WARNING
) -> Finding:
    """Return the finding on a leaf's frozen fraction, `share`, which is NaN if not measured."""
    threshold, metric = FROZEN_SHARE, "frozen_fraction"
    return judge(
        "survival", name, metric, share, threshold, SOURCE, message, remedy, severity=severity
    )


def survival_findings(
    leaf: Leaf, narrow: Survival, control: Survival, optimiser: Optimiser, megalodon: bool
) -> list[Finding]:
    """Return the finding on a leaf's frozen fraction, and notes with the metrics of `numbers_of`.

    Args:
        leaf: the leaf, in float32 or narrower.
        narrow: survival measured with bfloat16 storage.
        control: survival measured with float32 storage.
        optimiser: the optimiser of both runs.
        megalodon: whether names are a Megalodon's, which decides on weight decay (see `decays`).
    """
    decay = decays(leaf.name, leaf.shape, megalodon)
    predicted = predict(leaf.read(), optimiser, BF16, decay)
    message = (
        f"stored in bfloat16, {narrow.frozen:.0%} of its {leaf.size:,} elements never move at "
        f"lr {optimiser.lr:g}"
    )
    main = frozen_finding(leaf.name, narrow.frozen, message, REMEDY)
    return [main, *notes("survival", leaf.name, numbers_of(narrow, control, predicted), SOURCE)]


def numbers_of(narrow: Survival, control: Survival, predicted: Prediction) -> dict[str, float]:
    """Return, by metric: predicted frozen fraction, fidelity (narrow and float32) and `min_lr`."""
    return {
        "predicted_frozen_fraction": predicted.frozen,
        "fidelity": narrow.fidelity,
        "fidelity_float32": control.fidelity,
        "min_lr": predicted.min_lr,
    }
