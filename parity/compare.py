"""The comparer: two sets of named arrays in, measurements out; blind to where they came from.

Everything is computed in float64. Unknown is never equal: NaN on either side, a missing or extra
tensor, another shape or dtype, no tolerance, and nothing to compare all fail. Source:
spec/parity.md "Metrics" and "Fail closed".
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parity.cases import Case
from parity.results import Kind, Measurement, Verdict
from parity.taps import COTANGENT, computed
from parity.tolerances import NoiseFloors, rule

METRICS_VERSION = 1
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Comparison:
    """One edge of the triangle for one case: names what is compared with what, and how tightly."""

    case: Case
    edge: str
    floors: NoiseFloors
    dtype: str
    """The dtype the left side must have."""
    device: str = "cpu"
    only_valid: bool = False
    """Compare activations at valid positions only: masked ones mean something else there."""

    def run(self, actual: Arrays, expected: Arrays) -> list[Measurement]:
        """Compare `actual` with `expected` by name; errors are relative to `expected`."""
        names = self._ordered(set(actual) | set(expected))
        rows = [m for name in names for m in self._quantity(name, actual, expected)]
        if not rows:
            rows = [self._failure("nothing", "zero comparisons: both sides are empty")]
        return rows

    def accuracy(self, actual: Arrays, reference: Arrays, truth: Arrays) -> list[Measurement]:
        """Measure `actual`'s error against the truth over the reference's error against it."""
        errors = {name: self._errors(name, actual, reference, truth) for name in truth}
        rows = [
            self._ratio(name, *errors[name])
            for name in self._ordered(set(truth))
            if kind_of(name) in (Kind.LOGITS, Kind.BLOCK, Kind.LOSS)
        ]
        gradients = [errors[name] for name in truth if name.startswith("grad/")]
        if not gradients:
            return rows
        ours, theirs = (float(np.sqrt(np.mean(np.square(e)))) for e in zip(*gradients, strict=True))
        return [*rows, self._ratio("grad/*", ours, theirs)]

    def _errors(self, name: str, actual: Arrays, reference: Arrays, truth: Arrays):
        if name not in actual or name not in reference:
            return math.nan, math.nan
        expected = self._select(name, truth[name])
        return tuple(
            relative_l2(self._select(name, side[name]), expected) for side in (actual, reference)
        )

    def _ratio(self, name: str, ours: float, theirs: float) -> Measurement:
        row = rule(self.edge, kind_of(name), "error_over_reference")
        bound = math.nan if row is None else row.absolute
        return self._gate(name, "error_over_reference", ours / max(theirs, 2e-7), bound)

    def _quantity(self, name: str, actual: Arrays, expected: Arrays) -> list[Measurement]:
        for side, arrays in zip(self.edge.split(":"), (actual, expected), strict=True):
            if name not in arrays:
                return [self._failure(name, f"missing in {side}")]
        left, right = np.asarray(actual[name]), np.asarray(expected[name])
        if left.shape != right.shape:
            return [self._failure(name, f"shape {left.shape}, expected {right.shape}")]
        if left.dtype.name != self.dtype:
            return [self._failure(name, f"dtype {left.dtype.name}, expected {self.dtype}")]
        a, b = (self._select(name, x).astype(np.float64) for x in (left, right))
        kind = kind_of(name)
        bound = self.floors.bound(self.edge, kind, self.case, name)
        rows = [self._gate(name, "rel_l2", relative_l2(a, b), bound)]
        if math.isnan(rows[0].value):
            return rows
        details = {"max_abs": max_abs(a, b), "cosine": cosine(a, b)}
        if kind is Kind.LOGITS:
            details |= logit_metrics(a, b, self._labels())
        return rows + [self._row(name, m, v, math.nan, Verdict.INFO) for m, v in details.items()]

    def _gate(self, name: str, metric: str, value: float, bound: float) -> Measurement:
        note = "" if not math.isnan(bound) else "no tolerance: calibrate this case"
        if math.isnan(value):
            note = "not a number on at least one side"
        # Written so that NaN on either side of the comparison fails.
        verdict = Verdict.PASS if value <= bound else Verdict.FAIL
        return self._row(name, metric, value, bound, verdict, note)

    def _failure(self, name: str, note: str) -> Measurement:
        return self._row(name, "rel_l2", math.inf, math.nan, Verdict.FAIL, note)

    def _row(self, name, metric, value, tolerance, verdict, note="") -> Measurement:
        order = computed(self.case.config)
        parts = (self.case.hash, self.edge, name, metric, METRICS_VERSION, self.device)
        return Measurement(
            case=self.case.name,
            edge=self.edge,
            quantity=name,
            kind=kind_of(name),
            stage=order.index(name) if name in order else -1,
            metric=metric,
            value=float(value),
            tolerance=float(tolerance),
            verdict=verdict,
            dtype=self.dtype,
            device=self.device,
            identity=hashlib.sha256(repr(parts).encode()).hexdigest()[:16],
            note=note,
        )

    def _select(self, name: str, array: np.ndarray) -> np.ndarray:
        is_activation = name != "loss" and not name.startswith("grad/")
        if self.only_valid and is_activation:
            return np.asarray(array)[self.case.batch.mask]
        return np.asarray(array)

    def _labels(self) -> np.ndarray:
        """Next-token labels at the positions compared, -100 where there is none."""
        labels = np.full_like(self.case.batch.labels, -100)
        labels[:, :-1] = self.case.batch.labels[:, 1:]
        return self._select("logits", labels)

    def _ordered(self, names: set[str]) -> list[str]:
        order = {name: i for i, name in enumerate(computed(self.case.config))}
        return sorted(names, key=lambda n: (order.get(n, len(order)), n))


def kind_of(quantity: str) -> Kind:
    """Return the family of a quantity by its name."""
    if quantity.startswith(("grad/", COTANGENT)):
        return Kind.GRADIENT
    if quantity.startswith("state/"):
        return Kind.STATE
    named = {"logits": Kind.LOGITS, "loss": Kind.LOSS, "generated": Kind.TOKENS}
    return named.get(quantity, Kind.BLOCK)


def relative_l2(actual: np.ndarray, expected: np.ndarray) -> float:
    """`|a - e| / |e|` in float64; NaN if either holds a non-finite value, inf off a zero `e`."""
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if not (np.isfinite(a).all() and np.isfinite(e).all()):
        return math.nan
    difference, scale = float(np.linalg.norm(a - e)), float(np.linalg.norm(e))
    if scale == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / scale


def max_abs(a: np.ndarray, e: np.ndarray) -> float:
    """Largest absolute difference; NaN spreads."""
    return float(np.max(np.abs(a - e), initial=0.0))


def cosine(a: np.ndarray, e: np.ndarray) -> float:
    """Cosine of the angle between the flattened arrays; NaN where one of them is zero."""
    scale = float(np.linalg.norm(a) * np.linalg.norm(e))
    return float(np.vdot(a, e)) / scale if scale > 0 else math.nan


def logit_metrics(a: np.ndarray, e: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """What the difference means to a reader of logits (..., V), `e` being the truth.

    Returns:
        kl_p50, kl_max: KL(e || a) per token, in nats. top1_agreement: share of tokens with the same
        argmax. top1_flips: disagreements where the truth's margin exceeds twice the largest
        difference at that token, which rounding cannot explain. nll_difference: difference of the
        mean negative log-likelihood of `labels` (-100 is ignored), in nats.
    """
    a, e = a.reshape(-1, a.shape[-1]), e.reshape(-1, e.shape[-1])
    log_a, log_e = log_softmax(a), log_softmax(e)
    kl = np.sum(np.exp(log_e) * (log_e - log_a), axis=-1)
    same = a.argmax(-1) == e.argmax(-1)
    ranked = np.sort(e, axis=-1)
    margin = ranked[:, -1] - ranked[:, -2]
    clear = margin > 2 * np.max(np.abs(a - e), axis=-1)
    flat = labels.reshape(-1)
    rows = np.nonzero(flat != -100)[0]
    nll = (log_e - log_a)[rows, flat[rows]]
    return {
        "kl_p50": float(np.median(kl)),
        "kl_max": float(np.max(kl)),
        "top1_agreement": float(np.mean(same)),
        "top1_flips": float(np.sum(~same & clear)),
        "nll_difference": float(np.mean(nll)) if len(rows) else 0.0,
    }


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Log-softmax over the last axis in the dtype of `x`."""
    shifted = x - np.max(x, axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))
