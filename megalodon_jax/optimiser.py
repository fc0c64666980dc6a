"""Helpers for optax: weight-decay mask, and updates under strict dtype promotion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from megalodon_jax.roles import Role, dotted, role_of

if TYPE_CHECKING:
    import optax


def optimiser_update(
    transform: optax.GradientTransformation, gradients: Any, state: Any, params: Any, **extra: Any
) -> tuple[Any, Any]:
    """Return `transform.update(gradients, state, params, **extra)`: updates to add, and the state.

    optax multiplies floats by its integer step count, which `jax_numpy_dtype_promotion="strict"`
    forbids. So standard promotion is enabled for the duration of the call.
    """
    with jax.numpy_dtype_promotion("standard"):
        return transform.update(gradients, state, params, **extra)


def decay_mask(params: Any) -> Any:
    """Return, for each leaf, whether weight decay applies: to matrices of linear maps and adapters.

    It does not apply to norms, biases, gains, the EMA, or the embedding and head, whose magnitudes
    have a meaning. The mask goes by names, so it is also correct for stacked layers, whose vectors
    have two axes. For `mask=` of `optax.adamw`, `optax.add_decayed_weights` and others.

    Args:
        params: a model, or a pytree whose leaves have the names of its parameters.
    """

    def decays(path: Any, _: Any) -> bool:
        return role_of(dotted(path)) in (Role.LINEAR, Role.LORA)

    return jax.tree_util.tree_map_with_path(decays, params)
