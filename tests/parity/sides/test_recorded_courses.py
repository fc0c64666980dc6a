"""Operations of the branch that is taken and of each iteration of a while loop are recorded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from parity import FunctionSide
from parity.engine.programs import evaluation
from parity.sides.side import OUTPUT, Precision, Run
from tests.helpers import close

X = np.linspace(0.1, 0.9, 5, dtype=np.float32)
BRANCHES = [jnp.sin, jnp.cos, lambda x: jax.lax.cond(x[0] < 0.5, jnp.tanh, jnp.exp, x)]


def primitives(function, *inputs, stage=OUTPUT, **forced):
    operations, results = FunctionSide(function, {}, *inputs).operations_of(stage, forced)
    assert operations.keys() == results.keys()
    return [operation.primitive for operation in operations.values()], [*results.values()]


def chosen(params, index, x):
    return 2.0 * jax.lax.switch(index, BRANCHES, checkpoint_name(x * 1.0, "in"))


@pytest.mark.parametrize(
    ("index", "name"), [(-2, "sin"), (0, "sin"), (1, "cos"), (2, "tanh"), (9, "tanh")]
)
def test_only_the_branch_that_is_taken_is_recorded(index: int, name: str):
    """The last branch has branches itself; JAX limits an index that is out of range."""
    found, results = primitives(chosen, np.int32(index), X)
    assert [p for p in found if p in ("sin", "cos", "tanh", "exp", "cond")] == [name]
    expected = getattr(np, name)(X.astype(np.float64))
    at = found.index(name)
    assert close(results[at], expected) and close(results[-1], 2 * expected)
    # Nor are operations of another branch recorded outside of what the stage depends on.
    side = FunctionSide(chosen, {}, np.int32(index), X)
    side.operations_of(OUTPUT, {})
    (program,) = side._programs.values()
    every = [operation.primitive for operation in program.recorded.operations]
    assert every.count("mul") == 2 and [p for p in every if p in ("sin", "cos", "tanh")] == [name]


def test_a_stage_in_a_branch_has_operations():
    def branch(x):
        return checkpoint_name(jnp.cos(x + 1.0), "inner")

    def function(params, x):
        return jax.lax.cond(x[0] < 0.5, branch, jnp.sin, x)

    found, results = primitives(function, X, stage="inner")
    assert found == ["add", "cos"]
    assert close(results[-1], np.cos(X.astype(np.float64) + 1.0))


def counted(params, x, turns):
    def body(state):
        turn, x = state
        return turn + 1, jax.lax.cond(turn == 1, jnp.sin, jnp.cos, x)

    return jax.lax.while_loop(lambda state: state[0] < turns, body, (0, x))[1]


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_every_iteration_of_a_while_loop_is_recorded_with_its_own_branches(turns: int):
    found, results = primitives(counted, X, np.int32(turns))
    names = ["cos", "sin", "cos"][:turns]
    assert [p for p in found if p in ("sin", "cos", "cond", "while")] == names or (
        # Without an iteration there is only the loop.
        turns == 0 and found == ["while"]
    )
    expected = X.astype(np.float64)
    for name in names:
        expected = getattr(np, name)(expected)
    if turns:
        assert close(results[-1], expected)


def test_a_while_loop_of_many_operations_stays_whole(monkeypatch):
    monkeypatch.setattr(evaluation, "UNROLLED", 2)
    found, _ = primitives(counted, X, np.int32(3))
    assert "while" in found and not {"sin", "cos"} & {*found}


def test_rows_of_a_loop_end_apart_under_vmap():
    """JAX repeats the loop until the last row ends; rows that have ended keep their values."""

    def function(params, x, turns):
        def row(x, turns):
            return jax.lax.fori_loop(0, turns, lambda _, x: jnp.cos(x) * 1.5, x)

        return jax.vmap(row)(x, turns)

    turns = np.array([0, 2, 1], np.int32)
    side = FunctionSide(function, {}, np.stack([X, X, X]), turns)
    expected = np.stack([X, X, X]).astype(np.float64)
    for row, count in enumerate(turns):
        for _ in range(count):
            expected[row] = np.cos(expected[row]) * 1.5
    assert close(side.run(Run(Precision.FLOAT64)).stages[OUTPUT], expected)
    # The loop stays whole: its operations are those of rows that have ended, too.
    found, _ = primitives(function, np.stack([X, X, X]), turns)
    assert "while" in found and "cos" not in found


@pytest.mark.parametrize("outer", ["scan", "while"])
def test_the_operations_of_nested_loops_are_counted_together(outer, monkeypatch):
    """The inner loop has 3 x 3 operations in each of three iterations, in all 27."""

    def function(params, x, turns):
        def inner(x):
            return jax.lax.scan(lambda c, _: (jnp.sin(c) * 1.5 + 0.5, None), x, None, length=3)[0]

        if outer == "while":
            return jax.lax.fori_loop(0, turns, lambda _, x: inner(x), x)
        return jax.lax.scan(lambda c, _: (inner(c), None), x, None, length=3)[0]

    for limit, names in ((27, {"sin"}), (26, {"scan"})):
        monkeypatch.setattr(evaluation, "UNROLLED", limit)
        found, _ = primitives(function, X, np.int32(3))
        assert {*found} & {"sin", "scan", "while"} == names


def test_what_a_stage_does_not_depend_on_is_not_entered():
    def function(params, x):
        first = checkpoint_name(jnp.cos(x), "first")
        return first, jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * x), (0, x))

    side = FunctionSide(function, {}, X)
    side.operations_of("first", {})
    (program,) = side._programs.values()
    recorded = [operation.primitive for operation in program.recorded.operations]
    assert "while" in recorded and "mul" not in recorded


def searched(params, x):
    def body(state):
        turn, _, _, x = state
        return turn + 1, True, 7, x * 2.0

    def step(state, _):
        return (True, 7, state[2] + 1.0), None

    x = jax.lax.while_loop(lambda state: ~state[1], body, (0, False, 0, x))[3]
    return jax.lax.scan(step, (False, 0, x), None, length=2)[0][2]


def test_a_loop_may_carry_what_is_written_in_it():
    """JAX keeps `True` as a Python bool, which has no dtype."""
    side = FunctionSide(searched, {}, X)
    expected = 2.0 * X.astype(np.float64) + 2.0
    assert close(side.run(Run(Precision.FLOAT64)).stages[OUTPUT], expected)
    found, results = primitives(searched, X)
    assert found.count("mul") == 1 and close(results[-1], expected)


@pytest.mark.parametrize("where", ["plain", "branch", "loop"])
def test_a_marked_random_key_and_a_marked_mask_are_no_stages(where: str):
    """They are no floating-point numbers; the program computes with them as ever."""

    def noisy(x):
        key = checkpoint_name(jax.random.key(1), "key")
        mask = checkpoint_name(x > 0.4, "mask")
        return x + jnp.where(~mask, jax.random.uniform(key, x.shape), 0.0)

    def function(params, x):
        if where == "branch":
            return jax.lax.cond(x[0] < 0.5, noisy, jnp.sin, x)
        if where == "loop":
            return jax.lax.scan(lambda x, _: (noisy(x), None), x, None, length=2)[0]
        return noisy(x)

    side = FunctionSide(function, {}, X)
    plain = side.run(Run(Precision.FLOAT32)).stages
    wide = side.run(Run(Precision.FLOAT64)).stages
    assert [*plain] == [*wide] == [OUTPUT]
    assert close(plain[OUTPUT], wide[OUTPUT])
    _, results = primitives(function, X)
    assert close(results[-1], wide[OUTPUT])
