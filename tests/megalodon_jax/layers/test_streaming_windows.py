"""Streams with other windows than the chunk, and the ring that holds their keys."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megalodon_jax import AttentionCache, LayerCache, ModelCache, init_cache, trim_cache
from megalodon_jax.layers import ChunkedAttention, attention
from megalodon_jax.types import grown_cache
from tests.helpers import EXACT, logits_of, rel_l2, tiny
from tests.megalodon_jax.layers.streams import (
    IDS,
    LOCAL,
    SLIDING,
    UNBOUNDED,
    B,
    C,
    L,
    chunk_local,
    completed,
    dense,
    few,
    fresh,
    resized,
    splits,
    step,
    streamed,
    wide,
    window,
)

# Sliding.


@given(splits)
@few
def test_a_sliding_window_is_the_rule_of_the_split(split: list[int]) -> None:
    pieces = completed(split)
    with jax.enable_x64(True):
        logits, _ = streamed(wide(SLIDING), pieces)
    assert rel_l2(logits, dense(SLIDING, window(pieces, 6), IDS)) <= EXACT


@pytest.mark.usefixtures("x64")
def test_a_sliding_window_depends_on_the_partition() -> None:
    ones, sixes = [1] * L, [6, 6, 1, 1]
    assert not np.array_equal(window(ones, 6), window(sixes, 6))
    by_token, by_block = (streamed(wide(SLIDING), pieces)[0] for pieces in (ones, sixes))
    assert rel_l2(by_token[:, :4], by_block[:, :4]) <= EXACT
    assert rel_l2(by_token, by_block) > EXACT


@pytest.mark.usefixtures("x64")
def test_a_sliding_prefill_without_a_cache_slides_only_when_one_is_asked_for() -> None:
    asked, _ = step(wide(SLIDING), jnp.asarray(IDS))
    assert rel_l2(asked, dense(SLIDING, window([L], 6), IDS)) <= EXACT
    bare = logits_of(wide(SLIDING), jnp.asarray(IDS), None)
    assert rel_l2(bare, dense(SLIDING, chunk_local(), IDS)) <= EXACT
    assert rel_l2(bare, asked) > EXACT


@pytest.mark.usefixtures("x64")
def test_a_cache_handed_in_means_a_window_whether_or_not_it_is_handed_back() -> None:
    @eqx.filter_jit
    def drop(model, ids, cache):
        return model(ids, cache=cache)

    empty = init_cache(wide(SLIDING).config, B)
    logits, nothing = drop(wide(SLIDING), jnp.asarray(IDS), empty)
    assert nothing is None
    assert rel_l2(logits, dense(SLIDING, window([L], 6), IDS)) <= EXACT


@pytest.mark.parametrize("config", [LOCAL, SLIDING, UNBOUNDED])
@pytest.mark.usefixtures("x64")
def test_a_cache_is_read_whether_or_not_one_is_asked_for(config) -> None:
    @eqx.filter_jit
    def last(model, ids, cache):
        return model(ids, cache=cache)

    model = wide(config)
    _, held = streamed(model, [6], cache=resized(fresh(model), 16) if config is UNBOUNDED else None)
    ids = jnp.asarray(IDS[:, 6:9])
    logits, nothing = last(model, ids, held)
    assert nothing is None
    assert rel_l2(logits, step(model, ids, held)[0]) <= EXACT
    assert rel_l2(logits, logits_of(model, ids, None)) > EXACT


# Unbounded.


@pytest.mark.usefixtures("x64")
def test_an_unbounded_stream_sees_everything() -> None:
    model = wide(UNBOUNDED)
    expected = dense(UNBOUNDED, np.tri(L, dtype=bool), IDS)
    assert rel_l2(step(model, jnp.asarray(IDS))[0], expected) <= EXACT
    logits, held = streamed(model, [6, 3, 3, 1, 1], cache=resized(fresh(model), 16))
    assert rel_l2(logits, expected) <= EXACT
    assert held.layer_caches[0].attn.capacity == 16


def test_an_unbounded_cache_grows_by_chunks_outside_of_jit_and_keeps_what_it_holds() -> None:
    layer = ChunkedAttention(UNBOUNDED)
    zero = jnp.zeros((), jnp.int32)
    q, k, v = np.random.default_rng(3).standard_normal((3, 1, L, 2, 6)).astype(np.float32)
    q, k, v = jnp.asarray(q[..., :4]), jnp.asarray(k[..., :4]), jnp.asarray(v)

    def part(start: int, stop: int, held: AttentionCache | None) -> AttentionCache:
        cut = slice(start, stop)
        if held is not None:
            model = ModelCache((LayerCache(held, None, None, zero),), None)
            held = grown_cache(UNBOUNDED, model, stop - start).layer_caches[0].attn
        return layer(q[:, cut], k[:, cut], v[:, cut], None, held, True)[1]

    assert eqx.filter_eval_shape(part, 0, 6, None).capacity == 2 * C, "whole chunks for a prefill"
    before = eqx.filter_jit(part)(0, 3, None)
    assert (before.capacity, int(before.count)) == (C, 3)
    after = part(3, 6, before)
    assert (after.capacity, int(after.count)) == (2 * C, 6)
    assert np.array_equal(after.k[:, :3], before.k[:, :3])
    assert np.array_equal(after.v[:, :6], v[:, :6])
    assert part(6, 7, after).capacity == after.capacity


@pytest.mark.usefixtures("x64")
@pytest.mark.traced_checks
def test_a_full_unbounded_cache_says_so_under_jit() -> None:
    model = wide(UNBOUNDED)
    _, held = streamed(model, [3])
    _, full = step(model, jnp.asarray(IDS[:, 3:4]), held)
    message = r"(?s)cache_unbounded: the cache holds 4 tokens and is full"
    with pytest.raises(eqx.EquinoxRuntimeError, match=message):
        jax.block_until_ready(step(model, jnp.asarray(IDS[:, 4:5]), full))


# The ring.


@given(
    st.sampled_from((3, 5)),
    st.lists(
        st.sampled_from([("add", 1), ("add", 2), ("add", 7), ("size", 3), ("size", 5)]), max_size=6
    ),
)
@example(3, [("add", 2), ("add", 2), ("size", 5)])
@few
def test_the_ring_is_the_list_of_the_latest_tokens(capacity: int, moves) -> None:
    zero = jnp.zeros((), jnp.int32)
    ring = AttentionCache(
        jnp.zeros((1, capacity, 1, 1)), jnp.zeros((1, capacity, 1, 2)), zero, zero
    )
    count, held = 0, []
    for move, n in moves:
        if move == "add":
            new = jnp.arange(count + 1, count + n + 1, dtype=jnp.float32)[None, :, None, None]
            ring = ring.append(new, jnp.concatenate([new, -new], axis=-1))
            held = [*held, *range(count, count + n)][-ring.capacity :]
            count += n
        else:
            ring, held = ring.resized(n), held[-n:]
        positions = np.asarray(ring.positions()).tolist()
        assert (int(ring.count), count - int(ring.first)) == (count, len(held))
        assert len(positions) == ring.capacity
        assert all(p == -1 or p % ring.capacity == slot for slot, p in enumerate(positions))
        assert sorted(p for p in positions if p >= 0) == held
        for p in held:
            slot = positions.index(p)
            assert float(ring.k[0, slot, 0, 0]) == p + 1
            assert ring.v[0, slot, 0].tolist() == [p + 1, -p - 1]


def test_a_ring_made_by_hand_grows_by_what_it_holds() -> None:
    """`first` is 0 by default, which says nothing of what had fallen out of the ring before."""
    values = jnp.arange(3.0)[None, :, None, None]
    ring = AttentionCache(values, values, jnp.asarray(7, jnp.int32)).resized(5)
    assert sorted(p for p in ring.positions().tolist() if p >= 0) == [4, 5, 6]
    assert [float(ring.k[0, p % 5, 0, 0]) for p in (4, 5, 6)] == [1.0, 2.0, 0.0]


@pytest.mark.usefixtures("x64")
def test_an_unbounded_stream_does_not_see_what_was_trimmed_when_it_grows_again() -> None:
    model, pieces = wide(UNBOUNDED), [6, 3]
    _, held = step(model, jnp.asarray(IDS[:, :6]))
    grown = resized(trim_cache(held, 3), 12)
    logits, _ = step(model, jnp.asarray(IDS[:, 6:9]), grown)
    visible = np.tri(sum(pieces), dtype=bool)
    visible[6:, :3] = False
    assert rel_l2(logits, dense(UNBOUNDED, visible, IDS[:, :9])[:, 6:]) <= EXACT


@pytest.mark.usefixtures("x64")
def test_a_long_chunk_is_read_only_as_far_as_it_is_filled(monkeypatch) -> None:
    """The ring's front has sizes of its own from one stripe on: token by token, past a chunk."""
    monkeypatch.setattr(attention, "STRIPE", 16)
    config = tiny(chunk_size=32).with_dtype("float64")
    layer, length = ChunkedAttention(config), 34
    rng = np.random.default_rng(4)
    q, k = jnp.asarray(rng.standard_normal((2, 1, length, config.num_heads, config.head_dim)))
    v = jnp.asarray(rng.standard_normal((1, length, config.num_heads, config.value_head_dim)))
    whole = np.asarray(eqx.filter_jit(layer)(q, k, v)[0])

    @eqx.filter_jit
    def token(t, ring):
        parts = (jax.lax.dynamic_slice_in_dim(a, t, 1, axis=1) for a in (q, k, v))
        return layer(*parts, None, ring, True)

    ring = layer.empty_ring(1, length)
    for t in range(length):
        before = (t - 1) % 32
        forgotten = AttentionCache(ring.k, ring.v.at[:, before].set(0.0), ring.count, ring.first)
        out, after = token(jnp.asarray(t), ring)
        assert rel_l2(out, whole[:, [t]]) <= EXACT, t
        if t % 32:
            assert rel_l2(token(jnp.asarray(t), forgotten)[0], whole[:, [t]]) > EXACT, t
        ring = after
