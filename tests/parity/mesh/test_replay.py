"""Marks wherever they stand, values that stand in their place, and sums in another order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parity.mesh import mesh_of
from parity.mesh.program import Program, computed_order
from parity.mesh.reordering import reordered
from tests.helpers import EXACT, close, rel_l2, roundoff

FUNCTION = 8
"""Unit roundoffs of float32 that a sine or cosine may be off: 4 ULP, what OpenCL asks of both."""
SIZES = {"data": 2, "tensor": 2}
X = np.linspace(-1.0, 2.0, 32).reshape(4, 8).astype(np.float32)


@jax.custom_jvp
def doubled(x):
    return checkpoint_name(2 * x, "doubled")


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))


def nested(x):
    """A loop around `shard_map`, with a call, a loop and a remat inside of it."""

    def local(x):
        @jax.checkpoint
        def body(y, _):
            return checkpoint_name(jnp.sin(y), "inner"), None

        y, _ = jax.lax.scan(body, doubled(x), None, length=3)
        return checkpoint_name(y, "end")

    def turn(x, _):
        y = jax.shard_map(local, in_specs=P("data", "tensor"), out_specs=P("data", "tensor"))(x)
        return checkpoint_name(y, "turn"), jnp.sum(y)

    x, sums = jax.lax.scan(turn, checkpoint_name(x, "start"), None, length=2)
    return {"last": jnp.sum(jnp.cos(x)), "sums": sums}


def expected():
    values = {n: [] for n in ("doubled", "inner", "end", "turn")}
    x, sums = X, []
    for _ in range(2):
        values["doubled"].append(2 * x)
        y, inner = 2 * x, []
        for _ in range(3):
            y = np.sin(y)
            inner.append(y)
        values["inner"].append(inner)
        values["end"].append(y)
        values["turn"].append(y)
        sums.append(y.sum())
        x = y
    return {n: np.array(v) for n, v in values.items()} | {"start": X, "sums": np.array(sums)}


def program(function=nested, sizes=SIZES, explicit=False):
    mesh = mesh_of(sizes, explicit=explicit)
    return Program(function, (X,), (NamedSharding(mesh, P("data")),), mesh)


def test_marks_are_put_together_from_wherever_they_are():
    one = program(sizes=dict.fromkeys(SIZES, 1)).run("float32")
    many = program().run("float32", one.arrays)
    assert list(many.arrays) == ["start", "doubled", "inner", "end", "turn", "sums", "last"]
    # A sine passes errors on and no more; the second turn doubles those of three, and adds three.
    sines = 9 * FUNCTION
    for name, value in expected().items():
        # No term of a sum is above 1, and each brings its error and a rounding.
        terms, size = (X.size, X.size) if name in ("sums", "last") else (1, np.abs(value).max())
        bound = roundoff(sines + FUNCTION + terms) * size
        np.testing.assert_allclose(many.arrays[name], value, rtol=0, atol=bound, err_msg=name)
        np.testing.assert_allclose(one.arrays[name], value, rtol=0, atol=bound, err_msg=name)
    assert not any(many.replicas.values())
    assert many.placements["inner"] == ((), (), ("data",), ("tensor",))


def test_a_forced_mark_is_what_the_program_goes_on_with():
    side = program()
    free = side.run("float32", expected())
    side.declared = free.placements
    other = {"end": expected()["end"] * 0.5}
    forced = side.run("float32", expected(), forced=other)
    np.testing.assert_array_equal(forced.arrays["end"][0], free.arrays["end"][0])
    np.testing.assert_array_equal(forced.arrays["turn"], np.float32(other["end"]))


def test_forced_complex_numbers_and_keys_are_what_they_were():
    def drawn(x):
        turned = checkpoint_name(jax.lax.complex(x, 2 * x), "turned")
        key = checkpoint_name(jax.random.key(jnp.sum(x > 0)), "key")
        return {"size": jnp.abs(turned), "draw": jax.random.uniform(key, (8,))}

    side = program(drawn)
    free = side.run("float32")
    other = {"turned": 3 * free.arrays["turned"], "key": 1 + free.arrays["key"]}
    forced = side.run("float32", free.arrays, forced=other)
    # Two products, a sum, a root and the factor, on either side.
    assert close(forced.arrays["size"], 3 * free.arrays["size"], roundings=10)
    key = jax.random.wrap_key_data(jnp.asarray(other["key"]))
    np.testing.assert_array_equal(forced.arrays["draw"], jax.random.uniform(key, (8,)))


@pytest.mark.parametrize("explicit", [False, True])
def test_axes_of_both_kinds_are_compared(explicit):
    def plain(x):
        y = checkpoint_name(jnp.cos(x) @ jnp.ones((8, 4), x.dtype), "product")
        return {"loss": jnp.sum(y)}

    values = program(plain, explicit=explicit).run("float64")
    assert values.arrays["product"].dtype == np.float64
    expected = np.asarray(4 * np.cos(X.astype(np.float64)).sum())
    assert rel_l2(values.arrays["loss"], expected) <= EXACT


def test_another_order_of_sums_is_the_same_sum():
    x = np.random.default_rng(0).standard_normal((64, 33)).astype(np.float32)

    def sums(x):
        image, kernel = x[None, :, :, None], jnp.ones((1, 64, 1, 1), x.dtype)
        places = jnp.zeros((2, 33), x.dtype).at[jnp.arange(64) // 32]
        return {
            "product": x.T @ x,
            "sum": jnp.sum(x),
            "rows": jnp.sum(x, axis=1),
            "convolution": jax.lax.conv(image, kernel, (1, 1), "VALID"),
            "scattered": places.add(x, indices_are_sorted=True),
        }

    mesh = mesh_of({"data": 1})
    side = Program(sums, (x,), (NamedSharding(mesh, P()),), mesh)
    plain, runs = side.run("float32"), side.run("float32", operation=reordered, seeds=3)
    wide = side.run("float64")
    for name, exact in wide.arrays.items():
        orders = np.stack([run.arrays[name] for run in runs])
        bound = roundoff(x.size) * np.abs(x).sum()
        np.testing.assert_allclose(orders, np.broadcast_to(exact, orders.shape), atol=bound)
        assert len(np.unique(np.concatenate([orders, plain.arrays[name][None]]), axis=0)) > 2


def test_results_are_in_the_order_in_which_they_are_computed():
    def steps(x):
        first = jnp.sin(x)
        second = checkpoint_name(jnp.cos(first), "mark")
        return {"a": jnp.exp(second), "b": first}

    closed = jax.make_jaxpr(steps)(X)
    assert computed_order(closed, ["a", "b"]) == ["b", "mark", "a"]
