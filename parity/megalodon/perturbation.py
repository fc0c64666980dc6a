"""Rounding perturbation of Megalodon: which values float32 rounds, and by how much.

Source: docs/parity.md "Tolerances".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from megalodon_jax.weights import Role, role_of
from parity.engine.measure.rounding_noise import UNIT_ROUNDOFF, moved, summed


def hook(rng: np.random.Generator, features: int) -> Callable[[str, Any], Any]:
    """Return a hook for the oracle that multiplies each value by `1 +- size`, with random signs.

    The size is one float32 unit roundoff. For the logits it is the rounding error (`summed`) of a
    sum over `features` terms, because `weights` perturbs a tied head only as an embedding. autograd
    can differentiate the hook.

    Args:
        rng: generator of the signs.
        features: number of features of the hidden states.
    """

    def move(name: str, value: Any) -> Any:
        size = summed(features) if name == "logits" else UNIT_ROUNDOFF
        return value * (1 + size * (2 * rng.integers(0, 2, np.shape(value), np.int8) - 1.0))

    return move


def weights(named: Mapping[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return every weight in float64, perturbed with random signs by the size from `of_weight`."""
    return {n: moved(w.astype(np.float64), rng, of_weight(n, w.shape)) for n, w in named.items()}


def of_weight(name: str, shape: tuple[int, ...]) -> float:
    """Return the relative perturbation of a weight.

    A linear weight is perturbed by the rounding error (`summed`) of a sum of as many terms as it
    has columns, any other by one unit roundoff. The embedding gets one unit roundoff even where it
    is also the (tied) head: the rounding of the logits' sums is applied to the logits (`hook`).

    Args:
        name: parameter by torch name.
        shape: shape of the parameter; the last axis is the one that a linear layer sums over.
    """
    return summed(shape[-1]) if role_of(name) is Role.LINEAR else UNIT_ROUNDOFF
