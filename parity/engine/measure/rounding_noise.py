"""Simulation of float32 rounding in float64: values are multiplied by 1 +- unit roundoff.

The signs are random. Every weight, named intermediate and stored state is perturbed. Partial sums
have no name, so the weights of a product over K features are instead perturbed by the error of
adding K numbers in float32, one after another. The change of a result is its response; the noise
floor is the root mean square of its responses over seeds. Source: docs/parity.md "Tolerances".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from parity.engine.measure.arrays import Arrays
from parity.engine.measure.metrics import relative_l2

UNIT_ROUNDOFF = 2.0**-24
"""Unit roundoff of float32."""
SEEDS = 10
"""Default number of perturbed runs."""
# Blocks bound the memory of temporary arrays.
BLOCK = 1 << 20
"""Number of elements processed at once when a tensor is traversed by rows."""


def responses(
    exact: Arrays, run: Callable[[np.random.Generator], Arrays], seeds: int = SEEDS
) -> dict[str, tuple[float, ...]]:
    """Return the relative L2 change of every quantity under perturbation, one value per seed.

    Args:
        exact: unperturbed values.
        run: computes the same quantities, perturbed with signs drawn from the generator it gets.
        seeds: number of perturbed runs; the generators are seeded with 0, 1, ...
    """
    found: dict[str, list[float]] = {name: [] for name in exact}
    for seed in range(seeds):
        noisy = run(np.random.default_rng(seed))
        for name, value in exact.items():
            found[name].append(relative_l2(noisy[name], value))
    return {name: tuple(values) for name, values in found.items()}


def floor(values: Sequence[float]) -> float:
    """Return the noise floor of a quantity: the root mean square of `values`, its relative L2
    changes under simulated rounding."""
    return math.sqrt(sum(value**2 for value in values) / len(values))


def floors(
    exact: Arrays, run: Callable[[np.random.Generator], Arrays], seeds: int = SEEDS
) -> dict[str, float]:
    """Return the relative L2 change of every quantity under rounding, as a root mean square over
    seeds; arguments as in `responses`."""
    return {name: floor(values) for name, values in responses(exact, run, seeds).items()}


def moved(
    value: np.ndarray, rng: np.random.Generator, roundoff: float = UNIT_ROUNDOFF
) -> np.ndarray:
    """Return a float64 array times `1 +- roundoff`, with a random sign for each element."""
    if not value.shape:
        return np.asarray(value * (1 + roundoff * (2 * rng.integers(0, 2) - 1.0)))
    result = np.empty_like(value)
    for rows in row_blocks(value.shape):
        signs = rng.integers(0, 2, value[rows].shape, np.int8)
        np.multiply(value[rows], 1 + roundoff * (2 * signs - 1.0), out=result[rows])
    return result


def summed(terms: int) -> float:
    """Return the expected error of a float32 sum of `terms` numbers of random sign.

    The result is the root mean square error, relative to the L2 norm of the numbers.

    After k terms the partial sum is about sqrt(k) times one term. Rounding the partial sum adds an
    error whose mean square is 0.18 u^2 times the square of the partial sum (rounding errors are
    uniformly distributed, leading digits logarithmically). u^2 is added for the rounding of the
    numbers themselves. u is the unit roundoff.
    """
    return UNIT_ROUNDOFF * math.sqrt(1 + terms / 11)


def row_blocks(shape: tuple[int, ...], elements: int = BLOCK) -> Iterator[slice]:
    """Yield consecutive slices of the first axis, of at most `elements` array elements each, but of
    at least one row.

    A 0-d array counts as one row.
    """
    count = shape[0] if shape else 1
    step = max(1, elements // max(1, math.prod(shape[1:])))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
