"""Equal layers as one loop: the same model, compiled once."""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megalodon_jax import MegalodonForCausalLM, traced_checks
from megalodon_jax.inference import init_cache
from megalodon_jax.layers.stack import _parts
from megalodon_jax.stacked import stack_layers, unstack_layers
from megalodon_jax.types import LayerCache
from megalodon_jax.weights import abstract_model, named_leaves
from tests.helpers import EXACT, EXACT_GRADIENT, model_of, rel_l2, tiny, tokens

# What differs between layers: dropout's keys, the scale of the sum, what a cache carries.
CONFIG = tiny(num_layers=2, rescale_nffn=True, hidden_dropout=0.2, use_checkpoint=True)
L = 6
IDS = tokens(CONFIG, (2, L))


@pytest.fixture
def x64():
    with jax.enable_x64(True), traced_checks(False):
        yield


def both() -> tuple[MegalodonForCausalLM, MegalodonForCausalLM]:
    """The same weights unrolled and in a loop."""
    config = CONFIG.with_dtype("float64")
    return model_of(config), model_of(dataclasses.replace(config, scan_layers=True))


@eqx.filter_jit
@eqx.filter_value_and_grad
def trained(model, ids, mask, key):
    return model.compute_loss(ids, ids, mask, deterministic=False, key=key)


@pytest.mark.usefixtures("x64")
def test_loss_and_gradients_are_those_of_the_layers_one_by_one() -> None:
    mask = jnp.ones((2, L), bool).at[1, 4:].set(False)
    keys = jax.random.split(jax.random.key(0))
    one_by_one, loop = both()
    models = one_by_one, loop, stack_layers(one_by_one)
    (loss, unrolled), *others = (trained(m, jnp.asarray(IDS), mask, keys[0]) for m in models)
    for looped_loss, gradients in others:
        looped = unstack_layers(gradients)
        assert rel_l2(looped_loss, loss) <= EXACT
        assert list(named_leaves(looped)) == list(named_leaves(unrolled))
        for name, gradient in named_leaves(unrolled).items():
            assert rel_l2(named_leaves(looped)[name], gradient) <= EXACT_GRADIENT, name
    # The control: other keys drop something else.
    other, _ = trained(both()[1], jnp.asarray(IDS), mask, keys[1])
    assert rel_l2(other, loss) > EXACT


@pytest.mark.sweep  # the loss above runs the same loop
@pytest.mark.usefixtures("x64")
def test_a_stream_is_that_of_the_layers_one_by_one() -> None:
    read = eqx.filter_jit(lambda model, ids, cache: model(ids, cache=cache, return_cache=True))
    streams = []
    one_by_one, loop = both()
    for model in (one_by_one, loop, stack_layers(one_by_one)):
        first, held = read(model, jnp.asarray(IDS[:, :-1]), None)
        last, held = read(model, jnp.asarray(IDS[:, -1:]), held)
        streams.append((jnp.concatenate([first, last], 1), held))
    (logits, held), *others = streams
    for looped_logits, looped in others:
        assert rel_l2(looped_logits, logits) <= EXACT
        assert jax.tree.structure(looped) == jax.tree.structure(held)
        for ours, expected in zip(jax.tree.leaves(looped), jax.tree.leaves(held), strict=True):
            assert ours.dtype == expected.dtype
            assert rel_l2(ours, expected) <= EXACT
        layers = looped.layer_caches
        assert rel_l2(layers[1].ema.h, layers[0].ema.h) > EXACT


def products(config) -> int:
    """How often matrices are multiplied in a traced program."""
    ids = jax.ShapeDtypeStruct((1, L), jnp.int32)
    with traced_checks(False):
        program, *_ = eqx.filter_make_jaxpr(lambda m, i: m(i)[0])(abstract_model(config), ids)
    return str(program).count("dot_general[")


def test_a_loop_is_traced_once_however_many_layers_there_are() -> None:
    few, many = tiny(num_layers=2, rescale_nffn=True), tiny(num_layers=5, rescale_nffn=True)
    looped = [products(dataclasses.replace(c, scan_layers=True)) for c in (few, many)]
    assert looped[0] == looped[1]
    # The control. Unrolled, equal layers share a trace; those of another scale cannot.
    assert products(many) > products(few)


def test_only_neighbours_of_one_kind_share_a_loop() -> None:
    rules = {"model.layers.1.*": "mxfp8"}
    model = abstract_model(tiny(num_layers=4, gemm_backend=rules))
    assert list(_parts(model.model.layers, (None,) * 4, True)) == [
        slice(0, 1),
        slice(1, 2),
        slice(2, 4),
    ]
    assert len(list(_parts(model.model.layers, (None,) * 4, False))) == 4


def test_only_layers_that_carry_the_same_share_a_loop() -> None:
    """A loop has one kind of cache: what differs in arrays, shape or dtype is another one."""
    config = tiny(num_layers=2)
    blocks = abstract_model(config).model.layers

    def held(changes: dict, **allocated: bool) -> LayerCache:
        cache = init_cache(dataclasses.replace(config, **changes), 1, **allocated)
        return cache.layer_caches[0]

    plain, same = (held({}, allocate_kv=True) for _ in range(2))
    assert list(_parts(blocks, (plain, same), True)) == [slice(0, 2)]
    for other in (
        None,
        held({}),
        held({}, allocate_kv=True, allocate_ema=True),
        held({"chunk_size": 8}, allocate_kv=True),
        held({"compute_dtype": "bfloat16"}, allocate_kv=True),
    ):
        assert list(_parts(blocks, (plain, other), True)) == [slice(0, 1), slice(1, 2)]


def test_the_option_changes_neither_names_nor_weights() -> None:
    config = dataclasses.replace(CONFIG, scan_layers=True)
    assert type(config).from_hf(config.to_hf()) == config
    # Hashes of recorded work, and files of before, know no such field.
    assert config.to_dict() == CONFIG.to_dict() | {"scan_layers": True} != CONFIG.to_dict()
    assert type(config).from_dict(config.to_dict()) == config
    names = named_leaves(abstract_model(config))
    expected = named_leaves(abstract_model(CONFIG))
    assert names.keys() == expected.keys()
    assert all(names[n].shape == expected[n].shape for n in names)
    assert np.array_equal(model_of(config).model.embed.weight, model_of(CONFIG).model.embed.weight)
