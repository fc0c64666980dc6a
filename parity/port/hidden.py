"""The elements of a result that its largest ones hide, compared on their own.

A relative L2 bound of `b` lets every element pass whose size is below `b` times the norm: beside
one element of 1e20 a whole result of ordinary numbers may be wrong. So what is that small is
compared again without the large ones, and what is hidden among it again, until nothing is.

Source: docs/your-own-port.md "Elements that large ones hide".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from parity.port_tolerances import NARROWING, STUDENT

Arrays = Mapping[str, np.ndarray]
ROUNDINGS = 16
"""Unit roundoffs of 1 that a hidden element may be off by, whatever its size. A kernel such as that
of GELU computes 1 + erf(x) where that is 1e-14, and loses digits to the 1 that no perturbation from
outside shows: half of x below 10, times 2 or 3 roundings."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """The hidden elements that are furthest outside of what rounding explains.

    Attributes:
        count: How many elements are as small as that.
        below: Their sizes are below this.
        error: L2 norm of their difference.
        bound: Largest that passes.
    """

    count: int
    below: float
    error: float
    bound: float

    @property
    def fraction(self) -> float:
        """Error over bound; beyond 1 they fail."""
        return self.error / self.bound

    def text(self) -> str:
        """Return what is wrong, in words."""
        return (
            f"{self.count} elements below {self.below:.1e}, which larger ones hide, are off by "
            f"{self.error:.1e} (L2), and rounding explains {self.bound:.1e}"
        )


@dataclass
class Squares:
    """The mean square of the change of each element under rounding, by quantity."""

    sums: dict[str, np.ndarray] = field(default_factory=dict)
    seeds: int = 0

    def add(self, exact: Arrays, moved: Arrays) -> None:
        """Add a run that was moved by the signs of one more seed."""
        self.seeds += 1
        for name, value in exact.items():
            # An infinity masks; how far it moves is no question.
            counts = np.isfinite(value)
            with np.errstate(invalid="ignore", over="ignore"):
                apart = np.where(counts, moved[name] - value, 0.0)
                # Of scalars NumPy makes no arrays.
                square = np.asarray(np.square(apart))
            if name in self.sums:
                self.sums[name] += square
            else:
                self.sums[name] = square

    def mean(self) -> dict[str, np.ndarray]:
        """Return the mean squares."""
        return {name: np.asarray(x / self.seeds) for name, x in self.sums.items()}


def hidden(
    actual: np.ndarray,
    expected: np.ndarray,
    bound: float,
    *,
    absolute: float,
    factor: float,
    mean_squares: np.ndarray,
    float64: bool,
) -> Hidden | None:
    """Return the hidden elements that are furthest from passing; None where nothing is hidden.

    Args:
        actual: Any shape, finite.
        expected: The same shape, finite: the truth where there is one.
        bound: L2 norm of the difference that passes on all elements.
        absolute: Share of the norm of the elements that passes on any of them.
        factor: Noise floors that pass on all elements.
        mean_squares: Square of the noise floor of each element.
        float64: Whether both sides computed in float64.
    """
    sizes, apart = np.abs(expected), np.abs(actual - expected)
    one = ROUNDINGS * 2.0**-24 * (NARROWING if float64 else 1.0)
    worst: Hidden | None = None
    while True:
        small = sizes < bound
        count = int(small.sum())
        # Of all elements nothing is hidden: they are rounding.
        if not count or count == sizes.size:
            return worst
        norm = float(np.linalg.norm(sizes[small]))
        floor = float(np.sqrt(np.sum(mean_squares[small])))
        smaller = max(absolute * norm, STUDENT * factor * floor, one * np.sqrt(count))
        found = Hidden(count, bound, float(np.linalg.norm(apart[small])), smaller)
        if worst is None or found.fraction > worst.fraction:
            worst = found
        # With each round the bound falls by orders of magnitude, or nothing is left to hide.
        if smaller >= bound / 2:
            return worst
        bound = smaller
