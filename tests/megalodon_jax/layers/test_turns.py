"""Cosine and sine of angles in turns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from megalodon_jax.layers.turns import cos_sin

EPS = np.finfo(np.float64).eps
TURNS = np.random.default_rng(5).uniform(-0.5, 0.5, 20_000)


@jax.jit
def compiled(turns):
    return cos_sin(turns)


def of(turns):
    with jax.enable_x64(True):
        return [np.asarray(x) for x in compiled(jnp.asarray(turns))]


def test_they_are_those_of_the_library():
    angle = 2.0 * np.pi * TURNS
    # The library is given an angle of up to pi that was rounded; both results are rounded once.
    bound = (np.pi / 2 + 2) * EPS
    for ours, theirs in zip(of(TURNS), (np.cos(angle), np.sin(angle)), strict=True):
        assert ours.dtype == np.float64
        assert np.abs(ours - theirs).max() < bound
        assert np.abs(ours).max() <= 1.0


def test_they_lie_on_the_circle_closer_than_the_library_s_angle_allows():
    cos, sin = of(TURNS)
    wide_cos, wide_sin = cos.astype(np.longdouble), sin.astype(np.longdouble)
    off = np.abs(wide_cos**2 + wide_sin**2 - 1)
    # Each is off by half a unit of its own, and by what its polynomial rounds.
    assert off.max() < 2 * EPS


def test_quarter_turns_are_exact_and_signs_are_those_of_the_angle():
    cos, sin = of(np.array([0.0, 0.25, -0.25, 0.5, -0.5]))
    np.testing.assert_array_equal(cos, [1, 0, 0, -1, -1])
    np.testing.assert_array_equal(sin, [0, 1, -1, 0, 0])
    cos, sin = of(TURNS)
    mirrored_cos, mirrored_sin = of(-TURNS)
    np.testing.assert_array_equal(mirrored_cos, cos)
    np.testing.assert_array_equal(mirrored_sin, -sin)
