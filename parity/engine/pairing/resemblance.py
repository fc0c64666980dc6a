"""Resemblance of two unequal arrays: the size of the difference, the rows or columns that differ,
or a linear map between the arrays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parity.engine.measure.metrics import relative_l2
from parity.engine.pairing.fingerprints import sample_positions
from parity.engine.pairing.layouts import Layout, candidates, take
from parity.engine.pairing.value_search import SMALL, elements

SAMPLES = 512
"""Number of elements compared to choose a layout."""
# Unrelated arrays of one scale differ by 1.4, and any array differs from zeros by 1.
FAR = 0.5
"""Relative L2 difference above which two arrays count as unrelated."""
HALF = 0.5
"""Fraction of equal elements from which two arrays count as related, and fraction of an axis up to
which the differing indices are listed."""
# 64 times float32's unit roundoff of 2^-24.
ROUNDED = 2.0**-18
"""Relative L2 difference that scaling an array in float32 may cause."""
MOST_RANGES = 4
"""Largest number of index ranges that are listed."""


@dataclass(frozen=True)
class Resemblance:
    """The layout in which two arrays are nearest, and the remaining difference."""

    layout: Layout
    """Maps the source array to the target's shape."""
    distance: float
    """Relative L2 difference, over the target's norm."""
    line: tuple[float, float] | None = None
    """Factor and summand that map the source to the target up to float32 rounding; None if there is
    no such map."""
    slices: str = ""
    """Indices that contain all differences, such as `rows 3, 8:16`; empty if most indices of every
    axis differ."""

    def text(self) -> str:
        """Describe the difference, such as `is 2 times it` or `differs in rows 3, 8:16`."""
        if self.line:
            factor, summand = self.line
            plus = f" plus {summand:.6g}" if summand else ""
            return f"is {factor:.6g} times it{plus}"
        if self.slices:
            return f"differs in {self.slices}"
        if not self.distance:
            # Larger arrays, and those of matched modules, are paired by their values before.
            return "equal values, but the modules of the two have other partners"
        return f"differs in value by {self.distance:.1e} (relative L2)"


def resemblance(source: np.ndarray, target: np.ndarray) -> Resemblance | None:
    """Return how two unequal arrays of one size differ in their best layout (reshape and
    transposition); None if they are unrelated.

    Args:
        source: array of the original.
        target: array of the port.
    """
    positions = sample_positions(target.size, SAMPLES)
    wanted = elements(target, positions)
    best, layout = (0.0, -np.inf), None
    for candidate in candidates(tuple(source.shape), tuple(target.shape)):
        values = take(candidate, source, positions)
        if (line := straight_line(values, wanted)) and straight_line(candidate(source), target):
            return Resemblance(candidate, relative_l2(candidate(source), target), line)
        equal = float(np.mean(values == wanted))
        # A distance of NaN counts as no resemblance.
        apart = relative_l2(values, wanted)
        score = (equal if equal >= HALF else 0.0, -apart if apart <= FAR else -np.inf)
        if score > best:
            best, layout = score, candidate
    if layout is None:
        return None
    laid = layout(source)
    slices = differing_slices(laid, target)
    distance = relative_l2(laid, target)
    if not slices and not distance <= FAR:
        return None
    return Resemblance(layout, distance, slices=slices)


def straight_line(x: np.ndarray, y: np.ndarray) -> tuple[float, float] | None:
    """Return factor and summand that map `x` to `y` up to float32 rounding.

    None if there are none, if they are 1 and 0, or if the arrays have at most `SMALL` elements.
    Examples: a scale of queries multiplied into their weights; a norm's scale stored minus 1.
    """
    x, y = (np.asarray(array, np.float64).reshape(-1) for array in (x, y))
    if x.size <= SMALL or not (np.isfinite(x).all() and np.isfinite(y).all()):
        return None
    apart, spread = x - x.mean(), float(np.square(x - x.mean()).sum())
    factor = float(apart @ y / spread) if spread else 0.0
    summand = float(y.mean() - factor * x.mean())
    # A summand within the rounding of the sum counts as 0.
    summand = 0.0 if abs(summand) <= ROUNDED * float(np.abs(y).max()) else summand
    if not factor or (abs(factor - 1) <= ROUNDED and not summand):
        return None
    return (factor, summand) if relative_l2(factor * x + summand, y) <= ROUNDED else None


def differing_slices(x: np.ndarray, y: np.ndarray) -> str:
    """Return the indices along one axis that contain all differences, as text.

    Empty if most indices of every axis differ. A single element is named by its index.
    """
    differs = (x != y) & ~((x != x) & (y != y))
    if differs.sum() == 1:
        return f"one element, {[int(i) for i in np.argwhere(differs)[0]]}"
    best: tuple[float, str] = (HALF, "")
    for axis in range(x.ndim):
        others = tuple(other for other in range(x.ndim) if other != axis)
        where = np.flatnonzero(differs.any(axis=others))
        share = len(where) / x.shape[axis]
        if x.shape[axis] > 1 and (share < best[0] or (share <= HALF and not best[1])):
            best = (share, f"{_axis_name(axis, x.ndim)} {ranges(where.tolist())}")
    return best[1]


def ranges(indices: Sequence[int]) -> str:
    """Return sorted indices as text such as `3, 8:16` (8 to 15); after `MOST_RANGES` ranges the
    text ends in "and N more"."""
    texts = []
    for _, group in itertools.groupby(enumerate(indices), key=lambda entry: entry[1] - entry[0]):
        run = [index for _, index in group]
        texts.append(str(run[0]) if len(run) == 1 else f"{run[0]}:{run[-1] + 1}")
    more = len(texts) - MOST_RANGES
    return ", ".join(texts[:MOST_RANGES]) + (f" and {more} more" if more > 0 else "")


def _axis_name(axis: int, ndim: int) -> str:
    if ndim == 1:
        return "elements"
    return {0: "rows", 1: "columns"}[axis] if ndim == 2 else f"indices of axis {axis}:"
