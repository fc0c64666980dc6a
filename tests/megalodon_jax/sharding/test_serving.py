"""Prefill, decode and generation on `data` x `tensor`, and low-precision products on a mesh."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from megalodon_jax import decode_step, generate, init_cache
from megalodon_jax.sharding import shard_batch, shard_model
from megalodon_jax.sharding.caches import shard_cache
from megalodon_jax.weights import named_leaves
from tests.helpers import EXACT, SAME_PROGRAM, model_of, one_ulp_away, rel_l2, tiny, tokens
from tests.megalodon_jax.sharding.programs import mesh_named

SERVED = tiny(num_layers=1)
ROWS, PROMPT, NEW = 4, 6, 3
KINDS = (AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.sweep))


@eqx.filter_jit
def prefilled(model: Any, ids: jax.Array, cache: Any, mask: Any = None) -> Any:
    return model(ids, mask, cache=cache, return_cache=True)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("x64")
def test_a_stream_continues_as_on_one_device(kind: AxisType, ragged: bool) -> None:
    config = SERVED.with_dtype("float64")
    mesh, model = mesh_named("data=2 tensor=2", kind), model_of(config)
    ids, more = tokens(config, (ROWS, PROMPT)), tokens(config, (ROWS, NEW), 3)
    mask = np.arange(PROMPT) >= np.array([[0], [4], [2], [1]]) if ragged else None
    there = None if mask is None else shard_batch(mask, mesh)
    given = None if mask is None else jnp.asarray(mask)
    expected, cache = prefilled(model, jnp.asarray(ids), init_cache(config, ROWS), given)
    placed = shard_model(model, mesh)
    start = shard_cache(init_cache(config, ROWS, per_row=ragged), mesh)
    logits, ours = prefilled(placed, shard_batch(ids, mesh), start, there)
    assert rel_l2(logits, expected) <= EXACT
    assert np.array_equal(ours.position, cache.position)
    places = jax.tree.map(lambda leaf: leaf.sharding, ours)
    for t in range(NEW):
        expected, cache = decode_step(model, cache, jnp.asarray(more[:, t]))
        logits, ours = decode_step(placed, ours, shard_batch(more[:, t], mesh))
        assert rel_l2(logits, expected) <= EXACT
    # A step leaves the cache where it found it, or the next one would compile again.
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(places), strict=True)
    assert all(leaf.sharding.is_equivalent_to(place, leaf.ndim) for leaf, place in pairs)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.usefixtures("x64")
def test_generated_tokens_are_those_of_one_device(kind: AxisType) -> None:
    config = SERVED.with_dtype("float64")
    mesh, model = mesh_named("data=2 tensor=2", kind), model_of(config)
    ids, key = tokens(config, (ROWS, PROMPT)), jax.random.key(4)
    for options in ({"temperature": 0.0}, {"temperature": 1.0, "key": key, "top_k": 5}):
        expected = generate(model, ids, NEW, **options)[0]
        ours = generate(shard_model(model, mesh), shard_batch(ids, mesh), NEW, **options)[0]
        assert np.array_equal(ours, expected)


@eqx.filter_jit
def derived(model: Any, ids: jax.Array) -> Any:
    return eqx.filter_grad(lambda m: m.compute_loss(ids, ids))(model)


@pytest.mark.sweep
def test_random_rounding_does_not_know_the_mesh() -> None:
    """Another draw would move gradients by the rounding of 4 bits."""
    config = tiny(
        num_layers=1, model_dim=32, value_dim=32, ffn_hidden_dim=32, z_dim=32, gemm_backend="nvfp4"
    )
    model, mesh = model_of(config), mesh_named("data=2 tensor=2")
    ids = tokens(config, (ROWS, 16))
    expected = named_leaves(derived(model, jnp.asarray(ids)))
    ours = named_leaves(derived(shard_model(model, mesh), shard_batch(ids, mesh)))
    moved = [named_leaves(derived(one_ulp_away(model, s), jnp.asarray(ids))) for s in range(3)]
    for name, exact in expected.items():
        # A draw that differs in one operand of 4 bits is off by far more than float32's rounding.
        floor = max(rel_l2(other[name], exact) for other in moved)
        assert rel_l2(ours[name], exact) <= SAME_PROGRAM * floor, name
