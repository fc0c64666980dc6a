"""One step of an optax optimiser under strict dtype promotion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    import optax


def optimiser_update(
    transform: optax.GradientTransformation, gradients: Any, state: Any, params: Any, **extra: Any
) -> tuple[Any, Any]:
    """Return `transform.update(gradients, state, params, **extra)`: updates to add, and the state.

    optax multiplies floats by its integer step count, which `jax_numpy_dtype_promotion="strict"`
    forbids, so promotion is the standard one inside, and inside only.
    """
    with jax.numpy_dtype_promotion("standard"):
        return transform.update(gradients, state, params, **extra)
