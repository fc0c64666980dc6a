"""Products in a narrow dtype: what is rounded, what is not, and derivatives in both directions.

All numbers are integers that bfloat16 holds, or that it provably does not, and sums of them that
float32 holds: every product has one right answer, to the bit.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from megalodon_jax.layers.contraction import contract
from megalodon_jax.layers.linear import matmul
from parity.engine.programs.jaxprs import equations
from tests.helpers import roundoff, tiny

NARROW = tiny(compute_dtype="bfloat16")
EQUATIONS = {
    "aby,zy->abz": ((2, 3, 5), (4, 5)),  # a linear map
    "nqd,nkd->nqk": ((2, 3, 4), (2, 5, 4)),  # scores
    "nqk,nke->nqe": ((2, 3, 5), (2, 5, 4)),  # mixing
}
each_equation = pytest.mark.parametrize("equation", EQUATIONS)


def drawn(equation: str, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Both operands and a cotangent, of which many need 9 bits, one more than bfloat16 has."""
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-511, 512, shape).astype(np.float32) for shape in EQUATIONS[equation])
    bar = rng.integers(-511, 512, np.einsum(equation, a, b).shape).astype(np.float32)
    return jnp.asarray(a), jnp.asarray(b), jnp.asarray(bar)


def narrow(x: jax.Array | np.ndarray) -> np.ndarray:
    rounded = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)
    assert not np.array_equal(rounded, x)
    return rounded


def transposed(equation: str) -> tuple[str, str]:
    left, right, result = equation.replace("->", ",").split(",")
    return f"{result},{right}->{left}", f"{result},{left}->{right}"


@each_equation
def test_operands_and_cotangents_are_rounded_and_no_result_is(equation: str) -> None:
    a, b, bar = drawn(equation)
    y, pull = jax.vjp(lambda a, b: contract(equation, a, b, NARROW), a, b)
    da, db = pull(bar)
    to_a, to_b = transposed(equation)
    assert np.array_equal(y, np.einsum(equation, narrow(a), narrow(b)))
    assert np.array_equal(da, np.einsum(to_a, narrow(bar), narrow(b)))
    assert np.array_equal(db, np.einsum(to_b, narrow(bar), narrow(a)))
    for found in (y, da, db):
        assert found.dtype == jnp.float32
        narrow(found)  # holds bits that bfloat16 would have lost


@each_equation
def test_no_product_is_of_mixed_widths(equation: str) -> None:
    """A GPU multiplies a float32 and a bfloat16 operand as two float32: a quarter of the speed."""

    def gradients(a, b, bar):
        return jax.vjp(lambda a, b: contract(equation, a, b, NARROW), a, b)[1](bar)

    program = jax.make_jaxpr(gradients)(*drawn(equation)).jaxpr
    widths = [
        [str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)]
        for eqn in equations(program)
        if eqn.primitive.name == "dot_general"
    ]
    assert widths and widths == [["bfloat16", "bfloat16", "float32"]] * len(widths)


@each_equation
def test_the_tangent_is_that_of_both_operands(equation: str) -> None:
    a, b, _ = drawn(equation)
    da, db, _ = drawn(equation, seed=1)

    def run(a, b):
        return contract(equation, a, b, NARROW)

    y, dot = jax.jit(lambda *p: jax.jvp(run, p[:2], p[2:]))(a, b, da, db)
    assert np.array_equal(y, np.einsum(equation, narrow(a), narrow(b)))
    one, other = (narrow(a), narrow(db)), (narrow(da), narrow(b))
    assert np.array_equal(dot, np.einsum(equation, *one) + np.einsum(equation, *other))


def test_narrow_operands_keep_their_dtype_in_the_gradient() -> None:
    """Queries and keys are rounded before: what they are given back is theirs."""
    equation = "nqd,nkd->nqk"
    a, b, bar = drawn(equation)
    given = jnp.asarray(a, jnp.bfloat16), jnp.asarray(b, jnp.bfloat16)
    pull = jax.vjp(lambda a, b: contract(equation, a, b, NARROW), *given)[1]
    for found, to, other in zip(pull(bar), transposed(equation), (b, a), strict=True):
        assert found.dtype == jnp.bfloat16
        exact = np.einsum(to, narrow(bar), narrow(other))
        assert np.array_equal(np.asarray(found, np.float32), narrow(exact))


def test_a_batch_and_a_second_derivative() -> None:
    equation = "aby,zy->abz"
    a, b, bar = drawn(equation)
    many = jnp.stack([a, -a, a + 1])
    one_by_one = jnp.stack([contract(equation, x, b, NARROW) for x in many])
    assert np.array_equal(jax.vmap(lambda x: contract(equation, x, b, NARROW))(many), one_by_one)

    def gradient(b):
        return jax.vjp(lambda a: contract(equation, a, b, NARROW), a)[1](bar)[0]

    # The gradient by a is linear in b, so its derivative is itself at the tangent.
    db = drawn(equation, seed=1)[1]
    assert np.array_equal(jax.jvp(gradient, (b,), (db,))[1], gradient(db))


def loss(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(matmul(x, weight, NARROW)))


def given() -> tuple[jax.Array, jax.Array]:
    x, weight = (jax.random.normal(jax.random.key(n), (16, 8)) for n in range(2))
    return x, weight


@pytest.mark.parametrize("check", [True, False])
def test_gradients_on_shards_are_summed_where_the_operand_is_alike(check: bool) -> None:
    """`check_vma` is JAX's default: an operand that every shard has is told from its shards."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def sharded(x, weight):
        return jax.lax.psum(loss(x, weight), "data")

    specs: Any = {"mesh": mesh, "out_specs": P(), "check_vma": check}
    for in_specs in ((P("data"), P()), (P(), P("data"))):
        function = jax.shard_map(sharded, in_specs=in_specs, **specs)
        found = jax.jit(jax.grad(function, (0, 1)))(*given())
        exact = jax.grad(loss, (0, 1))(*given())
        for a, b in zip(found, exact, strict=True):
            # Sums of at most 16 terms of float32, in another order.
            assert np.all(np.abs(a - b) <= roundoff(16) * np.sum(np.abs(b)))


def test_gradients_on_explicit_axes_have_the_placement_of_their_operand() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x, weight = given()
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P("data")))
        for function in (jax.grad(loss, (0, 1)), jax.jit(jax.grad(loss, (0, 1)))):
            found = function(placed, weight)
            assert [jax.typeof(g).sharding.spec[0] for g in found] == ["data", None]


def products_of(function: Any, *args: Any) -> int:
    program = jax.make_jaxpr(function)(*args).jaxpr
    return sum(eqn.primitive.name == "dot_general" for eqn in equations(program))


def test_nothing_is_multiplied_for_an_operand_that_stands_still() -> None:
    x, weight = given()
    both, one = (products_of(jax.grad(loss, n), x, weight) for n in ((0, 1), 0))
    assert (both, one) == (3, 2)


@pytest.mark.parametrize("policy", ["dots_saveable", "nothing_saveable"])
def test_a_policy_of_rematerialisation_sees_the_product(policy: str) -> None:
    def twice(x, weight):
        return jnp.sum(jnp.tanh(matmul(jnp.tanh(matmul(x, weight, NARROW)), weight.T, NARROW)))

    kept = jax.checkpoint(twice, policy=getattr(jax.checkpoint_policies, policy))
    # Forward 2 and gradients 4; recomputed are those that are not saved and needed again.
    assert products_of(jax.grad(kept, (0, 1)), *given()) == {"dots_saveable": 6}.get(policy, 8)


def test_no_array_outlives_its_trace() -> None:
    with jax.checking_leaks():
        jax.jit(lambda *given: jax.jvp(loss, given, given)[1])(*given())
        x, weight = given()
        weights = jnp.stack([weight[:8, :8]] * 2)

        def scanned(x):
            return jax.lax.scan(lambda c, w: (jnp.tanh(matmul(c, w, NARROW)), None), x, weights)[0]

        jax.jit(jax.grad(lambda x: jnp.sum(scanned(x))))(x)


@pytest.mark.parametrize("config", [NARROW, tiny()], ids=["narrow", "wide"])
def test_widths_that_differ_are_refused(config: Any) -> None:
    # An einsum would repeat the only column.
    with pytest.raises(ValueError, match=r"x of width 8, as weight \(16, 8\) has it, got \(3, 1\)"):
        # Past the check of annotated shapes, which tests alone have.
        inspect.unwrap(matmul)(jnp.ones((3, 1)), jnp.ones((16, 8)), config)


def test_one_width_is_jax_s_own_product() -> None:
    a, b, bar = drawn("aby,zy->abz")
    y, pull = jax.vjp(lambda a, b: contract("aby,zy->abz", a, b, tiny()), a, b)
    own, own_pull = jax.vjp(lambda a, b: jnp.einsum("aby,zy->abz", a, b), a, b)
    for found, expected in zip((y, *pull(bar)), (own, *own_pull(bar)), strict=True):
        assert np.array_equal(found, expected)
