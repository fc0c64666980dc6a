"""What each operation rounds, by how many units, and of which of its operands: written down."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

from parity.engine.measure.rounding_noise import UNIT_ROUNDOFF
from parity.engine.programs.evaluation import Evaluation
from parity.engine.programs.marks import Marks
from parity.engine.programs.rounding import Signs, digest, pool
from parity.engine.programs.rounding_rules import (
    CALLBACKS,
    ELEMENTARY,
    EXACT,
    UNITS,
    rounded,
    wide,
)
from tests.helpers import EXACT as FLOAT64


@dataclass(frozen=True)
class Noted(Signs):
    """Signs that move nothing and say what they were asked to move, in unit roundoffs."""

    asked: list[tuple[tuple[int, ...], float]] = field(default_factory=list)

    def moved(self, value: Any, roundoff: float, *, counted: bool = False) -> Any:
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
    "over two axes": (
        lambda a, b: jnp.tensordot(a, b, 2), (draw(5, 3, 4), draw(3, 4, 2)),
        [((3, 4, 2), adding(12)), ((5, 2), 1.0)],
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
    "running logarithm": (
        lambda x: jax.lax.cumlogsumexp(x, 0), (draw(3, 6),),
        [((3, 6), adding(3)), ((3, 6), 1.0)],
    ),
    "windows that overlap": (
        lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (2, 4), (1, 1), "VALID"),
        (draw(3, 6),), [((3, 6), adding(8)), ((2, 3), 1.0)],
    ),
    "windows side by side": (
        lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 3), (1, 3), "VALID"),
        (draw(3, 6),), [((3, 6), adding(3)), ((3, 2), 1.0)],
    ),
    "inverse hyperbolic": (jnp.arcsinh, (draw(5),), [((5,), 4.0)]),
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


ELEMENTARY_NAMES = """
exp exp2 expm1 log log1p tanh erf erfc erf_inv logistic sin cos tan rsqrt cbrt lgamma digamma sinh
cosh asinh atanh asin acos atan
"""


@pytest.mark.parametrize("name", ELEMENTARY_NAMES.split())
def test_a_function_that_is_not_rounded_correctly_is_off_by_units(name: str):
    x = np.full(5, 0.3, np.float32)
    assert asked_of(getattr(jax.lax, name), x)[0] == [((5,), 4.0)]


def test_functions_of_larger_numbers_and_of_two_are_off_by_units_too():
    x = np.full(5, 1.3, np.float32)
    for function in (jax.lax.acosh, lambda x: jax.lax.pow(x, x), lambda x: jax.lax.atan2(x, x)):
        assert asked_of(function, x)[0] == [((5,), 4.0)]


MOVED = {
    "abs": jnp.abs,
    "argmax": lambda x: jnp.argmax(x, 1),
    "broadcast": lambda x: jax.lax.broadcast_in_dim(x, (2, 3, 4), (1, 2)),
    "ceil": jnp.ceil,
    "floor": jnp.floor,
    "round": jax.lax.round,
    "sign": jnp.sign,
    "clamp": lambda x: jax.lax.clamp(-0.5, x, 0.5),
    "concatenate": lambda x: jax.lax.concatenate([x, x], 0),
    "dynamic slice": lambda x: jax.lax.dynamic_slice(x, (1, 0), (2, 2)),
    "dynamic update": lambda x: jax.lax.dynamic_update_slice(x, x[:1], (1, 0)),
    "gather": lambda x: x[IDS],
    "scatter": lambda x: x.at[IDS[:2]].set(x[:2]),
    "finite": jnp.isfinite,
    "larger": lambda x: jax.lax.max(x, -x),
    "smaller": lambda x: jax.lax.min(x, -x),
    "least": lambda x: jnp.min(x, 0),
    "pad": lambda x: jax.lax.pad(x, 0.0, ((1, 0, 0), (0, 2, 0))),
    "reshape": lambda x: x.reshape(-1),
    "reverse": lambda x: x[::-1],
    "select": lambda x: jax.lax.select(x > 0, x, -x),
    "slice": lambda x: jax.lax.slice(x, (0, 1), (2, 3)),
    "split": lambda x: jnp.split(x, 2, 1)[1],
    "squeeze": lambda x: jax.lax.squeeze(x[:1], (0,)),
    "expand": lambda x: jax.lax.expand_dims(x, (0,)),
    "stop": jax.lax.stop_gradient,
    "best": lambda x: jax.lax.top_k(x, 2)[0],
    "transpose": lambda x: x.T,
    "running maximum": lambda x: jax.lax.cummax(x, 0),
    "running minimum": lambda x: jax.lax.cummin(x, 0),
    "copy": lambda x: jnp.array(x, copy=True),
    "barrier": jax.lax.optimization_barrier,
    "less precise": lambda x: jax.lax.reduce_precision(x, 8, 7),
    "bits": lambda x: jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(x, jnp.int32), jnp.float32
    ),
}


@pytest.mark.parametrize("name", MOVED)
def test_what_moves_or_chooses_numbers_rounds_none(name: str):
    assert asked_of(MOVED[name], draw(3, 4))[0] == []


def test_parts_of_a_complex_number_are_exact():
    z = np.array([1 + 2j, 0.5 - 3j], np.complex64)
    for function in (jax.lax.real, jax.lax.imag, jax.lax.conj):
        assert asked_of(function, z)[0] == []


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


def test_of_several_results_those_of_numbers_round():
    """A factorisation returns its pivots too, which are whole numbers."""
    asked, outputs = asked_of(lambda x: jax.lax.linalg.lu(x)[0], draw(3, 3))
    assert asked == [((3, 3), 1.0)] and outputs[0].dtype == jnp.float64

    def positions_and_numbers(n, x):
        return jax.lax.reduce(
            (n, x), (jnp.int32(0), jnp.float32(0)), lambda a, b: (a[0] + b[0], a[1] + b[1]), (1,)
        )

    asked, outputs = asked_of(
        positions_and_numbers, np.arange(6, dtype=np.int32).reshape(2, 3), draw(2, 3)
    )
    assert asked == [((2,), 1.0)] and [x.dtype for x in outputs] == [jnp.int32, jnp.float64]


def test_a_sum_leaves_the_operands_it_was_given():
    """Whoever records the operation knows its operands by their objects."""

    @dataclass(frozen=True)
    class Doubling(Signs):
        def moved(self, value: Any, roundoff: float, *, counted: bool = False) -> Any:
            return 2 * value

    [eqn] = jax.make_jaxpr(lambda x: jax.lax.cumsum(x, 0))(draw(5)).eqns
    with jax.enable_x64(True):
        given = [jnp.asarray(draw(5), jnp.float64)]
        operands = list(given)
        rounded(eqn, operands, Doubling(None), {})
    assert operands[0] is given[0]


def outside_of_jax(name: str, refusal: type[Exception] | None = None) -> Primitive:
    """Return an operation that says by which dtype it was called, and may refuse float64."""
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x: x)

    @primitive.def_impl
    def called(x):
        if refusal is not None and x.dtype == jnp.float64:
            raise refusal
        return jnp.full_like(x, x.dtype.itemsize)

    return primitive


@pytest.mark.parametrize("name", ["pure_callback", "io_callback", "ffi_call"])
def test_code_outside_of_jax_gets_the_dtype_it_was_written_for(name: str):
    assert name in CALLBACKS
    check_own_dtype(outside_of_jax(name), name, "NotImplementedError")


@pytest.mark.parametrize("refusal", [TypeError, ValueError, NotImplementedError])
def test_an_operation_that_refuses_float64_runs_in_its_own_dtype(refusal):
    check_own_dtype(outside_of_jax("special", refusal), "special", refusal.__name__)


def check_own_dtype(primitive: Primitive, *words: str):
    [eqn] = jax.make_jaxpr(primitive.bind)(draw(2)).eqns
    notices: dict[str, None] = {}
    with jax.enable_x64(True):
        [found] = rounded(eqn, [jnp.asarray(draw(2), jnp.float64)], None, notices)
    assert found.dtype == jnp.float64 and found.tolist() == [4.0, 4.0]
    [notice] = notices
    assert all(word in notice for word in words)


def test_bits_are_those_of_the_program_s_own_dtype():
    def exponent(x):
        return (jax.lax.bitcast_convert_type(x, jnp.int32) >> 23) - 127

    [found] = asked_of(exponent, np.float32([1.0, 2.5, 10.0]))[1]
    assert found.tolist() == [0, 1, 3]


def test_a_number_of_few_digits_is_a_count_and_is_not_moved():
    """As an exponent is; but it is one of many in an array, and a number of many digits is not."""
    with jax.enable_x64(True):
        signs = Signs(pool(0, 4))
        for exact in (3.0, -0.5, 2.0**40):
            assert float(signs.moved(jnp.float64(exact), 2.0**-20)) == exact
        for value in (jnp.float64(0.1), jnp.full((1,), 3.0)):
            assert np.all(np.asarray(signs.moved(value, 2.0**-20)) != np.asarray(value))


def test_only_what_reads_nothing_but_counters_keeps_whole_numbers():
    """An array of whole numbers that a program made of its arguments was rounded as any other."""

    @dataclass(frozen=True)
    class Counted(Signs):
        def moved(self, value: Any, roundoff: float, *, counted: bool = False) -> Any:
            asked.append(counted)
            return value

    def function(x):
        positions = jnp.arange(3, dtype=jnp.float32) + 1
        return jax.lax.fori_loop(0, 1, lambda _, x: x + positions, x * positions)

    asked: list[bool] = []
    closed = jax.make_jaxpr(function)(draw(3))
    for signs in (Counted(pool(0, 4)), Signs(pool(0, 4))):
        with jax.enable_x64(True):
            [found] = Evaluation(True, signs).run(closed, [jnp.full(3, 3.0)], Marks())
        assert np.equal(found, [4.0, 8.0, 12.0]).all() == isinstance(signs, Counted)
    # The positions; then their product with the argument, and a sum in a loop, whose argument they
    # are and which is traced more than once.
    assert asked[:2] == [True, False] and len(asked) > 2 and not any(asked[1:])


LOOPS = {
    "body": lambda x: jax.lax.while_loop(lambda x: x[0] < 9, lambda x: x * x, x),
    "condition": lambda x: jax.lax.while_loop(lambda x: x[0] * x[1] < 9, lambda x: x + 1, x),
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_each_turn_of_a_loop_rounds_by_signs_of_its_own(loop):
    """Wherever an operation is in the loop; outside of it there are no turns."""

    @dataclass(frozen=True)
    class Turned(Signs):
        def moved(self, value: Any, roundoff: float, *, counted: bool = False) -> Any:
            turns.append(isinstance(self.turn, jax.core.Tracer))
            return value

    turns: list[bool] = []
    closed = jax.make_jaxpr(lambda x: loop(jnp.exp(x)))(draw(3))
    with jax.enable_x64(True):
        Evaluation(True, Turned(None)).run(closed, [jnp.ones(3)], Marks())
    assert turns[0] is False and len(turns) > 1 and all(turns[1:])


def test_rows_of_a_loop_go_on_by_the_signs_that_decided_whether_it_goes_on():
    """A condition that was perturbed twice might hold for the loop and for none of its rows."""

    @dataclass(frozen=True)
    class Later(Signs):
        def moved(self, value: Any, roundoff: float, *, counted: bool = False) -> Any:
            # The turns count from 1; outside of the loop it is 0.
            return jnp.where(self.turn > 2, value + 100, value)

    def counted(n, step):
        return jax.lax.while_loop(lambda n: n.astype(step.dtype) * step < 5, lambda n: n + 1, n)

    rows = np.arange(2, dtype=np.int32), np.float32([1.1, 1.1])
    closed = jax.make_jaxpr(jax.vmap(counted))(*rows)
    with jax.enable_x64(True):
        [found] = Evaluation(True, Later(None)).run(closed, rows, Marks())
    # Each row takes the two turns in which nothing is moved.
    assert found.tolist() == [2, 3]


def test_tables_are_one_where_shapes_and_values_are_whatever_holds_them():
    table = draw(3, 4)
    others = [table.astype(np.float64), np.asfortranarray(table), jnp.asarray(table)]
    assert {digest(other) for other in others} == {digest(table)}
    different = [table.reshape(4, 3), table.reshape(-1), -table, table.T, table.astype(complex)]
    assert digest(table) not in {digest(other) for other in different}


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_a_table_that_both_programs_hold_is_moved_by_neither(dtype: type):
    """One that only one of them holds is moved in each of its parts."""
    table, other = (np.exp(1j * draw(3, 4) + n).astype(np.complex64) for n in range(2))
    if dtype is np.float32:
        table, other = table.real.copy(), other.real.copy()
    with jax.enable_x64(True):
        signs = Signs(pool(0, 12), 0.0, 1.0, shared=frozenset({digest(table)}))
        kept, moved = np.asarray(signs.constant(table)), np.asarray(signs.constant(other))
        both = np.asarray(Signs(pool(0, 12), 0.0, 1.0).constant(table))
    parts = [np.real, np.imag] if dtype is np.complex64 else [np.real]
    for part in parts:
        assert np.array_equal(part(kept), part(table))
        assert (part(moved) != part(other)).any() and (part(both) != part(table)).any()


def test_positions_are_counted_in_float64_too():
    """bfloat16 has no 257."""
    [found] = asked_of(lambda x: jax.lax.iota(jnp.bfloat16, 260), draw(1))[1]
    assert found.dtype == jnp.float64 and np.array_equal(found, np.arange(260))


@pytest.mark.parametrize("on", [{"operations": 1.0}, {"operations": 0.0, "constants": 1.0}])
def test_an_operand_that_rounding_moved_out_of_a_domain_is_moved_back(on: dict[str, float]):
    [eqn] = jax.make_jaxpr(jax.lax.sqrt)(draw(3)).eqns
    with jax.enable_x64(True):
        outside = jnp.asarray([-4.0, 0.0, 9.0])
        zeros = jnp.zeros(2**15, jnp.int8)
        [found] = rounded(eqn, [outside], Signs(zeros, **on), {})
        [still] = rounded(eqn, [outside], Signs(zeros, operations=0.0), {})
    assert found.tolist() == [2.0, 0.0, 3.0]
    assert np.isnan(still[0]), "the program's own NaN stays"
