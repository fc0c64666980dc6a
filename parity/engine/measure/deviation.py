"""Element-by-element differences between two tensors, for inspecting a failed measurement.

Source: docs/reports.md "The page", drill-down per tensor.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from parity.engine.measure.measurement import Measurement
from parity.engine.measure.metrics import ulp
from parity.engine.measure.where import Axis, culprits, where

LOW, HIGH = -1, 52
"""Exponents of the lowest and highest bin boundary of the error histogram: 2^LOW (half a ULP) and
2^HIGH ULPs."""
# Later failures are usually consequences of the first ones.
KEPT = 12
"""Largest number of failing tensors described per case and edge."""
SHOWN = 10
"""Largest number of elements listed per tensor."""


@dataclass(frozen=True, slots=True)
class Worst:
    """One of the elements with the largest differences: its index and its value on both sides."""

    index: tuple[int, ...]
    actual: float
    expected: float


@dataclass(frozen=True)
class Shape:
    """Meaning of a tensor's axes, and which of its positions were compared.

    Attributes:
        axes: names in order; () if unknown.
        valid: booleans over the leading axes, False at padding; None: all are valid.
        compared: whether only valid positions were compared: the compared arrays then have one row
            per valid position instead of the leading axes.
    """

    axes: tuple[Axis, ...] = ()
    valid: np.ndarray | None = None
    compared: bool = False

    def where(self, differs: np.ndarray) -> str:
        """Describe where elements differ, in terms of the whole tensor's axes.

        Args:
            differs: booleans in the shape of the compared arrays.
        """
        if self.valid is None or not self.compared:
            return where(differs, self.axes, self.valid)
        whole = np.zeros((*self.valid.shape, *differs.shape[1:]), bool)
        whole[self.valid] = differs
        return where(whole, self.axes, compared=self.valid)


@dataclass(frozen=True, slots=True)
class Deviation:
    """Difference of two tensors in units in the last place (ULP) of the computed dtype."""

    case: str
    edge: str
    quantity: str
    dtype: str
    """Dtype of the left side. ULPs are those of this dtype, at the expected value."""
    shape: tuple[int, ...]
    """Shape of the compared arrays; if only valid positions were compared, (positions, ...)."""
    histogram: tuple[int, ...]
    """Counts of elements: first the equal ones; then one bin per power of 2, for errors of at most
    2^LOW, ..., 2^HIGH ULPs; then larger errors; last the elements that are not finite on either or
    both sides."""
    worst: tuple[Worst, ...]
    """At most SHOWN elements, the worst first; indices refer to the whole tensor."""
    breaking: int = 0
    """Smallest number of elements whose correction makes the tensor pass; 0 if not computed."""
    where: str = ""
    """Description of where the `breaking` elements are (`engine.measure.where`)."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Case, edge and quantity, which identify a tensor within a run."""
        return (self.case, self.edge, self.quantity)


def worst_elements(
    actual: np.ndarray, expected: np.ndarray, limit: int, positions: np.ndarray | None = None
) -> tuple[Worst, ...]:
    """Return up to `limit` elements that differ most, the worst first; equal ones are left out.

    Elements that are not finite on either side count as the worst.

    Args:
        actual: any shape.
        expected: the same shape.
        limit: largest number of elements.
        positions: if both arrays are rows selected from a larger tensor, the index of each row in
            that tensor: integers (rows, number of leading axes). Returned indices then refer to
            the whole tensor. None: the arrays are whole tensors.
    """
    apart = _apart(actual, expected).reshape(-1)
    count = min(limit, apart.size)
    # Stable, so that equal differences keep the order of the elements.
    chosen = np.argsort(-apart, kind="stable")[:count]
    out = []
    for flat in chosen[apart[chosen] > 0]:
        index = tuple(int(i) for i in np.unravel_index(flat, np.shape(expected)))
        a, e = float(np.asarray(actual)[index]), float(np.asarray(expected)[index])
        if positions is not None:
            index = (*(int(i) for i in positions[index[0]]), *index[1:])
        out.append(Worst(index, a, e))
    return tuple(out)


def histogram(actual: np.ndarray, expected: np.ndarray, dtype: str) -> tuple[int, ...]:
    """Count elements by their error in ULPs of `dtype`; bins as in `Deviation.histogram`."""
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    apart = _apart(a, e)
    equal, odd = apart == 0, np.isinf(apart)
    rest = ~(equal | odd)
    distance = np.log2(apart[rest] / ulp(e[rest], dtype))
    # Each distance is rounded up to the next power of 2.
    level = np.clip(np.ceil(distance), LOW, HIGH + 1).astype(int) - LOW
    between = np.bincount(level, minlength=HIGH - LOW + 2)
    return (int(equal.sum()), *(int(n) for n in between), int(odd.sum()))


def bits(value: float, dtype: str) -> str:
    """Return the bit pattern of a value rounded to `dtype`, in hexadecimal, big-endian."""
    with np.errstate(over="ignore"):
        stored = np.asarray(value, np.float64).astype(np.dtype(dtype))
    # NumPy has no byte order for bfloat16, so the bytes are reversed by hand.
    little = stored.tobytes() if sys.byteorder == "little" else stored.tobytes()[::-1]
    return little[::-1].hex()


@dataclass
class Deviations:
    """Collects descriptions of failing tensors, the first `KEPT` of each case and edge."""

    found: list[Deviation] = field(default_factory=list)
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of failing tensors by case and edge, including those not described."""

    def __call__(
        self,
        m: Measurement,
        actual: np.ndarray,
        expected: np.ndarray,
        positions: np.ndarray | None = None,
        named: Shape | None = None,
    ) -> None:
        """Describe the tensor of a failing measurement; arguments as for `OnFailure`."""
        self.seen[m.case, m.edge] += 1
        if self.seen[m.case, m.edge] > KEPT or m.dtype not in _DTYPES:
            return
        wrong = culprits(actual, expected, m.tolerance)
        named = named or Shape()
        self.found.append(
            Deviation(
                m.case,
                m.edge,
                m.quantity,
                m.dtype,
                np.shape(expected),
                histogram(actual, expected, m.dtype),
                worst_elements(actual, expected, SHOWN, positions),
                int(wrong.sum()),
                named.where(wrong),
            )
        )

    def __iter__(self) -> Iterator[Deviation]:
        return iter(self.found)


_DTYPES = ("float64", "float32", "bfloat16", "float16")


def _apart(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return |actual - expected| by element; infinite where either side is not finite, even if both
    sides are equal."""
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    known = np.isfinite(a) & np.isfinite(e)
    apart = np.abs(np.subtract(a, e, out=np.full(np.shape(e), math.inf), where=known))
    # NumPy returns a scalar, not an array, for 0-d inputs.
    return np.asarray(apart)
