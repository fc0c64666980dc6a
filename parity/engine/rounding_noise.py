"""What rounding to float32 does, as random signs in float64; a few rows of a tensor at a time.

Every weight, every named intermediate and every stored state is moved by one unit roundoff, up or
down. The rounding inside a sum is not a named intermediate: the weights of a product over K
features move by what adding K numbers one after another in float32 loses. The response of a program
in float64 is the noise floor. Source: docs/parity.md "Tolerances".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from parity.engine.metrics import relative_l2

UNIT_ROUNDOFF = 2.0**-24
SEEDS = 10
BLOCK = 1 << 20
"""Elements handled at once when a tensor is walked through by rows."""

Arrays = Mapping[str, np.ndarray]


def responses(
    exact: Arrays, run: Callable[[np.random.Generator], Arrays], seeds: int = SEEDS
) -> dict[str, tuple[float, ...]]:
    """Return the relative L2 response of every quantity, seed by seed.

    Args:
        exact: what nothing was moved in.
        run: computes the same with everything moved by the signs of a generator.
        seeds: how often.
    """
    found: dict[str, list[float]] = {name: [] for name in exact}
    for seed in range(seeds):
        noisy = run(np.random.default_rng(seed))
        for name, value in exact.items():
            found[name].append(relative_l2(noisy[name], value))
    return {name: tuple(values) for name, values in found.items()}


def floor(values: Sequence[float]) -> float:
    """Return the noise floor of a quantity: the root mean square of its responses."""
    return math.sqrt(sum(value**2 for value in values) / len(values))


def floors(
    exact: Arrays, run: Callable[[np.random.Generator], Arrays], seeds: int = SEEDS
) -> dict[str, float]:
    """Return the floor of every quantity; arguments as of `responses`."""
    return {name: floor(values) for name, values in responses(exact, run, seeds).items()}


def moved(
    value: np.ndarray, rng: np.random.Generator, roundoff: float = UNIT_ROUNDOFF
) -> np.ndarray:
    """Return a float64 array times `1 +- roundoff`, signs at random."""
    if not value.shape:
        return np.asarray(value * (1 + roundoff * (2 * rng.integers(0, 2) - 1.0)))
    result = np.empty_like(value)
    for rows in row_blocks(value.shape):
        signs = rng.integers(0, 2, value[rows].shape, np.int8)
        np.multiply(value[rows], 1 + roundoff * (2 * signs - 1.0), out=result[rows])
    return result


def summed(terms: int) -> float:
    """Return the relative error of a sum of `terms` numbers of random sign in float32.

    Relative to the root of the sum of their squares. After k terms the partial sum is sqrt(k) of
    them, and rounding it loses 0.18 u^2 of its square on average (a rounding error is uniform, a
    leading digit logarithmic); u^2 is added for the rounding of the numbers themselves.
    """
    return UNIT_ROUNDOFF * math.sqrt(1 + terms / 11)


def row_blocks(shape: tuple[int, ...], elements: int = BLOCK) -> Iterator[slice]:
    """Yield slices of the first axis that hold at most about `elements` each."""
    count = shape[0] if shape else 1
    step = max(1, elements // max(1, math.prod(shape[1:])))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
