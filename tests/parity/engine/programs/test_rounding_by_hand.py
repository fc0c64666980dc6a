"""What each operation rounds, by how many units, and of which of its operands: written down."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parity.engine.measure.rounding_noise import UNIT_ROUNDOFF
from parity.engine.programs.evaluation import Evaluation
from parity.engine.programs.marks import Marks
from parity.engine.programs.rounding import Signs
from parity.engine.programs.rounding_rules import ELEMENTARY, EXACT, UNITS, wide
from tests.helpers import EXACT as FLOAT64


@dataclass(frozen=True)
class Noted(Signs):
    """Signs that move nothing and say what they were asked to move, in unit roundoffs."""

    asked: list[tuple[tuple[int, ...], float]] = field(default_factory=list)

    def moved(self, value: Any, roundoff: float) -> Any:
        self.asked.append((tuple(value.shape), round(roundoff / UNIT_ROUNDOFF, 6)))
        return value

    def constant(self, value: Any) -> Any:
        # A table is what another test is about.
        return value


def asked_of(function, *arrays: np.ndarray, narrow: bool = False):
    """Return what a float32 program is asked to round, in order; and its float64 results."""
    closed = jax.make_jaxpr(function)(*arrays)
    signs = Noted(None, narrow=narrow)
    with jax.enable_x64(True):
        wider = [jnp.asarray(x, wide(x.dtype)) for x in arrays]
        outputs = Evaluation(True, signs).run(closed, wider, Marks())
    return signs.asked, outputs


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def adding(terms: int) -> float:
    return round(math.sqrt(1 + terms / 11), 6)


def convolved(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME")


IDS = np.array([0, 2, 2], np.int32)
CASES = {
    # The smaller factor of each product is moved by what adding up rounds; then the result.
    "matrix": (lambda a, b: a @ b, (draw(4, 8), draw(8, 3)), [((8, 3), adding(8)), ((4, 3), 1.0)]),
    "transposed": (
        lambda a, b: a @ b, (draw(2, 8), draw(8, 9)), [((2, 8), adding(8)), ((2, 9), 1.0)],
    ),
    "of one size": (
        lambda a, b: a @ b, (draw(3, 3), draw(3, 3)), [((3, 3), adding(3)), ((3, 3), 1.0)],
    ),
    "convolution": (
        convolved, (draw(1, 2, 5, 5), draw(4, 2, 3, 3)),
        [((4, 2, 3, 3), adding(18)), ((1, 4, 5, 5), 1.0)],
    ),
    "sum": (lambda x: jnp.sum(x, 1), (draw(3, 6),), [((3, 6), adding(6)), ((3,), 1.0)]),
    "sum of all": (lambda x: jnp.sum(x), (draw(3, 6),), [((3, 6), adding(18)), ((), 1.0)]),
    "running sum": (
        lambda x: jax.lax.cumsum(x, 1), (draw(3, 6),), [((3, 6), adding(6)), ((3, 6), 1.0)],
    ),
    "running product": (
        lambda x: jax.lax.cumprod(x, 0), (draw(3, 6),), [((3, 6), adding(3)), ((3, 6), 1.0)],
    ),
    "scatter": (
        lambda x, v: x.at[IDS].add(v), (draw(4), draw(3)), [((3,), adding(1)), ((4,), 1.0)],
    ),
    "product": (lambda x: x * x, (draw(5),), [((5,), 1.0)]),
    "square": (lambda x: jax.lax.integer_pow(x, 2), (draw(5),), [((5,), 1.0)]),
    "cube": (lambda x: jax.lax.integer_pow(x, 3), (draw(5),), [((5,), 4.0)]),
    "inverse cube": (lambda x: jax.lax.integer_pow(x, -3), (draw(5),), [((5,), 4.0)]),
    "exponential": (jnp.exp, (draw(5),), [((5,), 4.0)]),
    "root": (jnp.sqrt, (np.abs(draw(5)),), [((5,), 1.0)]),
    "negative": (lambda x: -x, (draw(5),), []),
    "maximum": (lambda x: jnp.max(x), (draw(5),), []),
    "sorted": (lambda x: jnp.sort(x), (draw(5),), []),
    "comparison": (lambda x: x > 0, (draw(5),), []),
    "whole numbers": (lambda n: n * n + 1, (np.arange(5, dtype=np.int32),), []),
    "cast": (lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), (draw(5),), []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_an_operation_rounds_by_how_many_units(name: str):
    function, arrays, expected = CASES[name]
    asked, [found] = asked_of(function, *arrays)
    assert asked == expected
    # And everything in float64: the same mathematics, to the rounding of float64.
    with jax.enable_x64(True):
        wider = [jnp.asarray(x, wide(x.dtype)) for x in arrays]
        if name != "cast":
            exact = function(*wider)
            assert found.dtype == exact.dtype and np.allclose(found, exact, rtol=FLOAT64, atol=0)
        else:
            # A cast to less is none.
            assert found.dtype == jnp.float64 and np.array_equal(found, wider[0])


def test_what_is_narrow_rounds_as_such_where_that_is_asked():
    def function(x):
        y = x.astype(jnp.bfloat16)
        return (y * y).astype(jnp.float32) + x

    bf16 = round(2.0**-8 / UNIT_ROUNDOFF, 6)
    # A cast that widens rounds nothing.
    assert asked_of(function, draw(5), narrow=True)[0] == [((5,), bf16), ((5,), bf16), ((5,), 1.0)]
    assert asked_of(function, draw(5))[0] == [((5,), 1.0), ((5,), 1.0)]
    half = round(2.0**-11 / UNIT_ROUNDOFF, 6)
    assert asked_of(lambda x: jnp.exp(x.astype(jnp.float16)), draw(5), narrow=True)[0] == [
        ((5,), half), ((5,), 4 * half),
    ]  # fmt: skip


def test_a_fourier_transform_sums_over_all_its_lengths():
    asked, [found] = asked_of(lambda x: jnp.fft.fft2(x), draw(4, 6))
    assert ((4, 6), adding(24)) in asked and asked[-1] == ((4, 6), 1.0)
    assert np.dtype(found.dtype) in (np.complex64, np.complex128)


def test_every_dtype_is_widened_to_its_own_kind():
    expected = {
        "float32": "float64", "bfloat16": "float64", "float16": "float64", "float64": "float64",
        "complex64": "complex128", "complex128": "complex128", "int32": "int32", "bool": "bool",
    }  # fmt: skip
    assert {name: jnp.dtype(wide(jnp.dtype(name))).name for name in expected} == expected
    # Half the gap above 1: 8, 11 and 24 bits of significance.
    bits = {name: round(-math.log2(unit)) for name, unit in UNITS.items()}
    assert bits == {
        "float64": 24, "float32": 24, "complex64": 24, "complex128": 24, "bfloat16": 8,
        "float16": 11,
    }  # fmt: skip
    assert not EXACT & ELEMENTARY


def test_nothing_is_rounded_without_signs():
    closed = jax.make_jaxpr(lambda x: jnp.exp(x) @ x)(draw(5))
    with jax.enable_x64(True):
        x = jnp.asarray(draw(5), jnp.float64)
        [found] = Evaluation(True).run(closed, [x], Marks())
        assert np.allclose(found, jnp.exp(x) @ x, rtol=FLOAT64, atol=0)
