"""A model that holds its layers side by side, and back."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from megalodon_jax import MegalodonForCausalLM, ModelCache, traced_checks
from megalodon_jax.checkpoint import save_checkpoint
from megalodon_jax.convert import state_dict
from megalodon_jax.optimiser import optimiser_update
from megalodon_jax.precision import audit_rounded_values
from megalodon_jax.roles import Role, replace_leaves, role_of
from megalodon_jax.sharding import partition_specs, shard_state
from megalodon_jax.stacked import stack_layers, unstack_layers
from megalodon_jax.weights import abstract_model, named_leaves
from tests.helpers import model_of, rel_l2, rounding_bound, tiny, tokens

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


def moved(model, mask) -> dict[str, bool]:
    """Which parameters a step of AdamW moves that has no gradients: those it decays."""
    transform = optax.adamw(1.0, weight_decay=0.1, mask=mask)
    params = eqx.filter(model, eqx.is_array)
    nothing = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimiser_update(transform, nothing, transform.init(params), params)
    return {name: bool(np.any(x)) for name, x in named_leaves(updates).items()}


def test_what_decays_by_role_decays_stacked_and_what_goes_by_axes_does_not(model) -> None:
    def by_role(params):
        linear = {n: role_of(n) is Role.LINEAR for n in named_leaves(params)}
        return replace_leaves(params, linear)

    def by_axes(params):
        return jax.tree.map(lambda x: x.ndim >= 2, params)

    layer, norm = "model.layers.{}.attn.wz.weight", "model.layers.{}.ffn.norm.weight"
    for mask, norms in ((by_role, False), (by_axes, True)):
        one, all_ = moved(model, mask), moved(stack_layers(model), mask)
        assert (one[layer.format(0)], all_[layer.format("block")]) == (True, True)
        # The control: a vector of every layer is a matrix.
        assert (one[norm.format(0)], all_[norm.format("block")]) == (False, norms)


def test_a_layer_that_carries_nothing_starts_where_the_others_go_on() -> None:
    """One by one each layer has its own cache; a loop has one kind."""
    model = model_of(tiny(num_layers=2))
    ids = jnp.asarray(tokens(model.config, (2, 6)))
    with traced_checks(False):
        read = eqx.filter_jit(lambda m, i, c: m(i, cache=c, return_cache=True))
        held = read(model, ids[:, :-1], None)[1]
        first = ModelCache((None, *held.layer_caches[1:]), held.final_norm)
        expected, found = (read(m, ids[:, -1:], first) for m in (model, stack_layers(model)))
        whole = read(model, ids[:, -1:], held)[0]
        bound = rounding_bound(lambda m, c: read(m, ids[:, -1:], c)[0], model, first)
    assert rel_l2(found[0], expected[0]) <= bound
    assert jax.tree.structure(found[1]) == jax.tree.structure(expected[1])
    assert rel_l2(whole, expected[0]) > bound


def test_what_cannot_be_stacked_is_said(model) -> None:
    mixed = model_of(tiny(num_layers=3, gemm_backend={"model.layers.2.*": "mxfp8"}))
    with pytest.raises(ValueError, match="layer 2 differs from layer 0 in settings such as its"):
        stack_layers(mixed)
    wide = eqx.tree_at(lambda m: m.model.layers[1].attn.wz.bias, model, jnp.zeros(5))
    with pytest.raises(ValueError, match=r"layer 1 .* attn\.wz\.bias, float32 \(5,\) and not .*8"):
        stack_layers(wide)
    # A shape has no first axis to get.
    frame = abstract_model(CONFIG)
    with pytest.raises(ValueError, match=r"is a ShapeDtypeStruct; .*eqx\.filter_eval_shape"):
        stack_layers(frame)
    shapes = named_leaves(eqx.filter_eval_shape(stack_layers, frame))
    assert {n: x.shape for n, x in shapes.items()} == {
        n: x.shape for n, x in named_leaves(stack_layers(model)).items()
    }
    for change in (stack_layers, unstack_layers):
        with pytest.raises(ValueError, match=f"{change.__name__}: .*got dict without one"):
            change({"weight": jnp.zeros(3)})


def test_leaves_that_are_not_shaped_as_their_parameters_are_not_cut(model) -> None:
    placeholders = jax.tree.map(
        lambda x: jnp.zeros(1), eqx.filter(stack_layers(model), eqx.is_array)
    )
    with pytest.raises(ValueError, match=r"a first axis of 3 layers, but .* has shape \(1,\)"):
        unstack_layers(placeholders)


def test_who_asks_for_layers_by_name_refuses_stacked_ones(model, tmp_path) -> None:
    mesh = jax.sharding.AbstractMesh((2,), ("tensor",))
    stacked = stack_layers(model)
    state = ADAMW.init(eqx.filter(stacked, eqx.is_array))
    calls = (
        lambda: partition_specs(stacked, mesh),
        lambda: partition_specs(stacked.model, mesh),
        lambda: shard_state(state, model, mesh),
        lambda: audit_rounded_values(stacked),
        lambda: save_checkpoint(tmp_path / "one", stacked, step=1),
        lambda: save_checkpoint(tmp_path / "two", model, step=1, opt_state=state),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"expected layers one by one.* call unstack_layers"):
            call()
    assert not [*tmp_path.iterdir()]
