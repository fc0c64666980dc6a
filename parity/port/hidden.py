"""Separate comparison of the small elements of an array, whose errors its large elements hide.

A relative L2 bound `b` lets every element pass whose magnitude is below `b` times the norm: next to
one element of 1e20, all other elements may be wrong. So the elements below that limit are compared
again without the large ones, which gives them a smaller bound, and those below the smaller bound
again, until none is left or the bound falls by less than half.

Source: docs/your-own-port.md "Elements that large ones hide".
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from parity.engine.measure.arrays import Arrays
from parity.port_tolerances import NARROWING, STUDENT

# A fused kernel such as GELU, x / 2 * (1 + erf(...)), loses digits to the 1 where the sum is 1e-14;
# perturbing its inputs and result does not show that. For |x| below 10 the factor x / 2 is below
# 5, and there are 2 or 3 roundings.
ROUNDINGS = 16
"""Absolute error that passes in any hidden element, in unit roundoffs of the number 1."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """A group of hidden elements: all elements of an array whose magnitude is below a limit.

    An element is hidden if it is too small for an error in it to break the bound of the array.

    Attributes:
        count: number of elements of the group.
        below: upper limit of their magnitudes.
        error: L2 norm of the difference of both sides over these elements.
        bound: largest L2 norm of the difference over these elements that passes.
    """

    count: int
    below: float
    error: float
    bound: float

    @property
    def fraction(self) -> float:
        """Error over bound; above 1 the elements fail."""
        return self.error / self.bound

    def text(self) -> str:
        """Describe the error in one sentence, with the bound."""
        return (
            f"{self.count} elements below {self.below:.1e}, which larger ones hide, are off by "
            f"{self.error:.1e} (L2), and rounding explains {self.bound:.1e}"
        )


@dataclass
class Squares:
    """Mean square of each element's change under rounding, by quantity."""

    sums: dict[str, np.ndarray] = field(default_factory=dict)
    seeds: int = 0

    def add(self, exact: Arrays, moved: Arrays) -> None:
        """Add the squared change of each element between an unperturbed run and one more perturbed
        run (`moved`)."""
        self.seeds += 1
        for name, value in exact.items():
            # An infinity is a mask; its change is irrelevant.
            counts = np.isfinite(value)
            with np.errstate(invalid="ignore", over="ignore"):
                apart = np.where(counts, moved[name] - value, 0.0)
                # NumPy returns a scalar, not an array, for 0-d inputs.
                square = np.asarray(np.square(apart))
            if name in self.sums:
                self.sums[name] += square
            else:
                self.sums[name] = square

    def mean(self) -> dict[str, np.ndarray]:
        """Return the mean square of each element's change, by quantity."""
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
    """Return the group of hidden elements whose error is largest relative to the group's bound;
    None if nothing is hidden.

    An element is hidden if it is too small for an error in it to break the bound of the array.

    Args:
        actual: any shape, finite.
        expected: the same shape, finite; the float64 values if a float64 run exists.
        bound: largest L2 norm of the difference over all elements that passes.
        absolute: largest relative L2 error of a subset that passes whatever its noise floor.
        factor: multiple of the noise floor that passes on the whole array.
        mean_squares: square of the noise floor of each element, in the same shape.
        float64: whether both sides computed in float64.
    """
    sizes, apart = np.abs(expected), np.abs(actual - expected)
    one = ROUNDINGS * 2.0**-24 * (NARROWING if float64 else 1.0)
    worst: Hidden | None = None
    while True:
        small = sizes < bound
        count = int(small.sum())
        # If all elements are below the bound, nothing hides them: they are rounding.
        if not count or count == sizes.size:
            return worst
        norm = float(np.linalg.norm(sizes[small]))
        floor = float(np.sqrt(np.sum(mean_squares[small])))
        smaller = max(absolute * norm, STUDENT * factor * floor, one * np.sqrt(count))
        found = Hidden(count, bound, float(np.linalg.norm(apart[small])), smaller)
        if worst is None or found.fraction > worst.fraction:
            worst = found
        # Stop when the bound no longer falls by at least half; otherwise compare what is below it.
        if smaller >= bound / 2:
            return worst
        bound = smaller
