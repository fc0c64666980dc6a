"""One optax step under strict promotion."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from megalodon_jax.optimiser import optimiser_update


def test_a_step_is_optax_s_own_and_promotion_is_strict_again_after_it():
    params, gradients = {"w": jnp.ones(3)}, {"w": jnp.full(3, 0.5)}
    transform = optax.adamw(1e-3)
    updates, state = optimiser_update(transform, gradients, transform.init(params), params)
    with jax.numpy_dtype_promotion("standard"):
        wanted, _ = transform.update(gradients, transform.init(params), params)
    assert np.array_equal(updates["w"], wanted["w"])
    assert int(optax.tree_utils.tree_get(state, "count")) == 1
    with pytest.raises(ValueError, match="promotion"):
        jnp.ones(2, jnp.bfloat16) + jnp.ones(2, jnp.float32)


def test_further_arguments_reach_the_optimiser():
    transform = optax.with_extra_args_support(optax.sgd(1.0))
    updates, _ = optimiser_update(
        transform, jnp.ones(2), transform.init(jnp.ones(2)), jnp.ones(2), value=jnp.float32(0)
    )
    assert np.array_equal(updates, -np.ones(2))
