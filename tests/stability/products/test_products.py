"""Low-precision products against float64: a narrow sum or a wrong operand breaks every gate."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megalodon_jax.quantization import formats, products
from parity.engine.measure.measurement import Verdict
from stability.products import accuracy, block_formats


def only(*names: str) -> dict[str, products.Backend]:
    return {name: products.BACKENDS[name] for name in names}


def verdicts() -> dict[tuple[str, str], Verdict]:
    rows = [m for m in accuracy.measure() if m.verdict is not Verdict.INFO]
    return {(m.case, m.quantity): m.verdict for m in rows}


@pytest.mark.sweep
def test_only_the_operands_are_narrow(monkeypatch) -> None:
    monkeypatch.setattr(accuracy, "BACKENDS", only("mxfp8", "nvfp4"))
    healthy = verdicts()
    assert set(healthy) == {(n, q) for n in ("mxfp8", "nvfp4") for q in accuracy.QUANTITIES}
    assert set(healthy.values()) == {Verdict.PASS}

    emulated = products._emulated
    narrow = lambda a, b: emulated(a, b).astype(jnp.bfloat16).astype(jnp.float32)  # noqa: E731
    monkeypatch.setattr(accuracy, "BACKENDS", only("mxfp8"))
    with monkeypatch.context() as planted:
        jax.clear_caches()  # what is compiled already is not narrow
        planted.setattr(products, "_emulated", narrow)
        assert set(verdicts().values()) == {Verdict.FAIL}
    with monkeypatch.context() as planted:
        jax.clear_caches()
        # The backend and its own dequantised operands agree on the wrong scale.
        planted.setattr(products, "mx", partial(formats.mx, mode="floor"))
        assert set(verdicts().values()) == {Verdict.FAIL}
    jax.clear_caches()


X = np.random.default_rng(3).standard_normal((40, 48)).astype(np.float32)


def test_a_rotation_is_one_in_any_order_of_its_sums() -> None:
    exact = block_formats.blocks(X, 16) @ products.ROTATION.astype(np.float64)
    ours = exact.reshape(X.shape).astype(np.float32)
    assert np.array_equal(accuracy.rotation_or_nan(X, ours), ours)
    for wrong in (X, -ours, ours.astype(jnp.bfloat16).astype(np.float32)):
        assert np.isnan(accuracy.rotation_or_nan(X, wrong)).all()


def drawn(up) -> np.ndarray:
    """Values of e2m1 drawn from the scaled `X`; `up(share)` says which are rounded away from 0."""
    nearest = block_formats.nvfp4(X)
    scale = nearest.scale.astype(np.float64)[..., None] * nearest.outer
    scaled = block_formats.blocks(X, 16) / scale
    step = accuracy.E2M1.spacing(scaled)
    below = np.floor(np.abs(scaled) / step)
    share = np.abs(scaled) / step - below
    return (np.sign(scaled) * np.minimum((below + up(share)) * step, 6)).astype(np.float32)


@pytest.mark.parametrize(
    ("up", "right"),
    [
        (lambda share: np.random.default_rng(5).random(share.shape) < share, True),
        (lambda share: np.ones_like(share), False),
        (lambda share: share > 0.5, False),
        (lambda share: 1 + (share > 0.5), False),
    ],
    ids=["stochastic", "away from 0", "nearest", "no neighbour"],
)
def test_a_draw_is_a_neighbour_and_unbiased(up, right: bool) -> None:
    known = accuracy.draw_or_nan(block_formats.nvfp4(X), X, drawn(up))
    assert np.isfinite(known.dequantised()).all() == right


def test_one_draw_two_steps_away_is_no_draw() -> None:
    """Among two thousand others no sum would show it."""
    right = drawn(lambda share: np.random.default_rng(5).random(share.shape) < share)
    wrong = right.copy()
    at = np.argwhere(right == 0.5)[0]
    wrong[tuple(at)] = 1.5
    for values, finite in ((right, True), (wrong, False)):
        known = accuracy.draw_or_nan(block_formats.nvfp4(X), X, values)
        assert np.isfinite(known.dequantised()).all() == finite
