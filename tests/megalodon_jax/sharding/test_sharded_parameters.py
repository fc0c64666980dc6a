"""Where parameters, states and batches lie, and what is refused."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megalodon_jax import stack_layers, traced_checks, unstack_layers
from megalodon_jax.sharding import (
    make_mesh,
    padded_batch,
    partition_specs,
    shard_batch,
    shard_model,
    shard_state,
)
from megalodon_jax.sharding.sequence import following
from megalodon_jax.weights import EMBEDDING, HEAD, abstract_model, named_leaves, weight_table
from tests.helpers import EXACT_GRADIENT, adapted, model_of, rel_l2, same_leaves, tiny, tokens
from tests.megalodon_jax.sharding.programs import SMALL, mesh_named, ragged

WIDE = tiny(vocab_size=18, output_size=20, num_heads=2)


def test_every_parameter_lies_where_its_role_says() -> None:
    mesh = mesh_named("fsdp=2 tensor=2")
    specs = partition_specs(abstract_model(WIDE), mesh)
    assert list(specs) == [row.name for row in weight_table(WIDE)]
    block = "model.layers.0."
    assert specs[EMBEDDING] == specs[HEAD] == P("tensor", "fsdp")
    for name in ("attn.wz", "attn.wv", "attn.wr", "attn.wh1", "ffn.fc1"):
        assert specs[f"{block}{name}.weight"] == P("tensor", "fsdp")
        assert specs[f"{block}{name}.bias"] == P("tensor")
    for name in ("attn.wh2", "ffn.fc2"):
        assert specs[f"{block}{name}.weight"] == P("fsdp", "tensor")
        assert specs[f"{block}{name}.bias"] == P("tensor")
    for name in ("attn.cema.omega", "attn.timenorm.weight", "attn.rmsnorm.gamma", "ffn.norm.bias"):
        assert specs[block + name] == P("tensor")
    assert specs[block + "attn.cema.alpha"] == P("tensor", None, None)
    assert specs[block + "attn.gamma"] == P(None, "tensor")


def test_a_parameter_without_a_role_is_whole_everywhere() -> None:
    specs = partition_specs(jax.eval_shape(adapted), mesh_named("fsdp=2 tensor=2"))
    wrapped = "model.layers.0.attn.wz."
    assert {specs[wrapped + name] for name in ("lora_a", "steps", "key")} == {P()}
    assert specs[f"{wrapped}weight"] == P("tensor", "fsdp")


def test_a_vocabulary_that_does_not_divide_is_cut_by_columns() -> None:
    specs = partition_specs(abstract_model(SMALL), mesh_named("fsdp=2 tensor=2"))
    assert specs[EMBEDDING] == P(None, ("tensor", "fsdp"))
    assert partition_specs(abstract_model(SMALL), mesh_named("data=8"))[EMBEDDING] == P(None, None)


def test_a_model_keeps_its_bits_and_its_state_follows() -> None:
    mesh, model = mesh_named("fsdp=2 tensor=2 data=2"), model_of(SMALL)
    placed = shard_model(model, mesh)
    assert same_leaves(placed, model)
    specs, leaves = partition_specs(model, mesh), named_leaves(placed)
    assert all(leaves[name].sharding.spec == spec for name, spec in specs.items())
    state = shard_state(optax.adamw(1e-3).init(eqx.filter(model, eqx.is_array)), model, mesh)
    for name, leaf in named_leaves(state).items():
        owner = [n for n in specs if name.endswith("." + n)]
        assert leaf.sharding.spec == (specs[owner[0]] if owner else P())
    assert len(leaves[EMBEDDING].sharding.device_set) == mesh.size


def test_layers_that_are_placed_and_stacked_stay_where_they_are() -> None:
    mesh = mesh_named("fsdp=2 tensor=2 data=2")
    placed = shard_model(model_of(SMALL), mesh)
    stacked, expected = named_leaves(stack_layers(placed)), named_leaves(placed)
    first = {n: x for n, x in expected.items() if n.startswith("model.layers.0.")}
    for name, leaf in first.items():
        held = stacked[name.replace("layers.0.", "layers.block.")]
        expected_sharding = NamedSharding(mesh, P(None, *leaf.sharding.spec))
        assert held.sharding.is_equivalent_to(expected_sharding, held.ndim), name


@pytest.mark.sweep  # a program of eight devices
def test_gradients_of_stacked_layers_on_a_mesh_are_those_of_one_device() -> None:
    @eqx.filter_jit
    @eqx.filter_grad
    def gradients(model, ids):
        return model.compute_loss(ids, ids)

    mesh, ids = mesh_named("fsdp=2 tensor=2 data=2"), tokens(SMALL, (4, 8))
    with jax.enable_x64(True), traced_checks(False):
        model = model_of(SMALL.with_dtype("float64"))
        expected = named_leaves(gradients(model, jnp.asarray(ids)))
        stacked = stack_layers(shard_model(model, mesh))
        found = named_leaves(unstack_layers(gradients(stacked, shard_batch(ids, mesh))))
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert rel_l2(found[name], gradient) <= EXACT_GRADIENT, name


@pytest.mark.parametrize(
    ("mesh", "config", "message"),
    [
        ("tensor=8", SMALL, "num_heads=4 does not divide by the 8 parts.*tensor"),
        ("tensor=4", tiny(num_heads=4), "norm_num_groups=2 does not divide by the 4 parts"),
        (
            "tensor=4",
            tiny(num_heads=4, norm_num_groups=4),
            "ffn_hidden_dim=10 does not divide by the 4 parts",
        ),
        ("fsdp=8", tiny(model_dim=12), "model_dim=12 does not divide by the 8 parts.*fsdp"),
    ],
)
def test_a_model_that_does_not_divide_is_refused(mesh: str, config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_model(abstract_model(config), mesh_named(mesh))


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch=6 does not divide by the 4 parts.*data x fsdp"):
        shard_batch({"input_ids": np.ones((6, 8), int)}, mesh_named("data=2 fsdp=2"))
    with pytest.raises(
        ValueError, match=r"24 tokens .* 4 parts .* chunks of 4 tokens; .* multiple of 16"
    ):
        shard_batch(np.ones((2, 24), int), mesh_named("sequence=4"), chunk_size=4)
    with pytest.raises(ValueError, match=r"shape \(\), expected \(B, L\)"):
        shard_batch(np.ones(()), mesh_named("data=2"))
    with pytest.raises(ValueError, match=r"a pytree of arrays, got int 3 .* np\.asarray"):
        shard_batch({"input_ids": [3, 4]}, mesh_named("data=2"))


def test_a_length_that_does_not_divide_is_refused_by_the_model() -> None:
    model = shard_model(model_of(SMALL), mesh_named("sequence=8"))
    with pytest.raises(ValueError, match=r"20 tokens .* 8 parts .* multiple of 8"):
        following(jnp.ones((2, 20), jnp.int32), 0, mesh_named("sequence=8"))
    ids = jnp.ones((2, 24), jnp.int32)
    with pytest.raises(ValueError, match=r"24 tokens .* multiple of 32"):
        eqx.filter_eval_shape(model, ids)
    with pytest.raises(ValueError, match="cache does not go with 8 parts"):
        eqx.filter_eval_shape(model, jnp.ones((2, 32), jnp.int32), return_cache=True)


@pytest.mark.parametrize("size", [0, -1, True])
def test_a_mesh_has_whole_sizes(size) -> None:
    with pytest.raises(ValueError, match=r"make_mesh: tensor=.* integer of at least 1"):
        make_mesh(tensor=size)


def test_a_mesh_of_more_devices_than_there_are_says_how_to_get_them() -> None:
    with pytest.raises(ValueError, match=r"data=4 .* sequence=3 .* 12 devices.* 8.*XLA_FLAGS"):
        make_mesh(data=4, sequence=3, devices=jax.devices()[:8])
    assert make_mesh().axis_names == ("data",)


def test_a_batch_is_filled_up_with_what_does_not_count() -> None:
    batch = ragged(8, 30)
    filled = padded_batch(batch, 32)
    assert all(x.shape == (8, 32) for x in filled.values())
    assert np.array_equal(filled["labels"][:, 30:], np.full((8, 2), -100))
    assert not filled["attention_mask"][:, 30:].any()
    alone = padded_batch({"input_ids": batch["input_ids"]}, 16)
    assert alone["attention_mask"].sum() == 8 * 30
    micro = {name: np.stack([batch[name]] * 2) for name in ("input_ids", "labels")}
    micros = padded_batch({**micro, "attention_mask": None}, 32, ignore_index=-1)
    assert {x.shape for x in micros.values()} == {(2, 8, 32)} and len(micros) == 3
    assert (micros["labels"][..., 30:] == -1).all()
    # The last document of a row goes on: none of the others gets longer.
    packed = {**alone, "segment_ids": np.repeat([[3, 1]], 16, axis=1)[:, :30]}
    packed = padded_batch({name: x[:1, :30] for name, x in packed.items()}, 32)
    assert packed["segment_ids"].tolist() == [[3] * 16 + [1] * 16]
    with pytest.raises(ValueError, match=r"unknown arrays \['ids'\]"):
        padded_batch({"ids": batch["input_ids"]}, 16)
