"""Comparison of two sets of named arrays, whichever programs produced them.

Values that cannot be compared never pass. NaN on either side, a missing or extra tensor, and a
different shape or dtype fail. Without a tolerance or without elements, the result is "not
comparable".
Source: docs/parity.md "Metrics", docs/parity.md "Fail closed".
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from parity.engine.measure.arrays import Arrays
from parity.engine.measure.deviation import Shape
from parity.engine.measure.edge import Edge
from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.engine.measure.metrics import (
    disagreement,
    logit_metrics,
    relative_l2,
    tensor_metrics,
    top1_flips,
)
from parity.engine.measure.quantity import Quantity, Role, kind_of
from parity.engine.measure.where import Axis

METRICS_VERSION = 2


def unnamed(quantity: str) -> tuple[Axis, ...]:
    """Return (): the axes of no quantity have names (the default of `Work.axes`)."""
    return ()


@dataclass(frozen=True)
class Work:
    """Description of the work (inputs and weights) that both sides were given."""

    name: str
    """Name of the case, stored with every measurement."""
    hash: str
    """Hash of the inputs and weights: equal hashes mean equal work."""
    order: tuple[str, ...]
    """Names of quantities in order of computation."""
    targets: np.ndarray | None = None
    """Correct token id for every position of the logits, -100 where there is none."""
    valid: np.ndarray | None = None
    """Booleans over the leading axes of the activations, such as (batch, length): False at padding.
    None: all positions are valid."""
    suite: str = ""
    """Name of the group of cases, such as a model, stored with every measurement."""
    axes: Callable[[str], tuple[Axis, ...]] = unnamed
    """Maps the name of a quantity to its axis names; () if unknown."""


@runtime_checkable
class Bounds(Protocol):
    """Tolerances by edge (pair of runs), kind of quantity and quantity; implemented by
    `parity.engine.measure.bounds.NoiseFloors`."""

    exact_enough: ClassVar[float]
    """Relative L2 error that rounding of the result alone can cause.
    `Comparison.accuracy` divides by the reference's error, or by this value if that error is
    smaller."""
    unknown: ClassVar[str]
    """Message that follows "no tolerance: ": why a tolerance is missing, or what to do."""

    def bound(self, edge: Edge, kind: Kind, work: Work, quantity: str) -> float:
        """Return the largest relative L2 error of a quantity that passes; NaN if there is no
        tolerance."""
        ...

    def absolute(self, edge: Edge, kind: Kind, metric: str) -> float:
        """Return the largest value that passes, for a metric whose bound uses no noise floor; NaN
        if no rule applies."""
        ...


OnFailure = Callable[[Measurement, np.ndarray, np.ndarray, np.ndarray | None, Shape], None]
"""Function that receives a failing measurement.

Its arguments: the measurement; the compared elements of the left and of the right side, arrays of
one shape; if only some rows of the tensor were compared, their indices in the whole tensor,
integers of shape (rows, number of leading axes), else None; and the meaning of the axes."""


@dataclass(frozen=True)
class Comparison:
    """Settings of a comparison of two sides: their common inputs and weights (work), the pair of
    runs (edge) and the bounds of errors."""

    work: Work
    edge: Edge
    floors: Bounds
    """The tolerances by edge, kind and quantity."""
    dtype: str
    """Dtype that the left side must have."""
    device: str = "cpu"
    only_valid: bool = False
    """Whether activations are compared at valid positions only; padding may differ between programs
    without being wrong."""
    on_failure: OnFailure | None = None
    """Called for each tensor that breaks its tolerance; an example is an object of the class
    `measure.deviation.Deviations`."""
    kinds: Callable[[str], Kind] = kind_of
    """Maps the name of a quantity to its kind."""
    largest_bound: float = math.inf
    """A bound on a relative error that is this large or larger proves nothing, since an array of
    zeros has error 1: a measurement with such a bound is not a passing gate (`gate`). A gradient
    whose terms cancel, for example, can have such a bound."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """L2 norms that errors and bounds are relative to, by quantity; the default is the norm of the
    expected array."""

    def run(self, actual: Arrays, expected: Arrays) -> list[Measurement]:
        """Compare `actual` (left) with `expected` (right) by name, in order of computation.

        Each quantity gives at least one measurement; informational metrics follow its gate. Errors
        are relative to `expected`. Two empty sides give one failing measurement.
        """
        names = self._ordered(set(actual) | set(expected))
        rows = [m for name in names for m in self._quantity(name, actual, expected)]
        if not rows:
            rows = [self.missing("nothing", "zero comparisons: both sides are empty")]
        return rows

    def accuracy(self, actual: Arrays, reference: Arrays, truth: Arrays) -> list[Measurement]:
        """Return gates on the error of `actual` divided by the error of `reference`.

        Errors are relative L2 against `truth`. There is one gate for each logits or activation
        array of `truth`, and one for all gradients, if any: there, each side's error is the root
        mean square of its errors over the gradients. A gate fails if either side lacks the array.
        """
        errors = {name: self._errors(name, actual, reference, truth) for name in truth}
        rows = [
            self._ratio(name, *errors[name])
            for name in self._ordered(set(truth))
            if self.kinds(name) in (Kind.LOGITS, Kind.BLOCK)
        ]
        gradients = [errors[name] for name in truth if Quantity(name).role is Role.GRADIENT]
        if not gradients:
            return rows
        ours, theirs = (float(np.sqrt(np.mean(np.square(e)))) for e in zip(*gradients, strict=True))
        return [*rows, self._ratio(Quantity.gradient("*"), ours, theirs)]

    def gate(self, name: str, metric: str, value: float, bound: float) -> Measurement:
        """Return the measurement of a value that must be at most `bound`.

        NaN always fails. Without a finite bound, any other value is `NOT_COMPARABLE`. A relative
        error whose bound is `largest_bound` or more is `NOT_COMPARABLE` if the left side is in
        float64, and for information only if it is in lower precision, since rounding may leave no
        correct digit in, for example, the padding of a correct port.
        """
        if math.isnan(value):
            note = "not a number on at least one side"
            return self._row(name, metric, value, bound, Verdict.FAIL, note)
        if not math.isfinite(bound):
            missing = f"no tolerance: {self.floors.unknown}"
            what = missing if math.isnan(bound) else f"bound {bound}"
            note = f"not measured, {what}"
            return self._row(name, metric, value, bound, Verdict.NOT_COMPARABLE, note)
        if metric.startswith("rel_l2") and bound >= self.largest_bound:
            note = f"not measured: rounding alone may change it by {bound:.0%} of its norm"
            if self.dtype != "float64":
                return self.fact(name, metric, value, note)
            return self._row(name, metric, value, bound, Verdict.NOT_COMPARABLE, note)
        verdict = Verdict.PASS if value <= bound else Verdict.FAIL
        return self._row(name, metric, value, bound, verdict)

    def fact(self, name: str, metric: str, value: float, note: str = "") -> Measurement:
        """Return a measurement for information only, which has no tolerance."""
        return self._row(name, metric, value, math.nan, Verdict.INFO, note)

    def judged(self, name: str, metric: str, value: float) -> Measurement:
        """Return the gate on a value whose bound is a fixed number (`Bounds.absolute`), not a
        multiple of a noise floor."""
        return self.gate(
            name, metric, value, self.floors.absolute(self.edge, self.kinds(name), metric)
        )

    def unmeasured(self, name: str, note: str, metric: str = "rel_l2") -> Measurement:
        """Return the measurement, not comparable, of a quantity; the note is the reason."""
        return self._row(name, metric, math.nan, math.nan, Verdict.NOT_COMPARABLE, note)

    def missing(self, name: str, note: str, metric: str = "rel_l2") -> Measurement:
        """Return a failing measurement of a quantity that one side lacks or has in another shape or
        dtype.

        Its value is infinite; the note is the reason.
        """
        return self._row(name, metric, math.inf, math.nan, Verdict.FAIL, note)

    def _errors(self, name: str, actual: Arrays, reference: Arrays, truth: Arrays):
        if name not in actual or name not in reference:
            return math.nan, math.nan
        expected = self._select(name, truth[name])
        return tuple(
            relative_l2(self._select(name, side[name]), expected) for side in (actual, reference)
        )

    def _ratio(self, name: str, ours: float, theirs: float) -> Measurement:
        smallest = self.floors.exact_enough
        return self.judged(name, "error_over_reference", ours / max(theirs, smallest))

    def _quantity(self, name: str, actual: Arrays, expected: Arrays) -> list[Measurement]:
        if mismatch := self._mismatch(name, actual, expected):
            return [self.missing(name, mismatch)]
        sides = (np.asarray(arrays[name]) for arrays in (actual, expected))
        a, e = (self._select(name, x).astype(np.float64) for x in sides)
        if not a.size:
            why = "nothing to compare: there is no element"
            if not Quantity(name).is_activation:
                # A parameter without elements is part of a correct program, such as an adapter of
                # rank 0. An activation is not: its inputs leave nothing to compare.
                return [self.fact(name, "rel_l2", 0.0, why)]
            return [self.unmeasured(name, why)]
        error = relative_l2(a, e, self.scales.get(name))
        bound = self.floors.bound(self.edge, self.kinds(name), self.work, name)
        if self.kinds(name) is Kind.TOKENS:
            return [self.judged(name, "disagreement", disagreement(a, e))]
        rows = [self.gate(name, "rel_l2", error, bound)]
        if self.on_failure is not None and rows[0].verdict is Verdict.FAIL:
            valid = self._valid(name)
            taken = None if valid is None else np.argwhere(valid)
            self.on_failure(rows[0], a, e, taken, self._shape(name))
        if math.isnan(error):
            return rows
        facts = tensor_metrics(a, e, self.dtype)
        if self.kinds(name) is Kind.LOGITS and a.ndim:
            rows.append(self._flips(name, a, e, bound))
            if self.work.targets is not None:
                facts |= logit_metrics(a, e, self._select(name, self.work.targets))
        return rows + [self.fact(name, metric, value) for metric, value in facts.items()]

    def _mismatch(self, name: str, actual: Arrays, expected: Arrays) -> str:
        """Return why the arrays `name` of the two sides cannot be compared, as text; empty if they
        can."""
        for side, arrays in zip(self.edge.sides, (actual, expected), strict=True):
            if name not in arrays:
                return f"missing in {side}"
        left, right = np.asarray(actual[name]), np.asarray(expected[name])
        if left.shape != right.shape:
            return f"shape {left.shape}, expected {right.shape}"
        if left.dtype.name != self.dtype:
            return f"dtype {left.dtype.name}, expected {self.dtype}"
        return ""

    def _flips(self, name: str, a: np.ndarray, e: np.ndarray, bound: float) -> Measurement:
        if not math.isfinite(bound):
            # Without a finite bound no flip would ever be counted (see `top1_flips`).
            return self.unmeasured(name, "not measured, no tolerance of logits", "top1_flips")
        norm = float(np.linalg.norm(e))
        if name in self.scales and norm > 0.0:
            # The margin is relative to the norm of the logits, so convert the bound to that norm.
            bound *= self.scales[name] / norm
        return self.judged(name, "top1_flips", top1_flips(a, e, bound))

    def _row(self, name, metric, value, tolerance, verdict, note="") -> Measurement:
        order = self.work.order
        parts = (self.work.hash, str(self.edge), str(name), metric, METRICS_VERSION, self.device)
        return Measurement(
            case=self.work.name,
            edge=str(self.edge),
            quantity=str(name),
            kind=self.kinds(name),
            stage=order.index(name) if name in order else -1,
            metric=metric,
            value=float(value),
            tolerance=float(tolerance),
            verdict=verdict,
            dtype=self.dtype,
            device=self.device,
            identity=hashlib.sha256(repr(parts).encode()).hexdigest()[:16],
            note=note,
            suite=self.work.suite,
        )

    def _select(self, name: str, array: np.ndarray) -> np.ndarray:
        valid = self._valid(name)
        return np.asarray(array) if valid is None else np.asarray(array)[valid]

    def _shape(self, name: str) -> Shape:
        valid = self.work.valid if Quantity(name).is_activation else None
        return Shape(self.work.axes(name), valid, self._valid(name) is not None)

    def _valid(self, name: str) -> np.ndarray | None:
        return self.work.valid if self.only_valid and Quantity(name).is_activation else None

    def _ordered(self, names: set[str]) -> list[str]:
        order = {name: i for i, name in enumerate(self.work.order)}
        return sorted(names, key=lambda n: (order.get(n, len(order)), n))
