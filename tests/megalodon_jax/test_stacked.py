"""A model that holds its layers side by side, and back."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from megalodon_jax import MegalodonForCausalLM, traced_checks
from megalodon_jax.convert import state_dict
from megalodon_jax.optimiser import optimiser_update
from megalodon_jax.sharding.rules import partition_specs
from megalodon_jax.stacked import stack_layers, unstack_layers
from megalodon_jax.weights import abstract_model, named_leaves
from tests.helpers import model_of, tiny

CONFIG = tiny(num_layers=3, rescale_nffn=True)
ADAMW = optax.adamw(1e-3)


@pytest.fixture(scope="module")
def model() -> MegalodonForCausalLM:
    return model_of(CONFIG)


def test_layers_are_the_first_axis_of_every_parameter_and_come_back_as_they_were(model) -> None:
    stacked = stack_layers(model)
    leaves, expected = named_leaves(stacked), named_leaves(model)
    for i in range(CONFIG.num_layers):
        part = f"model.layers.{i}."
        names = [n for n in expected if n.startswith(part)]
        assert names
        for name in names:
            held = leaves[name.replace(part, "model.layers.block.")]
            assert np.array_equal(held[i], expected[name]), name
    assert len(stacked.model.layers) == CONFIG.num_layers
    # Leaves and what is static: the scale of the sum is another one in every layer.
    assert eqx.tree_equal(unstack_layers(stacked), model)
    scales = [layer.ffn.scale for layer in unstack_layers(stacked).model.layers]
    assert scales == [layer.ffn.scale for layer in model.model.layers]
    assert len(set(scales)) == CONFIG.num_layers
    # What is stacked, or is not, stays as it is.
    assert eqx.tree_equal(stack_layers(stacked), stacked)
    assert unstack_layers(model) is not None
    assert eqx.tree_equal(unstack_layers(model), model)


def test_an_optimiser_state_goes_the_same_way(model) -> None:
    params = eqx.filter(model, eqx.is_array)
    state = ADAMW.init(params)
    # Values that tell layers apart: a step with the parameters for gradients.
    _, state = optimiser_update(ADAMW, params, state, params)
    stacked_params = eqx.filter(stack_layers(model), eqx.is_array)
    assert jax.tree.structure(stack_layers(state)) == jax.tree.structure(ADAMW.init(stacked_params))
    assert eqx.tree_equal(unstack_layers(stack_layers(state)), state)
    assert not eqx.tree_equal(unstack_layers(stack_layers(ADAMW.init(params))), state)


def test_names_of_torch_are_those_of_the_layers_one_by_one(model) -> None:
    expected, tensors = state_dict(model), state_dict(stack_layers(model))
    assert tensors.keys() == expected.keys()
    assert all(np.array_equal(tensors[name], expected[name]) for name in expected)


def train_step_operations(num_layers: int, stacked: bool) -> int:
    """How many operations a traced training step with AdamW has."""
    model = model_of(tiny(num_layers=num_layers, scan_layers=True))
    model = stack_layers(model) if stacked else model
    ids = jnp.ones((1, 6), jnp.int32)

    def step(model, state, ids):
        gradients = eqx.filter_grad(lambda m: m.compute_loss(ids, ids))(model)
        params = eqx.filter(model, eqx.is_array)
        updates, state = optimiser_update(ADAMW, gradients, state, params)
        return eqx.apply_updates(model, updates), state

    with traced_checks(False):
        state = ADAMW.init(eqx.filter(model, eqx.is_array))
        program, *_ = eqx.filter_make_jaxpr(step)(model, state, ids)
        return str(program).count(" = ")


def test_a_training_step_does_not_grow_with_the_depth() -> None:
    few, many = (train_step_operations(n, stacked=True) for n in (2, 5))
    assert few == many
    # The control: stacked inside of the call, every layer is cut out and updated by itself.
    assert train_step_operations(5, stacked=False) > many


def test_what_cannot_be_stacked_is_said(model) -> None:
    mixed = abstract_model(tiny(num_layers=3, gemm_backend={"model.layers.2.*": "mxfp8"}))
    with pytest.raises(ValueError, match="layer 2 differs from layer 0"):
        eqx.filter_eval_shape(stack_layers, mixed)
    for change in (stack_layers, unstack_layers):
        with pytest.raises(ValueError, match=f"{change.__name__}: .*got dict without one"):
            change({"weight": jnp.zeros(3)})
    mesh = jax.sharding.AbstractMesh((2,), ("tensor",))
    with pytest.raises(ValueError, match="stack_layers"):
        partition_specs(stack_layers(model), mesh)
