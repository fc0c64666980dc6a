"""Optimisers for narrow parameters: the specification's numbers, bias, variance, repetition."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stability.core.number_formats import BF16
from stability.storage import narrow_optimisers
from stability.storage.narrow_optimisers import (
    apply_updates,
    float32_master,
    kahan,
    kahan_adamw,
    nearest_storage,
    stochastic_adamw,
    stochastic_rounding,
)

STEPS, UPDATE, ELEMENTS = 1000, -1e-4, 4000
EXACT = 1.0 + STEPS * UPDATE
SIGMAS = 5.0
"""Standard errors a correct statistic stays within."""
WRAPPERS = {
    "nearest": nearest_storage,
    "stochastic": stochastic_rounding,
    "kahan": kahan,
    "kahan float32": lambda inner: kahan(inner, jnp.float32),
    "master": float32_master,
    "plain": lambda inner: inner,
}


@cache
def walked(name: str, dtype: str = "bfloat16", elements: int = 1):
    """(parameters, state) after 1000 updates of -1e-4 from 1, in float64."""
    transform = WRAPPERS[name](optax.identity())
    params = {"w": jnp.ones(elements, dtype)}
    moves = {"w": jnp.full(elements, UPDATE, jnp.float32)}

    def step(carry, _):
        params, state = carry
        updates, state = transform.update(moves, state, params)
        return (apply_updates(params, updates), state), None

    start = (params, transform.init(params))
    (params, state), _ = jax.jit(lambda c: jax.lax.scan(step, c, None, length=STEPS))(start)
    return np.asarray(params["w"], np.float64), state


def test_round_to_nearest_never_moves_and_float32_almost_arrives() -> None:
    assert walked("nearest")[0] == 1.0
    # The specification's 0.89998: each of 1000 additions rounds by at most half an ulp below 1.
    (value,), _ = walked("plain", "float32")
    assert abs(value - EXACT) <= STEPS * 2.0**-25
    assert round(value, 5) == 0.89998


def test_kahan_in_bfloat16_has_the_specified_sum_and_carry() -> None:
    (value,), state = walked("kahan")
    assert round(value, 4) == 0.9023
    assert round(float(state.compensation["w"][0]), 4) == -0.0018


def test_kahan_in_float32_loses_nothing_but_float32_rounding() -> None:
    (value,), state = walked("kahan float32")
    total = value + float(state.compensation["w"][0])
    # The carry stays below 2^-8, where float32 is rounded by at most 2^-33 a step.
    assert abs(total - EXACT) <= STEPS * (2.0**-33 + abs(np.float32(UPDATE) - UPDATE))
    assert value == BF16.round(np.float32(EXACT))


def test_a_master_is_shown_rounded() -> None:
    (value,), state = walked("master")
    assert value == BF16.round(np.float32(EXACT))
    assert round(float(state.master["w"][0]), 5) == 0.89998


def test_stochastic_rounding_is_unbiased_with_the_variance_of_its_coins() -> None:
    values, _ = walked("stochastic", elements=ELEMENTS)
    # From 1 downward the gap is g = 2^-8 throughout: each step is a coin with mean u and variance
    # u (g - u), so the specification's 0.0196 is sqrt(1000 u (g - u)) = 0.01951.
    u, g = -UPDATE, 2.0**-8
    deviation = np.sqrt(STEPS * u * (g - u))
    assert abs(values.mean() - EXACT) < SIGMAS * deviation / np.sqrt(ELEMENTS)
    # The relative standard error of a standard deviation of n normal values is 1 / sqrt(2 n).
    assert abs(values.std() / deviation - 1) < SIGMAS / np.sqrt(2 * ELEMENTS)
    biased, _ = walked("nearest", elements=ELEMENTS)
    assert abs(biased.mean() - EXACT) > SIGMAS * deviation / np.sqrt(ELEMENTS)


@pytest.mark.parametrize("name", ["nearest", "stochastic", "kahan", "kahan float32", "master"])
def test_what_is_not_finite_stays_what_it_is(name: str) -> None:
    """The way from infinity to infinity is NaN, and so would be the parameter one step later."""
    transform = WRAPPERS[name](optax.identity())
    params = {"w": jnp.asarray([jnp.inf, -jnp.inf, jnp.nan, 1.0, 1.0, 1.0], jnp.bfloat16)}
    state = transform.init(params)
    for updates in ([0.0, 0.0, 0.0, jnp.inf, jnp.nan, 1.0], [1.0, 1.0, 1.0, -1.0, 0.0, 1.0]):
        moves, state = transform.update({"w": jnp.float32(updates)}, state, params)
        params = apply_updates(params, moves)
    shown = np.asarray(params["w"], np.float32)
    assert shown[[0, 1, 3, 5]].tolist() == [np.inf, -np.inf, np.inf, 3.0]
    assert np.isnan(shown[[2, 4]]).all()


def test_a_larger_step_at_one_overshoots_downward_by_the_specified_third() -> None:
    transform = nearest_storage(optax.identity())
    params = {"w": jnp.ones(1, jnp.bfloat16)}
    updates, _ = transform.update({"w": jnp.float32([-3e-3])}, transform.init(params), params)
    assert round(float(updates["w"][0]) / -3e-3, 2) == 1.30


def trained(transform, steps: int, params=None, state=None):
    params = {"a": jnp.ones(64, jnp.bfloat16), "b": jnp.ones(64, jnp.bfloat16)} | (params or {})
    state = transform.init(params) if state is None else state
    for _ in range(steps):
        updates, state = transform.update(jax.tree.map(jnp.ones_like, params), state, params)
        params = apply_updates(params, updates)
    return params, state


def test_stochastic_adamw_is_reproducible_by_seed_path_and_step() -> None:
    first, again = (trained(stochastic_adamw(1e-3, seed=3), 4)[0] for _ in range(2))
    other = trained(stochastic_adamw(1e-3, seed=4), 4)[0]
    assert np.array_equal(first["a"], again["a"])
    assert not np.array_equal(first["a"], other["a"]), "another seed"
    assert not np.array_equal(first["a"], first["b"]), "another path"
    updates = stochastic_rounding(optax.identity())
    params = {"a": jnp.ones(64, jnp.bfloat16)}
    state = updates.init(params)
    moves = {"a": jnp.full(64, -1e-3)}
    one, state = updates.update(moves, state, params)
    two, _ = updates.update(moves, state, params)
    assert not np.array_equal(one["a"], two["a"]), "another step"


@pytest.mark.parametrize("make", [stochastic_adamw, kahan_adamw])
def test_a_run_continued_from_its_state_is_the_run(make) -> None:
    whole, _ = trained(make(1e-3), 4)
    half, state = trained(make(1e-3), 2)
    leaves, structure = jax.tree.flatten(state)
    restored = jax.tree.unflatten(structure, [jnp.asarray(np.asarray(x)) for x in leaves])
    rest, _ = trained(make(1e-3), 2, half, restored)
    assert all(np.array_equal(whole[n], rest[n]) for n in whole)


@pytest.mark.parametrize("name", ["nearest", "stochastic", "kahan", "master"])
def test_wide_leaves_pass_through_and_dtypes_stay(name: str) -> None:
    transform = WRAPPERS[name](optax.adamw(1e-3))
    params = {"narrow": jnp.ones(3, jnp.bfloat16), "wide": jnp.ones(3)}
    alone = {"wide": params["wide"]}
    grads = jax.tree.map(jnp.ones_like, params)
    updates, state = transform.update(grads, transform.init(params), params)
    with jax.numpy_dtype_promotion("standard"):
        inner = optax.adamw(1e-3)
        plain, _ = inner.update({"wide": grads["wide"]}, inner.init(alone), alone)
        same = optax.apply_updates(params, updates)
    # A master subtracts after adding: one more rounding at 1.
    assert np.allclose(updates["wide"], plain["wide"], rtol=0, atol=2.0**-24)
    after = apply_updates(params, updates)
    assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(params)]
    assert all(np.array_equal(after[n], same[n]) for n in params)
    moments = [x for x in jax.tree.leaves(state) if x.dtype == jnp.bfloat16]
    assert len(moments) == (name == "kahan"), "moments are float32; Kahan's carry alone is narrow"


def test_wrong_use_is_refused_in_words() -> None:
    transform = stochastic_adamw(1e-3)
    params = {"a": jnp.ones(2, jnp.bfloat16)}
    with pytest.raises(ValueError, match="call update\\(gradients, state, params\\)"):
        transform.update(params, transform.init(params))
    with pytest.raises(ValueError, match="compensation_dtype=int32 must be a float"):
        kahan_adamw(1e-3, compensation_dtype=jnp.int32)


def test_kahan_without_its_carry_would_freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    # What a compiler does that simplifies (p + y) - p to y.
    monkeypatch.setattr(narrow_optimisers, "nearest", lambda x, fmt: x)
    transform = kahan(optax.identity())
    params = {"w": jnp.ones(1, jnp.bfloat16)}
    _, state = transform.update({"w": jnp.float32([UPDATE])}, transform.init(params), params)
    assert abs(float(state.compensation["w"][0])) < 2.0**-24
