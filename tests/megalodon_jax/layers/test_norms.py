"""Norms: streaming equals whole, masks do not count, and large offsets keep their digits."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megalodon_jax import NormState
from megalodon_jax.layers import LayerNorm, RMSNorm, TimestepNorm
from megalodon_jax.weights import abstract_model
from tests.helpers import EXACT, TINY, model_of, rel_l2, roundoff, tiny

B, L, D, G = 2, 11, 6, 3
VALID = np.array([1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1], bool)


def norm_of(dtype="float64", affine: bool = True) -> TimestepNorm:
    norm = TimestepNorm(D, G, affine=affine, dtype=jnp.dtype(dtype))
    if not affine:
        return norm
    weight, bias = np.random.default_rng(0).standard_normal((2, D))
    values = (jnp.asarray(weight, dtype), jnp.asarray(bias, dtype))
    return eqx.tree_at(lambda n: (n.weight, n.bias), norm, values)


def signal(length: int = L, offset: float = 0.0) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((B, length, D)) + offset


@eqx.filter_jit
def run(norm, x, state=None, mask=None):
    return norm(x, state, mask)


def by_definition(x: np.ndarray, dtype: type, eps: float = 1e-5) -> np.ndarray:
    """The sums of docs/model.md "TimestepNorm" taken as they are written, in one dtype."""
    groups = x.astype(dtype).reshape(B, -1, G, D // G)
    mu = groups.mean(-1, dtype=dtype)
    n = np.arange(1, mu.shape[1] + 1, dtype=dtype)[:, None]
    mean = np.cumsum(mu, axis=1, dtype=dtype) / n
    previous = np.concatenate([np.zeros_like(mean[:, :1]), mean[:, :-1]], axis=1)
    m2 = 1 + np.cumsum((mu - previous) * (mu - mean), axis=1, dtype=dtype)
    var = np.maximum(m2 / n, dtype(1e-6))
    y = (groups - mean[..., None]) / np.sqrt(var + dtype(eps))[..., None]
    return y.reshape(x.shape)


def assert_states_equal(left: NormState, right: NormState) -> None:
    assert np.array_equal(left.count, right.count)
    assert rel_l2(left.mean, right.mean) <= EXACT
    assert rel_l2(left.var, right.var) <= EXACT


@pytest.mark.usefixtures("x64")
def test_statistics_run_over_the_group_means_as_the_specification_writes_them() -> None:
    norm, x = norm_of(), signal()
    expected = by_definition(x, np.float64)
    scaled = expected * (np.asarray(norm.weight) + 1) + np.asarray(norm.bias)
    assert rel_l2(run(norm, jnp.asarray(x))[0], scaled) <= EXACT
    assert rel_l2(run(norm_of(affine=False), jnp.asarray(x))[0], expected) <= EXACT


@pytest.mark.usefixtures("x64")
def test_two_halves_with_the_state_between_are_the_whole() -> None:
    norm, x = norm_of(), jnp.asarray(signal(offset=3.0))
    whole, end = run(norm, x)
    first, middle = run(norm, x[:, :4])
    second, last = run(norm, x[:, 4:], middle)
    assert rel_l2(jnp.concatenate([first, second], 1), whole) <= EXACT
    assert_states_equal(last, end)
    forgotten, _ = run(norm, x[:, 4:])
    assert rel_l2(forgotten, whole[:, 4:]) > EXACT


@pytest.mark.usefixtures("x64")
def test_a_stream_that_starts_with_one_token_is_the_whole() -> None:
    """One token has an update of its own, which must leave the variance 1 of a fresh stream."""
    norm, x = norm_of(), jnp.asarray(signal())
    whole, _ = run(norm, x)
    first, state = run(norm, x[:, :1])
    second, _ = run(norm, x[:, 1:2], state)
    assert rel_l2(jnp.concatenate([first, second], axis=1), whole[:, :2]) <= EXACT


@pytest.mark.usefixtures("x64")
def test_masked_tokens_alone_leave_any_state_as_it_is() -> None:
    masked = jnp.zeros((B, L), bool)
    for count in (0, 5):
        moments = (jnp.full((B, G), value) for value in (-0.5, 4.0))
        state = NormState(jnp.full(B, count, jnp.int32), *moments)
        _, after = run(norm_of(), jnp.asarray(signal()), state, masked)
        assert np.array_equal(after.count, state.count)
        assert rel_l2(after.var, state.var) <= EXACT
        # Before the first token the mean is the origin of what follows, and carries nothing.
        assert count == 0 or rel_l2(after.mean, state.mean) <= EXACT


@pytest.mark.usefixtures("x64")
def test_masked_tokens_do_not_enter_the_statistics() -> None:
    norm, x = norm_of(), jnp.asarray(signal())
    mask = jnp.broadcast_to(jnp.asarray(VALID), (B, L))
    masked, end = run(norm, x, None, mask)
    dense, dense_end = run(norm, x[:, VALID])
    assert rel_l2(masked[:, VALID], dense) <= EXACT
    assert_states_equal(end, dense_end)
    assert rel_l2(run(norm, x)[0][:, VALID], dense) > EXACT


@pytest.mark.usefixtures("x64")
def test_before_the_first_valid_token_the_carried_statistics_hold() -> None:
    norm, x = norm_of(affine=False), jnp.asarray(signal())
    mask = jnp.broadcast_to(jnp.arange(L) >= 3, (B, L))
    y, end = run(norm, x, None, mask)
    assert rel_l2(y[:, :3], x[:, :3] / np.sqrt(1 + norm.eps)) <= EXACT
    rest, rest_end = run(norm, x[:, 3:])
    assert rel_l2(y[:, 3:], rest) <= EXACT
    assert_states_equal(end, rest_end)


@pytest.mark.usefixtures("x64")
def test_a_fully_masked_call_keeps_the_state() -> None:
    norm = norm_of()
    _, before = run(norm, jnp.asarray(signal()))
    _, after = run(norm, jnp.asarray(signal(5)), before, jnp.zeros((B, 5), bool))
    assert_states_equal(after, before)


def test_a_stream_of_single_tokens_rounds_its_variance_once_per_token() -> None:
    """A variance that is rebuilt from the sum of squares would be rounded three times."""
    turns, groups = 512, 64
    x = np.random.default_rng(0).normal(size=(8, turns, groups)).astype(np.float32)
    fresh = NormState.fresh(8, groups, jnp.float32)
    norm = TimestepNorm(groups, groups, affine=False)

    def step(state: NormState, token: jax.Array) -> tuple[NormState, None]:
        return norm(token[:, None], state)[1], None

    last, _ = eqx.filter_jit(jax.lax.scan)(step, fresh, jnp.swapaxes(jnp.asarray(x), 0, 1))
    # A fresh stream has the variance 1, which counts like one token's.
    wide = x.astype(np.float64)
    exact = (1 + np.square(wide - wide.mean(1, keepdims=True)).sum(1)) / turns
    error = np.sqrt(np.mean(np.square(np.asarray(last.var, np.float64) / exact - 1)))
    # A rounding error is uniform and a leading digit logarithmic: 0.18 of the square of a unit.
    # Of what token k lost the share k / turns is left, a third of the squares.
    once = np.finfo(np.float32).eps / 2 * np.sqrt(0.18 * turns / 3)
    assert once / 1.5 < error < 1.5 * once


def test_a_large_common_offset_costs_fewer_digits_than_plain_sums() -> None:
    x = signal(512, offset=1000.0).astype(np.float32)
    expected = by_definition(x, np.float64)
    plain = rel_l2(by_definition(x, np.float32), expected)
    ours = rel_l2(run(norm_of("float32", affine=False), jnp.asarray(x))[0], expected)
    assert ours < plain / 4


def test_an_empty_sequence_keeps_the_state() -> None:
    state = NormState(jnp.full(B, 3, jnp.int32), jnp.full((B, G), 2.0), jnp.full((B, G), 0.5))
    y, kept = norm_of("float32")(jnp.zeros((B, 0, D)), state)
    assert y.shape == (B, 0, D)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(state), strict=True)
    )


def test_a_constant_stream_is_floored_not_infinite() -> None:
    state = NormState(jnp.full(B, 10**6, jnp.int32), jnp.ones((B, G)), jnp.zeros((B, G)))
    y, end = norm_of("float32", affine=False)(jnp.ones((B, 1, D)), state)
    assert not np.any(y)
    assert np.array_equal(end.var, np.full((B, G), 1e-6, np.float32))


def test_groups_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="num_features=6 must be a multiple of num_groups=4"):
        TimestepNorm(6, 4)


def scaled(norm):
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(a.shape), a.dtype), norm)


@pytest.mark.usefixtures("x64")
def test_rmsnorm_divides_by_the_root_mean_square_and_multiplies_by_one_plus_gamma() -> None:
    x = signal()
    norm = scaled(RMSNorm(D, dtype=jnp.float64))
    plain = x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.eps)
    assert rel_l2(norm(jnp.asarray(x)), plain * (np.asarray(norm.gamma) + 1)) <= EXACT
    assert rel_l2(RMSNorm(D, dtype=jnp.float64)(jnp.asarray(x)), plain) <= EXACT
    assert rel_l2(RMSNorm(D, affine=False)(jnp.asarray(x)), plain) <= EXACT


@pytest.mark.usefixtures("x64")
def test_layernorm_centres_and_divides_by_the_deviation() -> None:
    x = signal(offset=5.0)
    norm = scaled(LayerNorm(D, dtype=jnp.float64))
    plain = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + norm.eps)
    expected = plain * np.asarray(norm.weight) + np.asarray(norm.bias)
    assert rel_l2(norm(jnp.asarray(x)), expected) <= EXACT
    assert rel_l2(LayerNorm(D, dtype=jnp.float64)(jnp.asarray(x)), plain) <= EXACT
    assert rel_l2(LayerNorm(D, affine=False)(jnp.asarray(x)), plain) <= EXACT


@pytest.mark.usefixtures("x64")
def test_the_epsilon_that_is_given_is_the_one_that_is_added() -> None:
    """An epsilon that counts: a default would be off by a fifth."""
    x, eps = signal(), 0.5
    rms = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    plain = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
    assert rel_l2(RMSNorm(D, eps, affine=False)(jnp.asarray(x)), rms) <= EXACT
    assert rel_l2(LayerNorm(D, eps, affine=False)(jnp.asarray(x)), plain) <= EXACT
    running = run(TimestepNorm(D, G, eps, affine=False), jnp.asarray(x))[0]
    assert rel_l2(running, by_definition(x, np.float64, eps)) <= EXACT


def test_every_norm_of_a_model_has_the_epsilon_of_its_configuration() -> None:
    eps = 0.5
    model = abstract_model(tiny(norm_eps=eps))
    kinds = (RMSNorm, LayerNorm, TimestepNorm)
    nodes = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, kinds))
    norms = [node for node in nodes if isinstance(node, kinds)]
    assert {type(norm) for norm in norms} == set(kinds)
    assert {norm.eps for norm in norms} == {eps}
    # Queries and keys have no gains of their own: their norm is made where it is used.
    attn = model_of(tiny(norm_eps=eps)).model.layers[0].attn
    m = jnp.asarray(np.random.default_rng(3).standard_normal((1, 3, TINY.model_dim)), jnp.float32)
    z = np.asarray(attn.wz(m), np.float64).reshape(1, 3, TINY.num_heads, TINY.head_dim)
    z = z / np.sqrt((z**2).mean(-1, keepdims=True) + eps)
    gains, shifts = (
        np.asarray(a, np.float64).reshape(2, *z.shape[2:]) for a in (attn.gamma, attn.beta)
    )
    for i, found in enumerate(attn.queries_keys(m)):
        expected = z * (gains[i] + 1) / np.sqrt(TINY.head_dim) + shifts[i]
        assert rel_l2(found, expected) <= roundoff(TINY.head_dim + 8)


@pytest.mark.parametrize("make", [RMSNorm, LayerNorm])
def test_without_affine_there_are_no_parameters(make: type) -> None:
    assert not jax.tree.leaves(make(D, affine=False))
    assert not jax.tree.leaves(TimestepNorm(D, G, affine=False))


def test_a_nan_before_the_first_valid_token_is_no_origin() -> None:
    x = jnp.asarray(np.random.default_rng(8).standard_normal((1, 3, 4)), jnp.float32)
    layer, mask = TimestepNorm(4, 2), jnp.asarray([[False, True, True]])
    expected, found = (layer(a, None, mask)[0] for a in (x, x.at[0, 0].set(jnp.nan)))
    assert np.array_equal(found[:, 1:], expected[:, 1:])
