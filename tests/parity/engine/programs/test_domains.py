"""Perturbed operands stay in the domain of their operation, and keep the size of their error."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity.engine.programs.domains import DOMAINS, inside
from parity.engine.programs.rounding import Signs, pool
from parity.engine.programs.rounding_rules import ELEMENTARY

JAX = {"log2": jnp.log2, "log10": jnp.log10, "erfinv": jax.scipy.special.erfinv}
"""Operations that are no primitives of `jax.lax`."""


def _function(name: str):
    return JAX.get(name) or getattr(jax.lax, name)


@pytest.mark.parametrize("name", DOMAINS)
def test_a_domain_is_that_of_the_function_and_operands_inside_stay(name: str) -> None:
    low, high = DOMAINS[name]
    at = np.array([x for x in (low, high) if np.isfinite(x)])
    # A power of two, so that all sums are exact.
    step = 2.0**-20
    beyond = np.array([low - step, *([high + step] if np.isfinite(high) else [])])
    within = low + np.array([0.3, 1e-12, 1.1])
    with jax.enable_x64(True):
        function = _function(name)
        assert np.isnan(function(jnp.asarray(beyond))).all()
        assert not np.isnan(function(jnp.asarray([*at, *within]))).any()
    for where, make in ((np.where, np.asarray), (torch.where, torch.from_numpy)):
        [kept] = inside(name, [make(np.array([*at, *within]))], where)
        np.testing.assert_array_equal(kept, [*at, *within])
        [turned] = inside(name, [make(beyond)], where)
        turned = np.asarray(turned)
        # As far inside as it was outside.
        np.testing.assert_array_equal(np.abs(turned - at), step)
        with jax.enable_x64(True):
            assert not np.isnan(function(jnp.asarray(turned))).any()


def test_every_function_that_is_no_number_somewhere_has_a_domain() -> None:
    """Of one operand; at whole numbers some have poles."""
    somewhere = np.array([-3.5, -1.5, -0.5, 0.5, 1.5, 3.5])
    bounded = {"log2", "log10", "erfinv"}
    with jax.enable_x64(True):
        for name in ("sqrt", "square", *(ELEMENTARY - {"pow", "atan2"})):
            if np.isnan(_function(name)(somewhere)).any():
                bounded.add(name)
    assert bounded == DOMAINS.keys()


def test_a_power_of_a_negative_number_exists_for_integers_alone() -> None:
    base = np.array([-2.0, 2.0, -2.0, -2.0, 0.0])
    exponent = np.array([3.0, 3.5, 2.0000002, -1.0, 0.5])
    [kept, same] = inside("pow", [base, exponent], np.where)
    np.testing.assert_array_equal(kept, [-2.0, 2.0, 2.0, -2.0, 0.0])
    assert same is exponent
    assert inside("mul", [base, exponent], np.where) == [base, exponent]


def test_an_operand_that_nothing_perturbs_is_the_program_s_own() -> None:
    """A program that takes the root of a negative number gives NaN, and must not be mended."""
    with jax.enable_x64(True):
        operand = [jnp.asarray([-1e-9, 4.0])]
        for operations, constants, mended in (
            (0.0, 0.0, False),
            (1.0, 0.0, True),
            (0.0, 1.0, True),
        ):
            signs = Signs(jnp.asarray(pool(0, 8)), operations, constants)
            [kept] = signs.inside("sqrt", operand)
            assert float(kept[0]) == (1e-9 if mended else -1e-9)
            assert float(kept[1]) == 4.0
            base, exponent = signs.inside("pow", [*operand, jnp.asarray([0.5, -0.5])])
            assert np.array_equal(base, kept) and exponent.tolist() == [0.5, -0.5]
            assert signs.inside("neg", operand) is operand


def test_a_count_is_exact_and_other_scalars_round() -> None:
    with jax.enable_x64(True):
        signs = Signs(jnp.asarray(pool(0, 8)), 1.0)
        for short in (2.0, 0.5, -1e4, 0.0, 4095.0):
            assert float(signs.moved(jnp.float64(short), 1e-3)) == short
        for long in (0.1, 4097.0):
            assert float(signs.moved(jnp.float64(long), 1e-3)) != long
        # Elements of an array are data, of which any number may be short.
        assert (np.asarray(signs.moved(jnp.asarray([2.0, 0.5]), 1e-3)) != [2.0, 0.5]).all()
