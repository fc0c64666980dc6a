"""Caches as objects: made, trimmed, reordered, checked, donated, and of one structure."""

from __future__ import annotations

import logging
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalodon_jax import (
    AttentionCache,
    LayerCache,
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
from megalodon_jax.types import check_cache, filled_cache
from tests.helpers import EXACT, TINY, model_of, rel_l2, rounding_bound, tiny
from tests.megalodon_jax.layers.streams import (
    IDS,
    LAZILY,
    LOCAL,
    B,
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


@pytest.fixture
def unchecked_annotations(monkeypatch):
    """Annotations are checked in tests only; users meet the cache's own messages."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


# trim, index, init, check.


@given(st.integers(1, 5), splits)
@few
def test_a_trimmed_cache_has_forgotten_whatever_the_split(keep: int, split: list[int]) -> None:
    """The latest `keep` of 7 tokens are seen, and of what follows everything."""
    visible = chunk_local()
    visible[7:, : 7 - keep] = False
    with jax.enable_x64(True):
        _, held = streamed(wide(LOCAL), [6, 1])
        pieces = [n for n in completed([6, 1, *split])[2:] if n]
        logits, _ = streamed(wide(LOCAL), pieces, IDS[:, 7:], trim_cache(held, keep))
    assert rel_l2(logits, dense(LOCAL, visible, IDS)[:, 7:]) <= EXACT
    forgotten = not np.array_equal(visible, chunk_local())
    assert (rel_l2(logits, dense(LOCAL, chunk_local(), IDS)[:, 7:]) > EXACT) is forgotten


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize("change", [trim_cache, reserve_cache])
def test_a_cache_is_trimmed_and_reserved_by_a_positive_integer(change) -> None:
    empty = init_cache(LOCAL, B, **LAZILY)
    assert jax.tree.structure(change(empty, np.int64(1))) == jax.tree.structure(empty)
    for bad in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match=f"{change.__name__}: max_len={bad} must be at least"):
            change(empty, bad)


NEXT = {
    "trim_cache": lambda cache: trim_cache(cache, 2),
    "trim_cache that forgets nothing": lambda cache: trim_cache(cache, 99),
    "reserve_cache": lambda cache: reserve_cache(cache, 9),
    "reserve_cache with room": lambda cache: reserve_cache(cache, 1),
    "index_cache": lambda cache: index_cache(cache, jnp.arange(B, dtype=jnp.int32)),
    "no tokens": lambda cache: one_layer()(
        jnp.zeros((B, 0), jnp.int32), cache=cache, return_cache=True
    )[1],
    "one token": lambda cache: step(one_layer(), jnp.asarray(IDS[:, :1]), cache)[1],
}


def one_layer() -> MegalodonForCausalLM:
    return model_of(tiny(num_layers=1))


@pytest.mark.parametrize("name", NEXT)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_cache_made_of_another_shares_no_buffer_with_it(name: str, compiled: bool) -> None:
    """Else a donated call on one branch of a search deletes the other branch."""
    before = fresh(one_layer())
    change = eqx.filter_jit(NEXT[name]) if compiled else NEXT[name]
    after = change(before)
    assert not shared(after, before)
    assert not shared(after)
    assert shared(before, before), "the control: the count sees a shared buffer"
    for leaf in jax.tree.leaves(after):
        leaf.delete()
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(before))


def shared(*trees) -> bool:
    leaves = [leaf for tree in trees for leaf in jax.tree.leaves(tree)]
    return len({leaf.unsafe_buffer_pointer() for leaf in leaves}) < len(leaves)


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("mode", [{}, {"max_cache_len": 7}, {"cache_unbounded": True}])
@pytest.mark.parametrize("start", ["nothing", "a cache without arrays", "a stream"])
def test_no_tokens_return_a_cache_exactly_when_asked(asked: bool, mode, start: str) -> None:
    config = tiny(num_layers=1, **mode)
    model = eqx.filter_eval_shape(MegalodonForCausalLM, config, key=jax.random.key(0))

    def call(length: int, cache=None, asked: bool = True):
        ids = jnp.zeros((B, length), jnp.int32)
        return eqx.filter_eval_shape(
            lambda m, c: m(ids, cache=c, return_cache=asked)[1], model, cache
        )

    held = {
        "nothing": None,
        "a cache without arrays": eqx.filter_eval_shape(init_cache, config, B, **LAZILY),
        "a stream": call(3),
    }[start]
    after = call(0, held, asked)
    assert (after is not None) is asked
    if after is not None:
        assert signature(after) == signature(call(3))


def test_no_tokens_change_nothing_in_a_stream() -> None:
    model = one_layer()
    _, held = step(model, jnp.asarray(IDS[:, :3]))
    logits, after = model(jnp.zeros((B, 0), jnp.int32), cache=held, return_cache=True)
    assert logits.shape == (B, 0, TINY.vocab_size)
    assert distance(after, held) == 0


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


@pytest.mark.parametrize("bad", [-1, B])
@pytest.mark.traced_checks
def test_a_row_the_cache_does_not_have_is_refused(bad: int) -> None:
    held = init_cache(LOCAL, B, allocate_norm=True)
    rows, message = jnp.asarray([0, bad], jnp.int32), rf"indices must be in \[0, {B}\)"
    with pytest.raises(RuntimeError, match=message):
        index_cache(held, rows)
    with pytest.raises(eqx.EquinoxRuntimeError, match=message):
        jax.block_until_ready(eqx.filter_jit(index_cache)(held, rows))
    empty = init_cache(LOCAL, B, **LAZILY)
    assert jax.tree.structure(index_cache(empty, rows)) == jax.tree.structure(empty)


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize("rows", [jnp.zeros((), jnp.int32), jnp.zeros(2), jnp.ones(2, bool)])
def test_rows_that_are_no_vector_of_integers_are_refused(rows: jax.Array) -> None:
    held = init_cache(LOCAL, B, allocate_norm=True)
    received = re.escape(f"{rows.dtype} {rows.shape}")
    with pytest.raises(ValueError, match=rf"indices are {received}, expected integers \(K,\)"):
        index_cache(held, rows)


@pytest.mark.parametrize(
    ("changes", "capacity"), [({}, 4), ({"max_cache_len": 7}, 7), ({"cache_unbounded": True}, 4)]
)
def test_init_cache_allocates_what_it_is_asked_for(changes, capacity: int) -> None:
    config = tiny(compute_dtype="bfloat16", **changes)
    nothing = init_cache(config, 3, **LAZILY)
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


def test_init_cache_makes_every_array_unless_it_is_asked_for_some() -> None:
    every, parts = init_cache(TINY, B), ("kv", "norm", "ema")
    asked = {f"allocate_{part}": True for part in parts}
    assert signature(every) == signature(init_cache(TINY, B, **asked))
    for part, name in zip(parts, ("attn", "norm", "ema"), strict=True):
        others = {"attn", "norm", "ema"} - {name}
        only = init_cache(TINY, B, **{f"allocate_{part}": True}).layer_caches[0]
        assert {n for n in others if getattr(only, n) is not None} == set()
        without = init_cache(TINY, B, **{f"allocate_{part}": False}).layer_caches[0]
        assert {n for n in (*others, name) if getattr(without, n) is not None} == others


def test_filling_in_what_is_missing_leaves_a_stream_where_it_is() -> None:
    seven = jnp.asarray(7, jnp.int32)
    cache = ModelCache([LayerCache(position=seven)] * LOCAL.num_layers)
    filled = filled_cache(LOCAL, cache, B)
    assert [int(layer.position) for layer in filled.layer_caches] == [7] * LOCAL.num_layers
    assert None not in (filled.final_norm, filled.layer_caches[0].attn)


def test_caches_can_be_written_by_hand() -> None:
    """Whoever builds one names what it holds; each instance has counters of its own."""
    k, v = jnp.ones((B, 4, 2, 4)), jnp.ones((B, 4, 2, 6))
    ring = AttentionCache(k, v, jnp.asarray(6, jnp.int32))
    assert ring.positions().tolist() == [4, 5, 2, 3]
    assert AttentionCache(k, v).positions().tolist() == [-1] * 4
    assert not shared(AttentionCache(k, v), LayerCache(), LayerCache())
    nothing = ModelCache([LayerCache(), None])
    assert jax.tree.structure(nothing) == jax.tree.structure(init_cache(TINY, B, **LAZILY))
    ids, model = jnp.asarray(IDS[:, :3]), model_of(TINY)
    by_hand, _ = step(model, ids, nothing)

    def carried(model: MegalodonForCausalLM) -> jax.Array:
        return step(model, ids, init_cache(TINY, B))[0]

    # Two programs: one adds keys to a ring, and a library may sum its products in another order.
    assert rel_l2(by_hand, carried(model)) <= rounding_bound(carried, model)


def test_float16_keys_and_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"init_cache: dtype=float16 is refused.*Use bfloat16"):
        init_cache(TINY, B, jnp.float16, allocate_kv=True)


@pytest.mark.parametrize(
    ("other", "rows", "message"),
    [
        (tiny(num_layers=3), B, "cache has 3 layers, expected 2; .* init_cache"),
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


@pytest.mark.parametrize(
    ("model_changes", "cache_changes"),
    [
        ({"chunk_size": 8}, {"chunk_size": 4}),
        ({"chunk_size": 4, "max_cache_len": 9}, {"chunk_size": 4}),
        ({"chunk_size": 4, "max_cache_len": 9}, {"chunk_size": 4, "max_cache_len": 8}),
    ],
    ids=str,
)
def test_a_cache_with_too_little_room_is_refused(model_changes, cache_changes) -> None:
    config, other = tiny(num_layers=1, **model_changes), tiny(num_layers=1, **cache_changes)
    held = init_cache(other, B, allocate_kv=True)
    message = rf"has room for \d keys and \d values, .* at least {config.effective_max_cache_len}"
    with pytest.raises(ValueError, match=message):
        check_cache(config, held, B)
    ring = held.layer_caches[0].attn
    q, v = jnp.zeros((B, 1, 2, 4)), jnp.zeros((B, 1, 2, 6))
    with pytest.raises(ValueError, match=message):
        ChunkedAttention(config)(q, q, v, None, ring, True)
    # Room to spare is no harm: what a model may see is decided by its own window.
    check_cache(config, reserve_cache(held, 20), B)


def test_keys_and_values_of_unequal_number_are_refused() -> None:
    held = init_cache(TINY, B, allocate_kv=True)
    v = held.layer_caches[1].attn.v
    off = eqx.tree_at(lambda c: c.layer_caches[1].attn.v, held, jnp.concatenate([v, v], axis=1))
    with pytest.raises(ValueError, match="layer 1 attn has room for 4 keys and 8 values"):
        check_cache(TINY, off, B)


def test_the_final_norm_of_another_batch_is_refused() -> None:
    held = ModelCache(
        init_cache(TINY, B, **LAZILY).layer_caches,
        init_cache(TINY, 1, allocate_norm=True).final_norm,
    )
    with pytest.raises(ValueError, match=r"final_norm.*\(1,\), expected \(2,\)"):
        check_cache(TINY, held, B)


# Compilation, donation, dtypes.


@pytest.fixture
def compiled(caplog):
    """Names of what XLA was asked to compile."""
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        yield lambda: [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()]


@pytest.mark.parametrize("checks", [True, False])
def test_decode_compiles_once_and_donates_its_cache(compiled, checks: bool) -> None:
    """The program is started by one jit with checks and by another without."""
    with traced_checks(checks):
        decodes_once(compiled)


def decodes_once(compiled) -> None:
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


@pytest.mark.usefixtures("x64")
def test_two_beams_of_one_cache_can_be_decoded_with_donation() -> None:
    model = model_of(tiny(num_layers=1).with_dtype("float64"))
    _, held = step(model, jnp.asarray(IDS[:, :3]))
    expected, _ = step(model, jnp.asarray(IDS[:, 3:4]), held)
    branch = index_cache(held, jnp.asarray([1, 0], jnp.uint8))
    swapped, _ = decode_step(model, branch, jnp.asarray(IDS[::-1, 3]))
    logits, _ = decode_step(model, held, jnp.asarray(IDS[:, 3]))
    assert rel_l2(logits, expected[:, 0]) <= EXACT
    assert rel_l2(swapped, expected[::-1, 0]) <= EXACT


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.usefixtures("x64")
def test_decoding_is_the_forward_of_one_token(checks: bool) -> None:
    model = model_of(tiny(num_layers=1).with_dtype("float64"))
    with traced_checks(checks):
        _, held = step(model, jnp.asarray(IDS[:, :3]))
        expected, expected_cache = step(model, jnp.asarray(IDS[:, 3:4]), held)
        logits, after = decode_step(model, held, jnp.asarray(IDS[:, 3]))
    assert rel_l2(logits, expected[:, 0]) <= EXACT
    assert distance(after, expected_cache) <= EXACT


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
        lazy = eqx.filter_eval_shape(init_cache, config, B, **LAZILY)
        assert signature(run(1, lazy)) == signature(prefilled)
    layer = prefilled.layer_caches[0]
    assert layer.attn.k.dtype == layer.attn.v.dtype == config.compute_dtype
    assert layer.norm.mean.dtype == layer.norm.var.dtype == prefilled.final_norm.var.dtype == state
    assert jnp.real(jnp.zeros((), layer.ema.h.dtype)).dtype == state
    for counter in (layer.attn.count, layer.norm.count, layer.position):
        assert counter.dtype == jnp.int32
