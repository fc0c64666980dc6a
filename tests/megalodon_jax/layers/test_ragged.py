"""Rows of different lengths beside a cache: each is what it is alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megalodon_jax import (
    AttentionCache,
    MegalodonConfig,
    MegalodonForCausalLM,
    ModelCache,
    index_cache,
    init_cache,
    reserve_cache,
    trim_cache,
)
from megalodon_jax.checks import traced_checks
from megalodon_jax.inference import decode_step
from megalodon_jax.layers import ChunkedAttention
from megalodon_jax.stacked import stack_layers
from megalodon_jax.types import check_cache, grown_cache
from parity.megalodon import oracle
from parity.megalodon.runner import cache_arrays
from tests.helpers import EXACT, model_of, rel_l2, rounding_bound, tiny, tokens, wide_arrays
from tests.megalodon_jax.layers.streams import (
    LOCAL,
    SLIDING,
    UNBOUNDED,
    chunk_local,
    few,
    step,
    wide,
    window,
)

# What each call feeds each row: a prompt, a token, a piece that leaves one row out, a token of
# three rows. The last row begins with the second call.
CALLS = ((11, 3, 7, 0), (1, 1, 1, 1), (2, 5, 0, 6), (1, 0, 1, 1))
ROWS = len(CALLS[0])
LENGTHS = np.sum(CALLS, axis=0)
IDS = tokens(LOCAL, (ROWS, int(LENGTHS.max())), 3)
SIDES = ("left", "right", "both")
MODES: dict[str, MegalodonConfig] = {"local": LOCAL, "sliding": SLIDING, "unbounded": UNBOUNDED}
# Room for a prompt and all that follows: under jit an unbounded cache cannot grow.
ROOM = 20


def visible(mode: str, row: int) -> np.ndarray:
    """Which token of a row may see which, from docs/model.md "Chunked attention"."""
    if mode == "sliding":
        return window([call[row] for call in CALLS], SLIDING.effective_max_cache_len or 0)
    length = int(LENGTHS[row])
    return chunk_local(length) if mode == "local" else np.tri(length, dtype=bool)


@cache
def alone(mode: str, row: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits (n, V) of the oracle for one row alone, and what a cache holds after it."""
    states: dict[str, np.ndarray] = {}
    config = MODES[mode]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "visibility", lambda *_: visible(mode, row))
        ids = IDS[row : row + 1, : LENGTHS[row]]
        logits = oracle.forward(config, wide_arrays(config), ids, states=states)
    return logits[0], {f"state/{name}": state for name, state in states.items()}


def pieces(side: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """The ids (B, L) and mask (B, L) of each call, padded with a token that is also text."""
    found, at = [], np.zeros(ROWS, int)
    for call in CALLS:
        size = max(call)
        ids, mask = np.full((ROWS, size), 5, np.int32), np.zeros((ROWS, size), bool)
        for row, n in enumerate(call):
            begin = {"left": size - n, "right": 0, "both": (size - n) // 2}[side]
            ids[row, begin : begin + n] = IDS[row, at[row] : at[row] + n]
            mask[row, begin : begin + n] = True
        found.append((ids, mask))
        at += call
    return found


def streamed(
    model: Any, calls: Any, change: Callable[[ModelCache], ModelCache] = lambda held: held
) -> tuple[list[np.ndarray], ModelCache]:
    """Logits of the tokens of each row, (n, V), and the cache after all calls.

    `change` is what happens to the cache after the first call.
    """
    held, rows = None, [[] for _ in range(ROWS)]
    for ids, mask in calls:
        ids, given = jnp.asarray(ids), None if mask.all() else jnp.asarray(mask)
        first = held is None
        logits, held = step(model, ids, held, given)
        held = change(held) if first else held
        for row, parts in enumerate(rows):
            parts.append(np.asarray(logits)[row][mask[row]])
        if model.config.cache_unbounded:
            held = reserve_cache(held, ROOM)
    assert held is not None
    return [np.concatenate(parts) for parts in rows], held


def of_the_longest(held: ModelCache) -> ModelCache:
    rings = lambda c: [layer.attn.count for layer in c.layer_caches]  # noqa: E731
    return eqx.tree_at(rings, held, [jnp.full_like(n, n.max()) for n in rings(held)])


def distances(mode: str, logits: list[np.ndarray], held: ModelCache) -> list[float]:
    """Largest relative L2 of a row's logits and states from those of the row alone."""
    found = []
    for row, ours in enumerate(logits):
        expected, states = alone(mode, row)
        state = cache_arrays(MODES[mode], index_cache(held, jnp.asarray([row])))
        assert state.keys() == states.keys()
        worst = max(rel_l2(state[name], states[name]) for name in states)
        found.append(max(rel_l2(ours, expected), worst))
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("stacked", [False, pytest.param(True, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("x64")
def test_each_row_is_what_it_is_alone(mode: str, stacked: bool) -> None:
    model = wide(MODES[mode])
    model = stack_layers(model) if stacked else model
    for side in SIDES:
        logits, held = streamed(model, pieces(side))
        assert max(distances(mode, logits, held)) <= EXACT, side
    assert held.position.tolist() == LENGTHS.tolist()
    if mode == "local" and not stacked:
        # The control: rings of all rows count as many tokens as the longest.
        found = distances(mode, *streamed(model, pieces("right"), of_the_longest))
        assert found[0] <= EXACT
        assert min(found[1:]) > EXACT


def test_in_float32_a_row_is_off_by_rounding_alone() -> None:
    model, n = model_of(LOCAL), CALLS[0][2]
    (ids, mask), *_ = pieces("left")
    logits, held = step(model, jnp.asarray(ids), None, jnp.asarray(mask))
    row = jnp.asarray(IDS[2:3, :n])
    expected, after = step(model, row)
    bound = rounding_bound(lambda model: step(model, row)[0], model)
    assert rel_l2(np.asarray(logits)[2][mask[2]], expected[0]) <= bound
    assert rel_l2(np.asarray(logits)[2][mask[2]][1:], expected[0, :-1]) > bound
    state = rounding_bound(lambda model: step(model, row)[1].layer_caches[1].ema.h, model)
    assert rel_l2(held.layer_caches[1].ema.h[2:3], after.layer_caches[1].ema.h) <= state


# When rows have positions of their own.


def counters(held: ModelCache) -> set[tuple[int, ...]]:
    layers = held.layer_caches
    return {x.shape for c in layers for x in (c.position, c.attn.count, c.attn.first)}


def test_a_mask_known_to_be_full_keeps_one_position_for_all() -> None:
    model = eqx.filter_eval_shape(MegalodonForCausalLM, LOCAL, key=jax.random.key(0))
    full, ids = np.ones((ROWS, 3), bool), jnp.zeros((ROWS, 3), jnp.int32)
    padded = full & (np.arange(3) < 2)

    def after(mask, held=None):
        """The cache after a call; a mask of NumPy keeps its values."""
        return eqx.filter_eval_shape(
            lambda model, held, traced: model(
                ids, mask if traced is None else traced, cache=held, return_cache=True
            )[1],
            model,
            held,
            None if isinstance(mask, np.ndarray) else mask,
        )

    for mask in (full, full.astype(np.int64)):
        assert counters(after(mask, after(full))) == {()}
    for mask in (padded, padded.astype(np.int64), jnp.asarray(full)):
        # The last is traced here: it has no value, and may pad.
        assert counters(after(mask)) == counters(after(mask, after(full))) == {(ROWS,)}
    assert counters(after(full, after(padded))) == {(ROWS,)}


@pytest.mark.traced_checks
def test_padding_between_tokens_is_refused() -> None:
    model, ids = model_of(tiny(num_layers=1)), jnp.asarray(IDS[:, :4])
    mask = np.array([[1, 1, 1, 1], [0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]], bool)
    jax.block_until_ready(step(model, ids, None, jnp.asarray(mask)))
    mask[2] = [1, 0, 0, 1]
    with pytest.raises(eqx.EquinoxRuntimeError, match="padding between some"):
        jax.block_until_ready(step(model, ids, None, jnp.asarray(mask)))


@pytest.mark.traced_checks
def test_a_layer_takes_rows_with_their_tokens_first() -> None:
    layer = ChunkedAttention(tiny(value_dim=8))
    rng = np.random.default_rng(5)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 3, 2, 4)), jnp.float32) for _ in range(3))
    mask = jnp.asarray([[True, True, False], [True, True, True]])
    expected, _ = layer(q, k, v, None, None, True)
    nan = jnp.where(mask[..., None, None], 0.0, jnp.nan)
    out, ring = layer(q, k + nan, v + nan, mask, None, True)
    assert np.array_equal(np.asarray(out)[mask], np.asarray(expected)[mask])
    assert ring.count.tolist() == [2, 3]
    assert np.all(np.isfinite(ring.k))
    with pytest.raises(RuntimeError, match="a token behind padding"):
        layer(q, k, v, mask[:, ::-1], None, True)


def test_counters_of_two_forms_are_refused() -> None:
    config = tiny(num_layers=2)
    held = init_cache(config, 3, per_row=True)
    check_cache(config, held, 3)
    where = lambda c: c.layer_caches[1].attn.count  # noqa: E731
    off = eqx.tree_at(where, held, jnp.zeros((), jnp.int32))
    with pytest.raises(ValueError, match=r"layer 1 attn.count has shape \(\), expected \(3,\)"):
        check_cache(config, off, 3)
    with pytest.raises(ValueError, match=r"layer 0.position has shape \(3,\), expected \(2,\)"):
        check_cache(config, held, 2)


# Caches made of ragged ones.


@given(
    st.sampled_from((3, 5)),
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.tuples(*[st.integers(0, 7)] * 2)),
            st.tuples(st.just("one"), st.tuples(*[st.integers(0, 1)] * 2)),
            st.tuples(st.just("size"), st.sampled_from((3, 5))),
        ),
        max_size=6,
    ),
)
@example(3, [("add", (2, 4)), ("one", (1, 0)), ("size", 5)])
@few
def test_the_ring_is_the_list_of_the_latest_tokens_of_each_row(capacity: int, moves) -> None:
    ring = AttentionCache(jnp.zeros((2, capacity, 1, 1)), jnp.zeros((2, capacity, 1, 2))).rowwise()
    counts, held = [0, 0], [[], []]
    for move, amount in moves:
        if move == "size":
            ring, held = ring.resized(amount), [tokens[-amount:] for tokens in held]
        else:
            size = 1 if move == "one" else 7
            new = np.array(counts)[:, None] + np.arange(1.0, size + 1)
            new = jnp.asarray(new, jnp.float32)[..., None, None]
            values = jnp.concatenate([new, -new], axis=-1)
            ring = ring.append(new, values, jnp.asarray(amount, jnp.int32))
            for row, n in enumerate(amount):
                held[row] = [*held[row], *range(counts[row], counts[row] + n)][-ring.capacity :]
                counts[row] += n
        positions = np.asarray(ring.positions())
        assert ring.count.tolist() == counts
        for row, kept in enumerate(held):
            assert sorted(p for p in positions[row].tolist() if p >= 0) == kept
            for p in kept:
                slot = positions[row].tolist().index(p)
                assert slot == p % ring.capacity
                assert float(ring.k[row, slot, 0, 0]) == p + 1
                assert ring.v[row, slot, 0].tolist() == [p + 1, -p - 1]


@pytest.mark.usefixtures("x64")
def test_rows_are_trimmed_each_at_its_own_end() -> None:
    model = wide(UNBOUNDED)
    (ids, mask), *_ = pieces("right")
    rows = jnp.asarray([2, 0])
    _, held = step(model, jnp.asarray(ids), None, jnp.asarray(mask))
    held = reserve_cache(trim_cache(index_cache(held, rows), 2), ROOM)
    assert held.position.tolist() == [7, 11]
    next_ids = IDS[np.asarray(rows), LENGTHS[np.asarray(rows)] - 1][:, None]
    logits, _ = step(model, jnp.asarray(next_ids), held)
    for place, row in enumerate(rows.tolist()):
        text = np.concatenate([IDS[row, : CALLS[0][row]], next_ids[place]])[None]
        seen = np.tri(text.shape[1], dtype=bool)
        with pytest.MonkeyPatch.context() as patch:
            for forgotten, equal in ((len(text[0]) - 3, True), (0, False)):
                seen[-1, :forgotten] = False
                seen[-1, forgotten:] = True
                patch.setattr(oracle, "visibility", lambda *_, seen=seen: seen)
                expected = oracle.forward(UNBOUNDED, wide_arrays(UNBOUNDED), text)[0, -1]
                assert (rel_l2(logits[place, 0], expected) <= EXACT) is equal


def test_an_unbounded_ragged_cache_grows_outside_of_jit_by_its_longest_row() -> None:
    held = init_cache(UNBOUNDED, 2, per_row=True)
    assert grown_cache(UNBOUNDED, held, jnp.asarray([4, 1])).layer_caches[0].attn.capacity == 4
    assert grown_cache(UNBOUNDED, held, jnp.asarray([1, 5])).layer_caches[0].attn.capacity == 8
    where = lambda c: c.layer_caches[0].attn.count  # noqa: E731
    held = eqx.tree_at(where, held, jnp.asarray([4, 1], jnp.int32))
    # 4 + 3 and 1 + 7 tokens are two chunks, 4 + 5 are three.
    assert grown_cache(UNBOUNDED, held, jnp.asarray([3, 7])).layer_caches[0].attn.capacity == 8
    assert grown_cache(UNBOUNDED, held, 5).layer_caches[0].attn.capacity == 12


# Compilation.


def test_ragged_decoding_compiles_once_and_donates(caplog) -> None:
    model = model_of(tiny(num_layers=1))
    ids, mask = pieces("left")[2]
    with (
        traced_checks(False),
        jax.log_compiles(),
        caplog.at_level(logging.WARNING, logger="jax"),
    ):
        _, held = step(model, jnp.asarray(ids), None, jnp.asarray(mask))
        _, held = decode_step(model, held, jnp.asarray(IDS[:, 0]))
        before = len(caplog.records)
        for column in IDS.T[1:7]:
            given, (_, held) = held, decode_step(model, held, jnp.asarray(column))
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
        assert not [r for r in caplog.records[before:] if "Compiling" in r.getMessage()]
    assert held.position.tolist() == [2 + 7, 5 + 7, 0 + 7, 6 + 7]
