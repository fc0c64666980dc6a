"""Streams: whatever the cuts, the text is the one read at once and the state is its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from megalodon_jax import ModelCache
from parity.megalodon import oracle
from tests.helpers import EXACT, logits_of, model_of, rel_l2, tiny, wide_arrays
from tests.megalodon_jax.layers.streams import (
    IDS,
    LOCAL,
    B,
    C,
    L,
    chunk_local,
    completed,
    dense,
    distance,
    few,
    fresh,
    splits,
    step,
    streamed,
    wide,
)


@pytest.fixture(scope="module")
def whole() -> tuple[np.ndarray, ModelCache]:
    """Logits and cache of the text read at once."""
    with jax.enable_x64(True):
        logits, cache = step(wide(LOCAL), jnp.asarray(IDS))
        return np.asarray(logits), cache


def test_the_dense_evaluation_is_the_oracle_where_the_oracle_goes() -> None:
    expected = oracle.forward(LOCAL, wide_arrays(LOCAL), IDS)
    assert rel_l2(dense(LOCAL, chunk_local(), IDS), expected) <= EXACT
    assert rel_l2(dense(LOCAL, np.tri(L, dtype=bool), IDS), expected) > EXACT


# Chunk-local.


@given(splits)
@few
def test_any_split_of_a_chunk_local_stream_is_the_full_forward(whole, split: list[int]) -> None:
    with jax.enable_x64(True):
        full = logits_of(wide(LOCAL), jnp.asarray(IDS), None)
        logits, held = streamed(wide(LOCAL), completed(split))
        assert rel_l2(logits, full) <= EXACT
        assert distance(held, whole[1]) <= EXACT


@pytest.mark.usefixtures("x64")
def test_the_stream_is_the_oracle_and_needs_its_cache(whole) -> None:
    expected = oracle.forward(LOCAL, wide_arrays(LOCAL), IDS)
    assert rel_l2(whole[0], expected) <= EXACT
    _, held = streamed(wide(LOCAL), [6])
    continued, _ = step(wide(LOCAL), jnp.asarray(IDS[:, 6:9]), held)
    restarted, _ = step(wide(LOCAL), jnp.asarray(IDS[:, 6:9]), fresh(wide(LOCAL)))
    assert rel_l2(continued, expected[:, 6:9]) <= EXACT
    assert rel_l2(restarted, expected[:, 6:9]) > EXACT


@pytest.mark.usefixtures("x64")
def test_every_part_of_the_cache_matters_to_what_follows() -> None:
    _, held = streamed(wide(LOCAL), [6])
    expected, _ = step(wide(LOCAL), jnp.asarray(IDS[:, 6:9]), held)
    leaves, structure = jax.tree.flatten(held)
    positions = {id(layer.position) for layer in held.layer_caches}
    # The oldest position matters only once something has been trimmed away.
    firsts = {id(layer.attn.first) for layer in held.layer_caches}
    for i, leaf in enumerate(leaves):
        changed = jax.tree.unflatten(
            structure, [*leaves[:i], leaf + leaf.dtype.type(1), *leaves[i + 1 :]]
        )
        logits, after = step(wide(LOCAL), jnp.asarray(IDS[:, 6:9]), changed)
        if id(leaf) in positions:
            assert int(max(layer.position for layer in after.layer_caches)) == 10
        elif id(leaf) not in firsts:
            assert rel_l2(logits, expected) > EXACT, i


# What the state is.


@pytest.mark.usefixtures("x64")
def test_the_states_after_prefill_are_those_of_the_recurrences(whole) -> None:
    seen: dict[str, np.ndarray] = {}
    oracle.forward(LOCAL, wide_arrays(LOCAL), IDS, hook=lambda n, v: seen.setdefault(n, v))
    held = whole[1]
    for i, layer in enumerate(held.layer_caches):
        name = f"model.layers.{i}.attn.cema."
        w = {n.removeprefix(name): a for n, a in wide_arrays(LOCAL).items() if n.startswith(name)}
        alpha, delta, theta = (oracle.sigmoid(w[n][..., 0]) for n in ("alpha", "delta", "theta"))
        N = LOCAL.cema_ndim
        q = (1 - alpha * delta) * np.exp(2j * np.pi / N * np.arange(1, N + 1) * theta)
        h = np.zeros((B, *q.shape), complex)
        for u in np.moveaxis(seen[f"layers.{i}.timenorm"], 1, 0):
            h = q * h + alpha * u[..., None]
        assert rel_l2(layer.ema.h, h) <= EXACT
        assert int(layer.position) == int(layer.attn.count) == L
        inputs = seen["embed" if i == 0 else f"layers.{i - 1}.ffn"]
        assert_statistics(layer.norm, inputs)
    assert_statistics(held.final_norm, seen[f"layers.{LOCAL.num_layers - 1}.ffn"])


def assert_statistics(state, x: np.ndarray) -> None:
    mu = x.reshape(B, L, LOCAL.norm_num_groups, -1).mean(-1)
    mean = np.zeros_like(mu[:, 0])
    m2 = np.ones_like(mean)
    for t in range(L):
        new = mean + (mu[:, t] - mean) / (t + 1)
        mean, m2 = new, m2 + (mu[:, t] - mean) * (mu[:, t] - new)
    assert state.count.tolist() == [L] * B
    assert rel_l2(state.mean, mean) <= EXACT
    assert rel_l2(state.var, m2 / L) <= EXACT


# Masks, and nothing at all.


@pytest.mark.usefixtures("x64")
def test_a_full_mask_beside_a_cache_is_no_mask() -> None:
    model, ids = wide(LOCAL), jnp.asarray(IDS[:, :3])
    masked, bare = step(model, ids, None, jnp.ones((B, 3), bool)), step(model, ids)
    assert rel_l2(masked[0], bare[0]) <= EXACT
    assert masked[1].position.tolist() == [int(bare[1].position)] * B


def test_no_rows_have_an_empty_cache() -> None:
    model = model_of(LOCAL)
    nobody = jax.eval_shape(step, model, jnp.zeros((0, 3), jnp.int32), fresh(model, 0))
    assert nobody[0].shape == (0, 3, LOCAL.vocab_size)
    assert nobody[1].layer_caches[1].attn.k.shape == (0, C, 2, 4)


def test_a_stream_of_no_rows_runs() -> None:
    model = model_of(tiny(num_layers=1))
    logits, held = step(model, jnp.zeros((0, 3), jnp.int32), fresh(model, 0))
    assert (logits.shape, int(held.position)) == ((0, 3, LOCAL.vocab_size), 3)
