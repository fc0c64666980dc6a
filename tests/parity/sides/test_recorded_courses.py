"""Operations of the branch that is taken and of each iteration of a while loop are recorded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from parity import FunctionSide
from parity.engine.programs import evaluation
from parity.sides.side import OUTPUT

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
    assert results[at] == pytest.approx(expected) and results[-1] == pytest.approx(2 * expected)


def test_a_stage_in_a_branch_has_operations():
    def branch(x):
        return checkpoint_name(jnp.cos(x + 1.0), "inner")

    def function(params, x):
        return jax.lax.cond(x[0] < 0.5, branch, jnp.sin, x)

    found, results = primitives(function, X, stage="inner")
    assert found == ["add", "cos"]
    assert results[-1] == pytest.approx(np.cos(X.astype(np.float64) + 1.0))


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
        assert results[-1] == pytest.approx(expected)


def test_a_while_loop_of_many_operations_stays_whole(monkeypatch):
    monkeypatch.setattr(evaluation, "UNROLLED", 2)
    found, _ = primitives(counted, X, np.int32(3))
    assert "while" in found and not {"sin", "cos"} & {*found}


def test_what_a_stage_does_not_depend_on_is_not_entered():
    def function(params, x):
        first = checkpoint_name(jnp.cos(x), "first")
        return first, jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * x), (0, x))

    side = FunctionSide(function, {}, X)
    side.operations_of("first", {})
    (program,) = side._programs.values()
    recorded = [operation.primitive for operation in program.recorded.operations]
    assert "while" in recorded and "mul" not in recorded
