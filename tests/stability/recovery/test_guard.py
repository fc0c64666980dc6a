"""The guard: what it skips, what it clips, what its window holds, and that its state is a state."""

from __future__ import annotations

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from megalodon_jax.checkpoint import load_checkpoint, save_checkpoint
from stability.recovery.guard import (
    NORMAL_MAD,
    GuardConfig,
    GuardState,
    Verdict,
    Window,
    global_norm,
    guard,
    limit,
    wants_rollback,
)
from tests.helpers import model_of, same_leaves, tiny

EPS = float(np.finfo(np.float32).eps)
CONFIG = GuardConfig(window=8, warmup=4, max_norm=None, patience=2)
PARAMS = {"w": jnp.ones(3), "b": jnp.zeros(2, jnp.bfloat16)}
HEALTHY = [1.0, 1.1, 0.9, 1.05, 0.95]


def gradients(scale: float = 1.0):
    return {"w": jnp.full(3, 0.1 * scale), "b": jnp.full(2, 0.1 * scale, jnp.bfloat16)}


def optimiser(config: GuardConfig = CONFIG, **options):
    return guard(optax.adam(0.1), config, **options)


@jax.jit
def one(state, grads, loss):
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        return optimiser().update(grads, state, PARAMS, value=loss)


def after(*losses: float) -> GuardState:
    state = optimiser().init(PARAMS)
    for loss in losses:
        _, state = one(state, gradients(), jnp.float32(loss))
    return state


def verdict(state: GuardState) -> Verdict:
    return Verdict(int(state.report.verdict))


@pytest.mark.parametrize(
    ("grads", "loss", "expected"),
    [
        (gradients(), jnp.nan, Verdict.SKIPPED_LOSS),
        (gradients(), jnp.inf, Verdict.SKIPPED_LOSS),
        (gradients(jnp.nan), 1.0, Verdict.SKIPPED_GRADIENT),
        (gradients() | {"w": jnp.array([0.1, jnp.inf, 0.1])}, 1.0, Verdict.SKIPPED_GRADIENT),
        (gradients(), 5.0, Verdict.SKIPPED_SPIKE),
    ],
    ids=["NaN loss", "infinite loss", "NaN gradients", "one infinite gradient", "spike"],
)
def test_a_rejected_step_changes_nothing_but_the_counters(grads, loss, expected) -> None:
    before = after(*HEALTHY)
    moves, state = one(before, grads, jnp.float32(loss))
    assert verdict(state) is expected
    assert all(not np.any(np.asarray(move, np.float32)) for move in moves.values())
    assert same_leaves(state.inner, before.inner)
    assert same_leaves(state.losses, before.losses)
    assert same_leaves(state.norms, before.norms)
    assert (int(state.skips), int(state.total_skips)) == (1, 1)


def test_an_accepted_step_is_that_of_the_wrapped_optimiser() -> None:
    plain = optax.adam(0.1)
    with jax.numpy_dtype_promotion("standard"):
        moves, inner = jax.jit(plain.update)(gradients(), plain.init(PARAMS), PARAMS)
    guarded, state = one(optimiser().init(PARAMS), gradients(), jnp.float32(1.0))
    assert same_leaves(guarded, moves)
    assert same_leaves(state.inner, inner)
    assert verdict(state) is Verdict.ACCEPTED


def test_the_threshold_is_median_and_mad_of_what_was_accepted() -> None:
    state = after(*HEALTHY, jnp.nan, 50.0)
    median = np.median(np.float32(HEALTHY))
    mad = np.median(np.abs(np.float32(HEALTHY) - median))
    expected = median + CONFIG.deviations * NORMAL_MAD * mad
    assert np.isclose(float(limit(state.losses, CONFIG)), expected, rtol=EPS)
    assert float(state.report.loss_limit) == float(limit(state.losses, CONFIG))
    assert int(state.losses.seen) == len(HEALTHY)


@pytest.mark.parametrize("accepted", range(CONFIG.warmup + 2))
@pytest.mark.parametrize("rejected", [0, 3])
def test_a_spike_is_one_from_the_first_value_on_after_the_window_has_warmed_up(
    accepted: int, rejected: int
) -> None:
    """What was skipped warms nothing up."""
    healthy = [1.0 + 0.01 * (i % 2) for i in range(accepted)]
    state = after(*[jnp.nan] * rejected, *healthy, 1e6)
    expected = Verdict.SKIPPED_SPIKE if accepted >= CONFIG.warmup else Verdict.ACCEPTED
    assert verdict(state) is expected
    assert np.isinf(float(state.report.loss_limit)) == (accepted < CONFIG.warmup)
    norms = np.isinf(float(state.report.norm_limit))
    assert norms == (accepted < CONFIG.warmup)


def test_a_loss_that_stands_still_is_not_a_row_of_spikes() -> None:
    value = np.float32(2.0)
    constant = Window(jnp.full(CONFIG.window, value), jnp.int32(CONFIG.window))
    above = value * (1 + CONFIG.deviations * CONFIG.spread)
    assert float(limit(constant, CONFIG)) == pytest.approx(above)
    zero = eqx.tree_at(lambda w: w.values, constant, jnp.zeros(CONFIG.window))
    assert float(limit(zero, CONFIG)) == 0.0


def test_the_window_forgets_the_oldest() -> None:
    losses = [float(i) / 100 + 1 for i in range(CONFIG.window + 3)]
    state = after(*losses)
    expected = np.sort(np.float32(losses[3:]))
    assert np.array_equal(np.sort(np.asarray(state.losses.values)), expected)


def test_a_norm_that_spikes_is_clipped_and_does_not_enter_the_window() -> None:
    before = after(*HEALTHY)
    _, state = one(before, gradients(1000.0), jnp.float32(1.0))
    assert verdict(state) is Verdict.CLIPPED
    assert same_leaves(state.norms, before.norms)
    assert int(state.losses.seen) == int(before.losses.seen) + 1
    scale = state.report.norm_limit / state.report.norm
    with jax.numpy_dtype_promotion("standard"):
        clipped = jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients(1000.0))
        _, inner = jax.jit(optax.adam(0.1).update)(clipped, before.inner, PARAMS)
    for name, moment in inner[0].mu.items():
        got = np.asarray(state.inner[0].mu[name], np.float32)
        eps = float(jnp.finfo(moment.dtype).eps)
        assert np.allclose(got, np.asarray(moment, np.float32), rtol=4 * eps, atol=0)


def test_every_gradient_is_clipped_to_max_norm_and_counts_as_accepted() -> None:
    clip = guard(optax.sgd(1.0), GuardConfig(max_norm=1.0))
    grads = {"w": jnp.full(4, 10.0)}
    moves, state = clip.update(grads, clip.init(grads), grads, value=jnp.float32(1.0))
    assert verdict(state) is Verdict.ACCEPTED
    assert float(global_norm(moves)) == pytest.approx(1.0)
    assert int(state.norms.seen) == 1


def test_the_norm_is_taken_in_float32() -> None:
    small = {"w": jnp.full(1000, 1e-3, jnp.bfloat16)}
    exact = np.linalg.norm(np.asarray(small["w"], np.float64))
    assert float(global_norm(small)) == pytest.approx(exact, rel=1000 * EPS)
    tiny_ones = {"w": jnp.full(4, 2.0**-60, jnp.bfloat16)}
    assert float(global_norm(tiny_ones)) == 2.0**-59
    assert global_norm(small).dtype == jnp.float32


def test_patience_counts_skips_in_a_row() -> None:
    assert not wants_rollback(after(*HEALTHY, jnp.nan), CONFIG)
    assert wants_rollback(after(*HEALTHY, jnp.nan, jnp.inf), CONFIG)
    state = after(*HEALTHY, jnp.nan, 1.0, jnp.nan)
    assert not wants_rollback(state, CONFIG)
    assert int(state.total_skips) == 2


def test_a_cut_rate_scales_every_update() -> None:
    state = after(*HEALTHY)
    full, _ = one(state, gradients(), jnp.float32(1.0))
    half, _ = one(state._replace(rate=jnp.float32(0.5)), gradients(), jnp.float32(1.0))
    assert np.array_equal(np.asarray(half["w"]), np.asarray(full["w"]) * np.float32(0.5))


def test_auxiliary_losses_are_logged_and_decide_nothing() -> None:
    router = optimiser(auxiliary=("router",))
    with jax.numpy_dtype_promotion("standard"):
        _, state = router.update(
            gradients(),
            router.init(PARAMS),
            PARAMS,
            value=jnp.float32(1.0),
            auxiliary={"router": jnp.float32(jnp.nan)},
        )
        with pytest.raises(ValueError, match=r"auxiliary losses \[\] were passed, expected"):
            router.update(gradients(), state, PARAMS, value=1.0)
    assert verdict(state) is Verdict.ACCEPTED
    assert np.isnan(float(state.report.auxiliary["router"]))
    assert float(state.report.loss) == 1.0


def test_without_the_loss_the_error_says_what_to_pass() -> None:
    with pytest.raises(ValueError, match="pass value=loss"):
        optimiser().update(gradients(), optimiser().init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    "wrong", [{"window": 1}, {"warmup": 65}, {"max_norm": 0.0}, {"patience": 0}, {"deviations": 0}]
)
def test_a_wrong_number_is_named(wrong) -> None:
    with pytest.raises(ValueError, match=f"GuardConfig: {next(iter(wrong))}="):
        GuardConfig(**wrong)


def test_the_state_survives_native_checkpoints_and_equinox(tmp_path: Path) -> None:
    model = model_of(tiny(num_layers=1))
    tx = guard(optax.adamw(1e-2), CONFIG, auxiliary=("router",))
    state = tx.init(eqx.filter(model, eqx.is_array))
    save_checkpoint(tmp_path / "native", model, step=1, opt_state=state)
    like = jax.eval_shape(lambda: state)
    loaded = load_checkpoint(tmp_path / "native", opt_state_like=like).opt_state
    assert same_leaves(loaded, state)
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    eqx.tree_serialise_leaves(tmp_path / "state.eqx", state)
    assert same_leaves(eqx.tree_deserialise_leaves(tmp_path / "state.eqx", state), state)


def test_the_second_step_does_not_compile_again() -> None:
    step = jax.jit(lambda s, g: optimiser().update(g, s, PARAMS, value=jnp.float32(1.0)))
    with jax.numpy_dtype_promotion("standard"):
        _, state = step(optimiser().init(PARAMS), gradients())
        step(state, gradients())
    assert step._cache_size() == 1


def test_buffers_of_the_state_can_be_donated() -> None:
    step = jax.jit(
        lambda s, g: optimiser().update(g, s, PARAMS, value=jnp.float32(1.0)), donate_argnums=0
    )
    with jax.numpy_dtype_promotion("standard"):
        _, state = step(optimiser().init(PARAMS), gradients())
    assert verdict(state) is Verdict.ACCEPTED
