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
from streams import (
    IDS,
    LOCAL,
    B,
    C,
    chunk_local,
    dense,
    distance,
    fresh,
    step,
    streamed,
    wide,
)

from megalodon_jax import (
    MegalodonConfig,
    MegalodonForCausalLM,
    ModelCache,
    index_cache,
    init_cache,
    trim_cache,
)
from megalodon_jax.inference import decode_step
from megalodon_jax.types import check_cache
from tests.helpers import EXACT, TINY, model_of, rel_l2, tiny


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def unchecked_annotations(monkeypatch):
    """Annotations are checked in tests only; users meet the cache's own messages."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


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


@pytest.mark.usefixtures("unchecked_annotations")
def test_trimming_to_what_fits_anyway_changes_nothing_and_to_nothing_is_refused() -> None:
    held = init_cache(LOCAL, B, allocate_kv=True)
    assert jax.tree.leaves(trim_cache(held, C))[0] is jax.tree.leaves(held)[0]
    empty = init_cache(LOCAL, B)
    assert jax.tree.structure(trim_cache(empty, 1)) == jax.tree.structure(empty)
    for bad in (0, -1, 2.5):
        with pytest.raises(ValueError, match=f"max_len={bad} must be at least 1.*init_cache"):
            trim_cache(held, bad)


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
    empty = init_cache(LOCAL, B)
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


def test_the_final_norm_of_another_batch_is_refused() -> None:
    held = ModelCache(
        init_cache(TINY, B).layer_caches, init_cache(TINY, 1, allocate_norm=True).final_norm
    )
    with pytest.raises(ValueError, match=r"final_norm.*\(1,\), expected \(2,\)"):
        check_cache(TINY, held, B)


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
