"""RoPE, softmax attention and its chunks."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megalodon_jax.layers import ChunkedAttention, RotaryEmbedding
from megalodon_jax.layers.attention import attend
from parity.megalodon import oracle
from tests.helpers import EXACT, TINY, rel_l2, tiny

B, L, H, d, e = 2, 10, 2, 4, 6


def qkv(length: int = L) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = ((B, length, H, d), (B, length, H, d), (B, length, H, e))
    q, k, v = (jnp.asarray(rng.standard_normal(shape)) for shape in shapes)
    return q, k, v


def only(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


@pytest.mark.usefixtures("x64")
def test_rotation_preserves_the_length_of_every_pair() -> None:
    q, k, _ = qkv()
    for x, y in zip((q, k), RotaryEmbedding(d)(q, k, 7), strict=True):
        pairs = np.hypot(*np.split(np.asarray(x), 2, -1))
        assert rel_l2(np.hypot(*np.split(np.asarray(y), 2, -1)), pairs) <= EXACT


@pytest.mark.usefixtures("x64")
def test_scores_depend_on_relative_position_only() -> None:
    q, k, _ = qkv()
    rope = RotaryEmbedding(d)

    def scores(start: int) -> np.ndarray:
        return np.einsum("bqhd,bkhd->bhqk", *rope(q, k, start))

    assert rel_l2(scores(1000), scores(0)) <= EXACT
    shifted = np.einsum("bqhd,bkhd->bhqk", rope(q, k, 1)[0], rope(q, k, 0)[1])
    assert rel_l2(shifted, scores(0)) > EXACT


@pytest.mark.usefixtures("x64")
def test_rotation_is_the_one_of_the_oracle_and_start_index_continues_it() -> None:
    q, k, _ = qkv()
    whole, _ = RotaryEmbedding(d)(q, k)
    assert rel_l2(whole, oracle.rope(TINY, np.asarray(q))) <= EXACT
    rest, _ = RotaryEmbedding(d)(q[:, 4:], k[:, 4:], jnp.asarray(4, jnp.int32))
    assert rel_l2(rest, whole[:, 4:]) <= EXACT


def test_far_positions_keep_their_angle_in_float32() -> None:
    cos, _ = RotaryEmbedding(2).tables(999_983, 16, jnp.float32)
    positions = np.arange(999_983, 999_999, dtype=np.float64)
    exact = np.cos(positions)
    slow = RotaryEmbedding(64)
    rates = 10_000.0 ** (-np.arange(32) / 32)
    truth = np.cos(positions[:, None] * rates)
    naive = np.cos(positions.astype(np.float32)[:, None] * rates.astype(np.float32))
    ours = np.asarray(slow.tables(999_983, 16, jnp.float32)[0])[:, 0]
    assert np.abs(np.asarray(cos)[:, 0, 0] - exact).max() <= jnp.finfo(jnp.float32).eps
    assert np.abs(ours - truth).max() <= jnp.finfo(jnp.float32).eps < np.abs(naive - truth).max()


def test_an_odd_width_cannot_rotate() -> None:
    with pytest.raises(ValueError, match="dim=5 must be even"):
        RotaryEmbedding(5)


@pytest.mark.usefixtures("x64")
def test_attend_is_softmax_with_scale_one() -> None:
    q, k, v = qkv(5)
    mask = np.tril(np.ones((5, 5), bool))
    out = attend(q, k, v, jnp.asarray(mask)[None], TINY.with_dtype("float64"))
    expected = oracle.attend(*(np.asarray(a) for a in (q, k, v)), mask[None])
    assert rel_l2(out, expected) <= EXACT
    halved = attend(q * 0.5, k, v, jnp.asarray(mask)[None], TINY.with_dtype("float64"))
    assert rel_l2(halved, expected) > EXACT


def test_a_query_without_a_key_gets_zero_and_no_gradient() -> None:
    inputs = tuple(only(a) for a in qkv(5))
    mask = jnp.ones((B, 5, 5), bool).at[:, 2].set(False)
    out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, mask, TINY), *inputs)
    assert not np.any(out[:, 2])
    assert np.all(np.any(np.asarray(out) != 0, axis=(2, 3))[:, [0, 1, 3, 4]])
    grads = pullback(jnp.ones_like(out))
    assert all(np.all(np.isfinite(g)) for g in grads)
    assert not np.any(grads[0][:, 2])
    none = jnp.zeros((B, 5, 5), bool)
    assert all(not np.any(g) for g in jax.grad(total, (0, 1, 2))(*inputs, none))


def total(q, k, v, mask):
    return attend(q, k, v, mask, TINY).sum()


def test_a_masked_key_has_no_influence_and_a_visible_one_has() -> None:
    q, k, v = (only(a) for a in qkv(5))
    changed = (q, k.at[:, 1].add(1.0), v.at[:, 1].add(1.0))
    hidden = jnp.ones((B, 5, 5), bool).at[:, :, 1].set(False)
    assert np.array_equal(attend(*changed, hidden, TINY), attend(q, k, v, hidden, TINY))
    seen = jnp.ones_like(hidden)
    assert not np.array_equal(attend(*changed, seen, TINY), attend(q, k, v, seen, TINY))


def test_huge_scores_do_not_overflow() -> None:
    q, k, v = (only(a) for a in qkv(5))
    out = attend(1e4 * q, 1e4 * k, v, jnp.ones((B, 5, 5), bool), TINY)
    assert np.all(np.isfinite(out))


@eqx.filter_jit
def chunked(layer, q, k, v, mask=None):
    return layer(q, k, v, mask)[0]


def test_chunks_do_not_see_each_other_and_see_only_their_past() -> None:
    layer = ChunkedAttention(TINY)
    before = tuple(only(a) for a in qkv())
    t, C = 5, TINY.chunk_size
    after = tuple(a.at[:, t].add(1.0) for a in before)
    same = np.all(np.asarray(chunked(layer, *before) == chunked(layer, *after)), axis=(0, 2, 3))
    assert same.tolist() == [not t <= position < 2 * C for position in range(L)]


@pytest.mark.parametrize("length", [3, 8, 10])
@pytest.mark.usefixtures("x64")
def test_chunks_and_tail_are_those_of_the_plain_loop(length: int) -> None:
    q, k, v = qkv(length)
    config, C = TINY.with_dtype("float64"), TINY.chunk_size
    mask = np.random.default_rng(1).random((B, length)) < 0.7
    rotated = [oracle.rope(config, np.asarray(a)) for a in (q, k)]
    parts = []
    for start in range(0, length, C):
        inputs = (a[:, start : start + C] for a in (*rotated, np.asarray(v)))
        valid = mask[:, start : start + C]
        causal = np.tril(np.ones((valid.shape[1],) * 2, bool))
        parts.append(oracle.attend(*inputs, causal & valid[:, None, :]))
    expected = np.concatenate(parts, axis=1)
    out = chunked(ChunkedAttention(config), q, k, v, jnp.asarray(mask))
    assert rel_l2(out, expected) <= EXACT
    wider = chunked(
        ChunkedAttention(tiny(chunk_size=2).with_dtype("float64")), q, k, v, jnp.asarray(mask)
    )
    assert rel_l2(wider, expected) > EXACT
