"""One optax step under strict promotion, and what decays."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from megalodon_jax.lora import add_lora
from megalodon_jax.optimiser import decay_mask, optimiser_update
from megalodon_jax.roles import named_leaves
from megalodon_jax.stacked import stack_layers
from tests.helpers import model_of, tiny


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


@pytest.mark.parametrize("stacked", [False, True])
def test_matrices_of_maps_and_adapters_decay_and_nothing_else(stacked: bool):
    model = model_of(tiny(output_size=19, swiglu=True))
    model = add_lora(model, 2, alpha=1.0, targets=("*.wv",), key=jax.random.key(0))
    model = stack_layers(model) if stacked else model
    params = eqx.filter(model, eqx.is_array)
    zero = jax.tree.map(jnp.zeros_like, params)
    transform = optax.add_decayed_weights(1.0, mask=decay_mask)
    moved, _ = optimiser_update(transform, zero, transform.init(params), params)
    # Its own words for what a matrix is: two axes of features, and no table of tokens.
    maps = ("wz", "wv", "wr", "wh1", "wh2", "fc1", "fc2", "fc3")
    for name, leaf in named_leaves(moved).items():
        layer, _, kind = name.rpartition(".")
        decays = layer.endswith(maps) and kind != "bias"
        assert np.array_equal(leaf, named_leaves(params)[name] if decays else np.zeros(leaf.shape))
