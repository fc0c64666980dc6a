"""Jaxprs: every equation is found where it stands, and evaluation gives what the program gives."""

from __future__ import annotations

import sys
import weakref
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from parity.engine.programs.jaxprs import (
    bind,
    constants,
    counters,
    equations,
    inner_jaxprs,
    interpret,
    is_hidden,
    loop_inputs,
    opened,
)


def program(x):
    def body(carry, value):
        return carry + jnp.sin(value), jax.lax.cond(value > 0, jnp.exp, jnp.cos, value)

    return jax.lax.scan(body, jnp.float32(0), jax.jit(jnp.tanh)(x) * 2.0)


X = jnp.linspace(-1, 1, 5)


def names(enter=lambda eqn: True):
    jaxpr = jax.make_jaxpr(program)(X).jaxpr
    return [eqn.primitive.name for eqn in equations(jaxpr, enter)]


def test_calls_loops_and_branches_are_walked_after_the_equation_that_holds_them():
    found = names()
    assert {"tanh", "sin", "exp", "cos"} <= set(found)
    assert found.index("scan") < found.index("sin") < found.index("cond") < found.index("exp")


def test_the_inputs_of_a_loop_are_grouped_in_either_version_of_jax():
    def turns(weights, start, rows):
        return jax.lax.scan(lambda c, row: (c * weights + row, c), start, rows)

    closed = jax.make_jaxpr(turns)(jnp.ones(3), jnp.ones(3), jnp.ones((4, 3)))
    [scan] = (eqn for eqn in equations(closed.jaxpr) if eqn.primitive.name == "scan")
    assert loop_inputs(scan, [*"cir"]) == (["c"], ["i"], ["r"])
    inputs = list(range(6))
    for params in (
        {"num_consts": 2, "num_carry": 3},
        {"ft_in": SimpleNamespace(unpack=lambda: ((None,) * 2, (None,) * 3, (None,)))},
    ):
        assert loop_inputs(scan.replace(params=params), inputs) == ([0, 1], [2, 3, 4], [5])


def test_the_programs_of_an_equation_are_found_alone_and_in_sequences():
    """JAX holds branches in a tuple; an operation of another package may have a list."""
    closed = jax.make_jaxpr(program)(X)
    eqn = closed.jaxpr.eqns[0]
    params = {"a": closed, "b": [closed, 1], "c": (closed.jaxpr,), "d": "text", "e": 3}
    found = [*inner_jaxprs(eqn.replace(params=params))]
    assert len(found) == 3 and all(each is closed.jaxpr for each in found)


def test_a_jaxpr_is_opened_with_its_constants():
    held = np.arange(3.0, dtype=np.float32)
    closed = jax.make_jaxpr(lambda x: x + jnp.asarray(held) * jnp.asarray(held)[0])(jnp.ones(3))
    jaxpr, constants = opened(closed)
    assert len(constants) == len(jaxpr.constvars)
    [out] = interpret(jaxpr, constants, [jnp.ones(3)], bind)
    assert np.array_equal(out, np.ones(3, np.float32))


@pytest.mark.parametrize(("said", "hidden"), [(True, True), (False, False), (len, False)])
def test_a_module_is_hidden_only_where_it_says_so(said, hidden, monkeypatch):
    """A function, as pytest takes one, hides nothing here."""
    file = f"/nowhere/helper_{said}.py"
    module = SimpleNamespace(__file__=file, __tracebackhide__=said)
    monkeypatch.setitem(sys.modules, "a_helper_of_a_test", module)
    assert is_hidden(file) is hidden
    assert is_hidden(f"/elsewhere{file}") is False


@pytest.mark.parametrize("odd", [None, object()], ids=["none", "object"])
def test_what_is_no_module_hides_nothing(odd, monkeypatch):
    """Python allows any object in the place of a module; the ones behind it are still read."""
    file = f"/nowhere/behind_{odd}.py"
    monkeypatch.setitem(sys.modules, "an_odd_one_of_a_test", odd)
    module = SimpleNamespace(__file__=file, __tracebackhide__=True)
    monkeypatch.setitem(sys.modules, "one_behind_it", module)
    assert is_hidden(file) is True


def test_constants_are_what_a_program_closes_over_and_the_numbers_written_in_it():
    """Wherever in it they are."""
    table = np.arange(3.0, dtype=np.float32) + 20.0

    def function(x):
        y = jax.lax.cond(x[0] > 5.0, lambda x: x * 7.0, lambda x: x, x)
        # JAX stores the body of this call without its constants.
        y = jax.checkpoint(lambda x: x * 13.0)(y)
        return jax.lax.scan(lambda c, row: (c + row * 11.0, None), y, jnp.ones((2, 3)))[0] + table

    found = [np.asarray(each) for each in constants(jax.make_jaxpr(function)(jnp.ones(3)))]
    assert {5.0, 7.0, 11.0, 13.0} <= {float(each) for each in found if not each.ndim}
    assert any(np.array_equal(each, table) for each in found)


def test_what_is_not_entered_is_left_out():
    calls = names(lambda eqn: eqn.primitive.name in ("jit", "pjit"))
    assert "tanh" in calls and "scan" in calls
    assert not {"sin", "exp", "cos"} & set(calls)


def test_an_evaluation_gives_the_program_s_outputs_and_lifts_its_literals():
    closed = jax.make_jaxpr(program)(X)
    lifted = []

    def lift(constant):
        lifted.append(constant)
        return constant

    out = interpret(closed.jaxpr, closed.consts, [X], bind, lift)
    for ours, theirs in zip(out, jax.tree.leaves(program(X)), strict=True):
        assert np.array_equal(ours, theirs)
    assert 2.0 in [float(x) for x in lifted]


def test_an_equation_draws_the_random_numbers_that_the_program_draws():
    """There are two ways, of which the program may choose another one than its caller."""
    key = jax.random.key(1)

    def drawn(key):
        return jax.random.bits(key, (4,))

    with jax.threefry_partitionable(False):
        closed, expected = jax.make_jaxpr(drawn)(key), drawn(key)
    assert not np.array_equal(drawn(key), expected)
    [eqn] = (e for e in equations(closed.jaxpr) if e.primitive.name == "random_bits")
    assert np.array_equal(bind(eqn, [key])[0], expected)


def test_an_argument_that_is_returned_outlives_its_last_reader():
    closed = jax.make_jaxpr(lambda x, y: (x, x + y, y))(X, X)
    x, total, y = interpret(closed.jaxpr, closed.consts, [X, 2 * X], bind)
    assert np.array_equal(x, X) and np.array_equal(y, 2 * X) and np.array_equal(total, X + 2 * X)


def test_a_value_is_released_after_its_last_reader():
    """And at once if nothing reads it."""

    class Value:
        pass

    made, alive = {}, {}

    def step(eqn, inputs):
        name = eqn.primitive.name
        alive[name] = {n for n, value in made.items() if value() is not None}
        value = Value()
        made[name] = weakref.ref(value)
        return [value]

    def function(x):
        jnp.exp(x)
        tangent = jnp.tan(x)
        return jnp.tanh(jnp.sin(jnp.cos(tangent))), tangent

    jaxpr = jax.make_jaxpr(function)(1.0).jaxpr
    results = interpret(jaxpr, [], [Value()], step)
    assert len(results) == 2
    assert alive == {
        "exp": set(),
        "tan": {"exp"},  # The result of the equation before is still at hand.
        "cos": {"tan"},
        "sin": {"tan", "cos"},
        "tanh": {"tan", "sin"},
    }


def test_what_has_an_effect_is_no_counter():
    """It may give other numbers each time."""

    def function(x):
        one = io_callback(lambda: np.float32(1), jax.ShapeDtypeStruct((), np.float32))
        return x + one + jax.lax.iota(jnp.float32, 3)[0]

    jaxpr = jax.make_jaxpr(function)(1.0).jaxpr
    found = counters(jaxpr)
    names = {eqn.primitive.name for eqn in jaxpr.eqns if id(eqn) in found}
    assert "iota" in names and "io_callback" not in names


def test_what_is_not_entered_is_not_entered_at_any_depth():
    called = jax.jit(program)
    jaxpr = jax.make_jaxpr(lambda x: called(x)[1] + 1)(jnp.ones(3)).jaxpr
    assert "scan" not in [eqn.primitive.name for eqn in jaxpr.eqns]
    outside = equations(jaxpr, lambda eqn: eqn.primitive.name != "scan")
    names = [eqn.primitive.name for eqn in outside]
    assert "scan" in names and "sin" not in names
    assert "sin" in [eqn.primitive.name for eqn in equations(jaxpr)]
