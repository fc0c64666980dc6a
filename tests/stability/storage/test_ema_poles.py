"""Poles: memory, collapse and phase by definition, and float32 against the measured table."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logit

from megalodon_jax.weights import named_leaves, replace_leaves
from stability.core.findings import Severity
from stability.core.number_formats import BF16
from stability.storage.ema_pole_findings import LENGTHS, findings, memory_rows
from stability.storage.ema_poles import Poles, collapsed, find_poles, float32_error
from stability.storage.update_rules import AdamW
from tests.helpers import TINY, model_of

EMA = "model.layers.0.attn.cema"


def poles_at(decay: list[float]) -> Poles:
    """Poles whose alpha' delta' is what is given: delta' is one half."""
    alpha = logit(2 * np.array(decay))[None]
    return Poles("ema", alpha, np.zeros_like(alpha), np.zeros((1, 1)))


def drawn(shift: float, D: int = 32, N: int = 16) -> Poles:
    """Poles of the table of docs/model.md "What float32 gets wrong": logits N(shift, 0.2)."""
    rng = np.random.default_rng(0)
    theta = logit(np.exp(-np.arange(1, D + 1) * math.log(D) / D))
    alpha, delta = (
        (0.2 * rng.standard_normal((D, N)) + shift).astype(np.float32).astype(np.float64)
        for _ in range(2)
    )
    return Poles("ema", alpha, delta, theta.astype(np.float32).astype(np.float64)[:, None])


def test_the_specified_limits_of_bfloat16() -> None:
    # alpha' delta' at most 2^-9 rounds to an infinite memory, and 256 steps is the longest other.
    nudge = 1e-4
    rows = poles_at([2.0**-9 * (1 - nudge), 2.0**-9 * (1 + nudge), 2.0**-8, 0.25])
    # bound: the nudge itself.
    assert np.allclose(
        rows.memory(), 1 / np.array([2.0**-9, 2.0**-9, 2.0**-8, 0.25]), rtol=2 * nudge
    )
    stored = rows.memory_stored()[0]
    assert stored.tolist() == [math.inf, 256.0, 256.0, 4.0]
    assert collapsed(rows) == 0.25
    assert collapsed(poles_at([0.25, 0.1])) == 0.0
    assert np.isfinite(rows.memory_stored(None)).all(), "float32 holds these"


def test_poles_are_those_of_the_model() -> None:
    model = model_of(TINY)
    poles = find_poles(model)[EMA]
    q = np.asarray(model.model.layers[0].attn.cema.q(jnp.float32))
    ours = (1 - poles.decay) * np.exp(2j * np.pi * poles.turns)
    assert np.max(np.abs(q - ours)) <= np.finfo(np.float32).eps
    assert np.max(np.abs(poles.float32_q() - ours)) <= 8 * np.finfo(np.float32).eps


@pytest.mark.parametrize(("shift", "length", "measured"), [(-4, 4096, 1.8e-4), (-6, 32_768, 1e-3)])
def test_float32_is_off_by_what_the_specification_measured(shift, length, measured) -> None:
    # The table's own weights and input are not recorded: another draw moves it by less than 2.
    assert measured / 2 < float32_error(drawn(shift), length, channels=32) < 2 * measured


def test_float32_is_enough_for_a_short_memory_at_any_length() -> None:
    # A pole is off by about a unit in the last place, which its powers keep as long as its memory.
    poles = drawn(0)
    short = [float32_error(poles, length, channels=32) for length in (4096, 32_768)]
    assert max(short) < np.finfo(np.float32).eps * np.max(poles.memory())
    assert abs(short[1] - short[0]) <= np.finfo(np.float64).eps, "powers have long vanished"


def test_phase_errors_grow_with_length_and_stop_at_half_a_turn() -> None:
    poles = drawn(-6)
    short, long = (poles.phase_error(n).max() for n in (16, 1_000_000))
    assert 0 < short < long == 0.5
    assert poles.phase_error(16, None).max() < short, "float32 turns less"


def test_findings_are_quiet_at_initialisation_and_loud_for_a_long_memory() -> None:
    model = model_of(TINY)
    assert {f.severity for f in findings(model)} <= {Severity.OK, Severity.NOTE}
    leaves = named_leaves(model)
    shifted = {n: leaves[n] - 6.0 for n in leaves if n.endswith(("cema.alpha", "cema.delta"))}
    found = {f.metric: f for f in findings(replace_leaves(model, shifted)) if f.subject == EMA}
    collapse, wide = found["collapsed_fraction"], found[f"float32_error_{LENGTHS[-1]}"]
    assert (collapse.severity, collapse.value) == (Severity.WARNING, 1.0)
    assert "float32" in collapse.remedy
    assert wide.severity is Severity.WARNING
    assert wide.value > wide.threshold


def test_memory_rows_are_plain_and_show_what_training_did() -> None:
    rows = memory_rows(model_of(TINY), AdamW(3e-4), steps=20, quantiles=(0.0, 0.5, 1.0))
    assert len(rows) == 2 * 5 * 3
    memory = {(r["layer"], r["state"], r["quantile"]): r["memory"] for r in rows}
    start, wide, narrow = (
        memory[EMA, state, 0.5] for state in ("float32", "float32 after T", "bfloat16 after T")
    )
    assert wide > start, "training pushes toward longer memory"
    assert abs(narrow - start) < wide - start, "and storage holds it back"
    assert {r["steps"] for r in rows} == {0, 20}


def test_bad_input_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"no EMA here.*found w.*Megalodon"):
        find_poles({"w": jnp.ones(3)})
    with pytest.raises(ValueError, match="cema has no delta: expected alpha, delta, theta"):
        find_poles({"cema.alpha": jnp.ones((2, 2, 1))})
    wrong = {"cema.alpha": jnp.ones((2, 2, 1)), "cema.delta": jnp.ones((2, 3, 1))}
    with pytest.raises(ValueError, match=r"expected \(D, N, 1\)"):
        find_poles(wrong | {"cema.theta": jnp.ones((2, 1, 1))})
    spoiled = model_of(TINY)
    leaf = named_leaves(spoiled)[f"{EMA}.alpha"]
    with pytest.raises(ValueError, match="NaN or infinity"):
        find_poles(replace_leaves(spoiled, {f"{EMA}.alpha": leaf.at[0].set(jnp.nan)}))
    assert BF16.mantissa_bits == 7
