"""Streams: whatever the cuts, the window is the one of spec/model.md and the state is its own."""

from __future__ import annotations

import logging
from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalodon_jax import (
    AttentionCache,
    LayerCache,
    MegalodonConfig,
    MegalodonForCausalLM,
    ModelCache,
    index_cache,
    init_cache,
    trim_cache,
)
from megalodon_jax.inference import decode_step
from megalodon_jax.layers import ChunkedAttention
from megalodon_jax.types import check_cache, grown_cache
from parity import oracle
from tests.helpers import EXACT, TINY, arrays, logits_of, model_of, rel_l2, tiny, tokens

B, L, C = 2, 14, TINY.chunk_size
IDS = tokens(TINY, (B, L))
# One compilation each; 6 is longer than a chunk, and no piece divides one.
PIECES = (1, 3, 6)
splits = st.lists(st.sampled_from(PIECES), min_size=1, max_size=8)
few = settings(max_examples=10, derandomize=True, deadline=None)
LOCAL = TINY
SLIDING = tiny(num_layers=1, max_cache_len=6)
UNBOUNDED = tiny(num_layers=1, cache_unbounded=True)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@cache
def wide(config: MegalodonConfig) -> MegalodonForCausalLM:
    return model_of(config.with_dtype("float64"))


@eqx.filter_jit
def step(model, ids, cache=None, mask=None):
    return model(ids, mask, cache=cache, return_cache=True)


def fresh(model: MegalodonForCausalLM, rows: int = B) -> ModelCache:
    return init_cache(model.config, rows, allocate_kv=True, allocate_norm=True, allocate_ema=True)


def completed(split: list[int]) -> list[int]:
    """The split cut to L tokens, its rest fed token by token."""
    pieces: list[int] = []
    for n in split:
        if sum(pieces) + n <= L:
            pieces.append(n)
    return pieces + [1] * (L - sum(pieces))


def streamed(model, pieces, ids=IDS, cache=None) -> tuple[np.ndarray, ModelCache]:
    cache, start, parts = fresh(model) if cache is None else cache, 0, []
    for n in pieces:
        logits, cache = step(model, jnp.asarray(ids[:, start : start + n]), cache)
        parts.append(np.asarray(logits))
        start += n
    return np.concatenate(parts, axis=1), cache


def distance(left: ModelCache, right: ModelCache) -> float:
    """Largest relative L2 over the leaves; infinite where a dtype or an integer differs."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    worst = 0.0
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        exact = a.dtype == b.dtype and (a.dtype != jnp.int32 or np.array_equal(a, b))
        worst = max(worst, rel_l2(a, b) if exact else np.inf)
    return worst


# The visibility rule, written from spec/model.md, and a dense evaluation of it.


def chunk_local(length: int = L) -> np.ndarray:
    position = np.arange(length)
    same = position[:, None] // C == position[None, :] // C
    return same & np.tri(length, dtype=bool)


def window(pieces: list[int], size: int) -> np.ndarray:
    """Blocks of at most C tokens from the start of each call; keys cut to the last `size`."""
    visible, start = np.zeros((sum(pieces), sum(pieces)), bool), 0
    for n in pieces:
        for begin in range(start, start + n, C):
            end = min(begin + C, start + n)
            for query in range(begin, end):
                visible[query, max(0, end - size) : query + 1] = True
        start += n
    return visible


def dense(config: MegalodonConfig, visible: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Logits of the oracle with one visibility matrix (L, L) in the place of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "visibility", lambda *_: visible)
        return oracle.forward(config, weights(config), ids)


@cache
def weights(config: MegalodonConfig) -> dict[str, np.ndarray]:
    return {name: w.astype(np.float64) for name, w in arrays(config).items()}


def test_the_dense_evaluation_is_the_oracle_where_the_oracle_goes() -> None:
    expected = oracle.forward(LOCAL, weights(LOCAL), IDS)
    assert rel_l2(dense(LOCAL, chunk_local(), IDS), expected) <= EXACT
    assert rel_l2(dense(LOCAL, np.tri(L, dtype=bool), IDS), expected) > EXACT


# Chunk-local.


@cache
def whole_call() -> tuple[np.ndarray, ModelCache]:
    logits, cache = step(wide(LOCAL), jnp.asarray(IDS))
    return np.asarray(logits), cache


@given(splits)
@few
def test_any_split_of_a_chunk_local_stream_is_the_full_forward(split: list[int]) -> None:
    with jax.enable_x64(True):
        full = logits_of(wide(LOCAL), jnp.asarray(IDS), None)
        logits, held = streamed(wide(LOCAL), completed(split))
        assert rel_l2(logits, full) <= EXACT
        assert distance(held, whole_call()[1]) <= EXACT


@pytest.mark.usefixtures("x64")
def test_the_stream_is_the_oracle_and_needs_its_cache() -> None:
    expected = oracle.forward(LOCAL, weights(LOCAL), IDS)
    assert rel_l2(whole_call()[0], expected) <= EXACT
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
def test_the_states_after_prefill_are_those_of_the_recurrences() -> None:
    seen: dict[str, np.ndarray] = {}
    oracle.forward(LOCAL, weights(LOCAL), IDS, tap=lambda n, v: seen.setdefault(n, v))
    held = whole_call()[1]
    for i, layer in enumerate(held.layer_caches):
        name = f"model.layers.{i}.attn.cema."
        w = {n.removeprefix(name): a for n, a in weights(LOCAL).items() if n.startswith(name)}
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


# Unbounded.


@pytest.mark.usefixtures("x64")
def test_an_unbounded_stream_sees_everything() -> None:
    model = wide(UNBOUNDED)
    expected = dense(UNBOUNDED, np.tri(L, dtype=bool), IDS)
    assert rel_l2(step(model, jnp.asarray(IDS))[0], expected) <= EXACT
    logits, held = streamed(model, [6, 3, 3, 1, 1], cache=resized(fresh(model), 16))
    assert rel_l2(logits, expected) <= EXACT
    assert held.layer_caches[0].attn.capacity == 16


def resized(held: ModelCache, capacity: int) -> ModelCache:
    layers = tuple(
        LayerCache(c.attn.resized(capacity), c.norm, c.ema, c.position) for c in held.layer_caches
    )
    return ModelCache(layers, held.final_norm)


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

    before = eqx.filter_jit(part)(0, 3, None)
    assert (before.capacity, int(before.count)) == (C, 3)
    after = part(3, 6, before)
    assert (after.capacity, int(after.count)) == (2 * C, 6)
    assert np.array_equal(after.k[:, :3], before.k[:, :3])
    assert np.array_equal(after.v[:, :6], v[:, :6])
    assert part(6, 7, after).capacity == after.capacity


@pytest.mark.usefixtures("x64")
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
        assert int(ring.count) == count
        assert len(positions) == ring.capacity
        assert all(p == -1 or p % ring.capacity == slot for slot, p in enumerate(positions))
        assert sorted(p for p in positions if p >= 0) == [
            p for p in range(count) if p >= count - ring.capacity
        ]
        for p in held:
            slot = positions.index(p)
            assert float(ring.k[0, slot, 0, 0]) == p + 1
            assert ring.v[0, slot, 0].tolist() == [p + 1, -p - 1]


@pytest.mark.usefixtures("x64")
def test_an_unbounded_stream_does_not_see_what_was_trimmed_when_it_grows_again() -> None:
    model, pieces = wide(UNBOUNDED), [6, 3]
    _, held = step(model, jnp.asarray(IDS[:, :6]))
    grown = resized(trim_cache(held, 3), 12)
    logits, _ = step(model, jnp.asarray(IDS[:, 6:9]), grown)
    visible = np.tri(sum(pieces), dtype=bool)
    visible[6:, :3] = False
    assert rel_l2(logits, dense(UNBOUNDED, visible, IDS[:, :9])[:, 6:]) <= EXACT


# trim, index, init, check.


@pytest.mark.usefixtures("x64")
def test_a_trimmed_cache_sees_the_latest_tokens_only() -> None:
    model = wide(LOCAL)
    _, held = streamed(model, [6, 1])
    trimmed = trim_cache(held, 2)
    assert {layer.attn.capacity for layer in trimmed.layer_caches} == {2}
    logits, _ = step(model, jnp.asarray(IDS[:, 7:8]), trimmed)
    visible = chunk_local(8)
    visible[7] = np.arange(8) >= 6
    assert rel_l2(logits, dense(LOCAL, visible, IDS[:, :8])[:, 7:]) <= EXACT
    assert rel_l2(logits, dense(LOCAL, chunk_local(8), IDS[:, :8])[:, 7:]) > EXACT
    for before, after in zip(held.layer_caches, trimmed.layer_caches, strict=True):
        assert (after.norm, after.ema, after.position) == (before.norm, before.ema, before.position)
    assert trimmed.final_norm is held.final_norm


def test_trimming_to_what_fits_anyway_changes_nothing_and_to_nothing_is_refused() -> None:
    held = init_cache(LOCAL, B, allocate_kv=True)
    assert jax.tree.leaves(trim_cache(held, C))[0] is jax.tree.leaves(held)[0]
    empty = init_cache(LOCAL, B)
    assert jax.tree.structure(trim_cache(empty, 1)) == jax.tree.structure(empty)
    with pytest.raises(ValueError, match="max_len=0 must be at least 1"):
        trim_cache(held, 0)


@pytest.mark.parametrize("rows", [[1, 0], [1, 1]])
@pytest.mark.usefixtures("x64")
def test_reordered_beams_are_the_reordered_rows_run_again(rows: list[int]) -> None:
    model = wide(LOCAL)
    _, held = streamed(model, [6])
    moved = index_cache(held, jnp.asarray(rows, jnp.int32))
    logits, after = step(model, jnp.asarray(IDS[:, 6:9]), moved)
    again = np.concatenate([IDS[rows, :6], IDS[:, 6:9]], axis=1)
    expected, held_again = streamed(model, [6, 3], again)
    assert rel_l2(logits, expected[:, 6:]) <= EXACT
    assert distance(after, held_again) <= EXACT
    unmoved, _ = step(model, jnp.asarray(IDS[:, 6:9]), held)
    assert rel_l2(unmoved, expected[:, 6:]) > EXACT


@pytest.mark.parametrize(
    ("changes", "capacity"), [({}, 4), ({"max_cache_len": 7}, 7), ({"cache_unbounded": True}, 4)]
)
def test_init_cache_allocates_what_it_is_asked_for(changes, capacity: int) -> None:
    config = tiny(compute_dtype="bfloat16", **changes)
    nothing = init_cache(config, 3)
    assert [leaf.shape for leaf in jax.tree.leaves(nothing)] == [()] * config.num_layers
    assert int(nothing.position) == 0
    kv = init_cache(config, 3, allocate_kv=True).layer_caches[1]
    assert kv.norm is kv.ema is None
    assert (kv.attn.k.shape, kv.attn.v.shape) == ((3, capacity, 2, 4), (3, capacity, 2, 6))
    assert kv.attn.k.dtype == kv.attn.v.dtype == jnp.bfloat16
    assert int(kv.attn.count) == 0
    other = init_cache(config, 3, jnp.float32, allocate_kv=True).layer_caches[0].attn
    assert other.k.dtype == other.v.dtype == jnp.float32
    norm = init_cache(config, 3, allocate_norm=True)
    assert norm.layer_caches[0].attn is norm.layer_caches[0].ema is None
    for state in (norm.final_norm, norm.layer_caches[1].norm):
        assert (state.count.tolist(), state.count.dtype) == ([0] * 3, jnp.int32)
        assert (state.mean.tolist(), state.var.tolist()) == ([[0.0] * 2] * 3, [[1.0] * 2] * 3)
        assert state.mean.dtype == state.var.dtype == jnp.float32
    ema = init_cache(config, 3, allocate_ema=True)
    assert ema.final_norm is ema.layer_caches[0].attn is ema.layer_caches[0].norm is None
    h = ema.layer_caches[0].ema.h
    assert (h.shape, h.dtype) == ((3, 8, 2), jnp.complex64)
    assert not np.any(h)


def test_float16_keys_and_values_are_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        init_cache(TINY, B, jnp.float16, allocate_kv=True)


@pytest.mark.parametrize(
    ("other", "rows", "message"),
    [
        (tiny(num_layers=3), B, "cache has 3 layers, expected 2"),
        (TINY, 3, r"layer 0 attn.k has shape \(3, 4, 2, 4\), expected \(2, None, 2, 4\)"),
        (tiny(num_heads=1), B, r"layer 0 attn.k has shape \(2, 4, 1, 8\)"),
        (tiny(value_dim=8), B, r"layer 0 attn.v has shape \(2, 4, 2, 4\), expected .* 6\)"),
        (tiny(norm_num_groups=4), B, r"layer 0 norm.mean has shape \(2, 4\), expected \(2, 2\)"),
        (tiny(cema_ndim=3), B, r"layer 0 ema.h has shape \(2, 8, 3\), expected \(2, 8, 2\)"),
    ],
)
def test_a_cache_of_another_model_or_batch_is_refused(other, rows: int, message: str) -> None:
    held = init_cache(other, rows, allocate_kv=True, allocate_norm=True, allocate_ema=True)
    with pytest.raises(ValueError, match=message):
        model_of(TINY)(jnp.asarray(IDS), cache=held)
    check_cache(other, held, rows)


def test_the_final_norm_of_another_batch_is_refused() -> None:
    held = ModelCache(
        init_cache(TINY, B).layer_caches, init_cache(TINY, 1, allocate_norm=True).final_norm
    )
    with pytest.raises(ValueError, match=r"final_norm.*\(1,\), expected \(2,\)"):
        check_cache(TINY, held, B)


# Masks, and nothing at all.


def test_a_padded_mask_and_a_cache_are_refused_and_a_full_mask_is_not() -> None:
    model, ids = model_of(tiny(num_layers=1)), jnp.asarray(IDS[:, :3])
    full, message = jnp.ones((B, 3), bool), "a cache and a mask with padding do not go together"
    padded = full.at[1, 2].set(False)
    with pytest.raises(RuntimeError, match=message):
        model(ids, padded, cache=fresh(model))
    with pytest.raises(eqx.EquinoxRuntimeError, match=message):
        jax.block_until_ready(step(model, ids, fresh(model), padded))
    masked, bare = step(model, ids, fresh(model), full), step(model, ids, fresh(model))
    assert rel_l2(masked[0], bare[0]) <= EXACT
    assert np.all(np.isfinite(logits_of(model, ids, padded)))


def test_no_tokens_keep_the_cache_and_no_rows_have_an_empty_one() -> None:
    model = model_of(LOCAL)
    held = fresh(model)
    logits, after = model(jnp.zeros((B, 0), jnp.int32), cache=held, return_cache=True)
    assert logits.shape == (B, 0, LOCAL.vocab_size)
    assert after is held
    nobody = jax.eval_shape(step, model, jnp.zeros((0, 3), jnp.int32), fresh(model, 0))
    assert nobody[0].shape == (0, 3, LOCAL.vocab_size)
    assert nobody[1].layer_caches[1].attn.k.shape == (0, C, 2, 4)


def test_a_stream_of_no_rows_runs() -> None:
    model = model_of(tiny(num_layers=1))
    logits, held = step(model, jnp.zeros((0, 3), jnp.int32), fresh(model, 0))
    assert (logits.shape, int(held.position)) == ((0, 3, LOCAL.vocab_size), 3)


# Compilation, donation, dtypes.


@pytest.fixture
def compiled(caplog):
    """Names of what XLA was asked to compile."""
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        yield lambda: [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()]


def test_decode_compiles_once_and_donates_its_cache(compiled) -> None:
    model = model_of(tiny(num_layers=1))
    columns = [jnp.asarray(IDS[:, t]) for t in range(8)]
    _, held = step(model, jnp.asarray(IDS[:, :3]))
    _, held = decode_step(model, held, columns[0])
    before = len(compiled())
    assert any("_decode" in name for name in compiled())
    for column in columns[1:6]:
        given = held
        _, held = decode_step(model, held, column)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
        assert not column.is_deleted()
    assert len(compiled()) == before
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(model))
    # The control: the count sees a compilation when there is one.
    _, other = step(model, jnp.asarray(IDS[:1, :3]))
    decode_step(model, other, columns[0][:1])
    assert len(compiled()) > before


def test_decoding_is_the_forward_of_one_token() -> None:
    model = model_of(tiny(num_layers=1))
    _, held = step(model, jnp.asarray(IDS[:, :3]))
    expected, expected_cache = step(model, jnp.asarray(IDS[:, 3:4]), held)
    logits, after = decode_step(model, held, jnp.asarray(IDS[:, 3]))
    assert np.array_equal(logits, expected[:, 0])
    assert distance(after, expected_cache) == 0


def signature(tree):
    return jax.tree.structure(tree), [
        (leaf.shape, leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(tree)
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_cache_len": 7},
        {"cache_unbounded": True},
        {"compute_dtype": "bfloat16"},
        {"compute_dtype": "bfloat16", "param_dtype": "bfloat16"},
        {"compute_dtype": "bfloat16", "accum_dtype": "bfloat16"},
    ],
)
def test_a_cache_keeps_its_structure_and_dtypes(changes) -> None:
    config = tiny(**changes)
    assert_kept(config, jnp.float32)


@pytest.mark.usefixtures("x64")
def test_a_float64_cache_is_float64_throughout() -> None:
    assert_kept(TINY.with_dtype("float64"), jnp.float64)


def assert_kept(config: MegalodonConfig, state: jnp.dtype) -> None:
    model = eqx.filter_eval_shape(MegalodonForCausalLM, config, key=jax.random.key(0))

    def run(length, cache=None):
        ids = jnp.zeros((B, length), jnp.int32)
        return eqx.filter_eval_shape(
            lambda m, c: m(ids, cache=c, return_cache=True)[1], model, cache
        )

    allocated = eqx.filter_eval_shape(lambda: fresh(model))
    prefilled = run(4)
    assert signature(prefilled) == signature(allocated)
    if not config.cache_unbounded:
        assert signature(run(1, prefilled)) == signature(prefilled)
        assert signature(run(9, prefilled)) == signature(prefilled)
        assert signature(run(1, eqx.filter_eval_shape(init_cache, config, B))) == signature(
            prefilled
        )
    layer = prefilled.layer_caches[0]
    assert layer.attn.k.dtype == layer.attn.v.dtype == config.compute_dtype
    assert layer.norm.mean.dtype == layer.norm.var.dtype == prefilled.final_norm.var.dtype == state
    assert jnp.real(jnp.zeros((), layer.ema.h.dtype)).dtype == state
    for counter in (layer.attn.count, layer.norm.count, layer.position):
        assert counter.dtype == jnp.int32


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("position", [31, 32, 127, 128, 510, 511, 512])
def test_a_long_chunk_is_read_only_as_far_as_it_is_filled(position: int) -> None:
    """Around every size of the ring's front: one token against the whole text at once."""
    config = tiny(chunk_size=512).with_dtype("float64")
    layer, length = ChunkedAttention(config), position + 1
    rng = np.random.default_rng(4)
    q, k = jnp.asarray(rng.standard_normal((2, 1, length, config.num_heads, config.head_dim)))
    v = jnp.asarray(rng.standard_normal((1, length, config.num_heads, config.value_head_dim)))
    whole, _ = layer(q, k, v)
    _, ring = layer(q[:, :-1], k[:, :-1], v[:, :-1], None, None, True)
    last, _ = layer(q[:, -1:], k[:, -1:], v[:, -1:], None, ring, True)
    assert rel_l2(last, whole[:, -1:]) <= EXACT
    if position % 512:
        forgotten = ring.v.at[:, position - 1].set(0.0)
        ring = AttentionCache(ring.k, forgotten, ring.count, ring.first)
        last, _ = layer(q[:, -1:], k[:, -1:], v[:, -1:], None, ring, True)
        assert rel_l2(last, whole[:, -1:]) > EXACT
