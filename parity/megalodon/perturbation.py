"""Which of Megalodon's numbers float32 rounds, and by how much: what a rounding perturbation moves.

Source: docs/parity.md "Tolerances".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from megalodon_jax.weights import Role, role_of
from parity.engine.rounding_noise import UNIT_ROUNDOFF, moved, summed


def hook(rng: np.random.Generator, features: int) -> Callable[[str, Any], Any]:
    """Return a hook for the oracle that moves what passes, also while it is being differentiated.

    Args:
        rng: where the signs come from.
        features: of the hidden states. The tied head moves as the embedding it is, so what the sum
            of the logits loses is put on the logits.
    """

    def move(name: str, value: Any) -> Any:
        size = summed(features) if name == "logits" else UNIT_ROUNDOFF
        return value * (1 + size * (2 * rng.integers(0, 2, np.shape(value), np.int8) - 1.0))

    return move


def weights(named: Mapping[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return every weight in float64, moved as `of_weight` says."""
    return {n: moved(w.astype(np.float64), rng, of_weight(n, w.shape)) for n, w in named.items()}


def of_weight(name: str, shape: tuple[int, ...]) -> float:
    """Return by how much a weight moves: as a product over its columns, or as itself.

    The embedding moves as itself, also where it is the head: what the sum of the logits loses is
    put on the logits.
    """
    return summed(shape[-1]) if role_of(name) is Role.LINEAR else UNIT_ROUNDOFF
