"""Derivatives of every order and in either direction, and batches of calls.

Curvature methods and optimisers differentiate forwards, and forwards over backwards. Each way is
compared with another that shares no rule with it, in the dtype the model is trained in.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megalodon_jax import MegalodonForCausalLM, traced_checks
from megalodon_jax.layers import complex_ema
from megalodon_jax.layers.attention import ChunkedAttention
from megalodon_jax.quantization.products import gemm
from megalodon_jax.segments import document_positions
from tests.helpers import EXACT, EXACT_GRADIENT, model_of, rel_l2, rounding_bound, tiny, tokens

FLOORS = 2
"""Errors of a float32 derivative, in steps between neighbouring float32 models: 0.35 measured."""
# Small, and with what a derivative passes through: two chunks, a mask, gates, a rescaled sum.
CONFIG = tiny(num_layers=1, swiglu=True, rescale_nffn=True, chunk_size=2)
L = 4
IDS = tokens(CONFIG, (2, L))
MASK = np.ones((2, L), bool)
MASK[1, 3:] = False
# A document longer than a chunk, and ones that begin inside of one.
DOCUMENTS = np.array([[0, 0, 0, 1], [0, 1, 1, 1]], np.int32)


class Objective:
    """The loss of a model in one dtype, its arrays, and a direction in their space."""

    def __init__(self, dtype: str, documents: np.ndarray | None = None):
        self.documents = documents
        self.arrays, self.static = eqx.partition(model_of(CONFIG.with_dtype(dtype)), eqx.is_array)
        rng = np.random.default_rng(0)
        self.direction = jax.tree.map(
            lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), self.arrays
        )
        self._compiled = jax.jit(self._derivatives)

    def loss(self, arrays: Any) -> jax.Array:
        model: MegalodonForCausalLM = eqx.combine(arrays, self.static)
        ids = jnp.asarray(IDS)
        return model.compute_loss(ids, ids, jnp.asarray(MASK), segment_ids=self.documents)

    def _derivatives(self, arrays, direction):
        found, moved = jax.jvp(jax.value_and_grad(self.loss), (arrays,), (direction,))
        (_, gradient), (slope, curvature) = found, moved
        return {"slope": slope, "gradient": gradient, "curvature": curvature}

    def derivatives(self, step: float = 0.0) -> dict[str, np.ndarray]:
        """Derivatives along the direction, `step` of it away from the model."""
        there = jax.tree.map(lambda x, d: x + step * d, self.arrays, self.direction)
        with traced_checks(False):
            found = self._compiled(there, self.direction)
        return {name: flat(tree) for name, tree in found.items()}


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


@pytest.mark.few(1)
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one text", "packed"])
def test_slopes_and_curvature_are_those_of_differences_and_of_float64(
    documents: np.ndarray | None,
) -> None:
    objective = Objective("float32", documents)
    narrow = objective.derivatives()
    # What float32 knows: the same at weights moved in their last bits.
    ulp = np.finfo(np.float32).eps / np.sqrt(np.mean(flat(objective.direction) ** 2))
    nearby = objective.derivatives(ulp)
    with jax.enable_x64(True):
        objective = Objective("float64", documents)
        wide, direction = objective.derivatives(), flat(objective.direction)
        # Differences of gradients know no forward rule; the best step leaves about eps^(2/3).
        h = np.finfo(float).eps ** (1 / 3) / np.linalg.norm(direction)
        above, below = (objective.derivatives(step)["gradient"] for step in (h, -h))
    assert rel_l2(wide["slope"][0], wide["gradient"] @ direction) <= EXACT
    # Differences keep no more than half the digits.
    assert rel_l2(wide["curvature"], (above - below) / (2 * h)) <= np.sqrt(np.finfo(float).eps)
    for name, exact in wide.items():
        assert rel_l2(narrow[name], exact) <= FLOORS * rel_l2(nearby[name], narrow[name]), name
    # The control: a curvature that were the gradient again.
    floor = rel_l2(nearby["curvature"], narrow["curvature"])
    assert rel_l2(wide["gradient"], wide["curvature"]) > FLOORS * floor


@pytest.mark.parametrize("shift", [0.0, -6.0])
@pytest.mark.usefixtures("x64")
def test_the_poles_derivative_is_that_of_the_formula(shift: float) -> None:
    exponents = range(0, 40, 3)
    logits, dots = poles(shift, "float64"), poles(0.0, "float64", seed=1)

    def formula(*logits):
        return complex_ema._powers64(*logits, list(exponents))

    @partial(jax.jit, static_argnums=0)
    def derivative(function, logits, dots):
        return jax.jvp(function, logits, dots)[1]

    actual = derivative(partial(powers, exponents), logits, dots)
    expected = derivative(formula, logits, dots)
    for ours, formula in zip(actual, expected, strict=True):
        assert rel_l2(ours, formula) <= EXACT_GRADIENT
        assert rel_l2(ours[..., ::-1], formula) > EXACT_GRADIENT


@pytest.mark.parametrize("shift", [20.0, 200.0])
def test_gradients_are_finite_where_a_pole_has_become_zero(shift: float) -> None:
    def total(*logits):
        return sum(map(jnp.sum, powers(range(0, 40, 3), *logits)))

    gradients = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*poles(shift, "float32"))
    assert np.all(np.isfinite(flat(gradients)))


def poles(shift: float, dtype: str, seed: int = 0) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)
    alpha, delta, theta = (rng.standard_normal(s) for s in ((3, 4), (3, 4), (3, 1)))
    return tuple(jnp.asarray(x, dtype) for x in (alpha + shift, delta + shift, theta))


def powers(exponents: range, *logits: jax.Array) -> Any:
    return complex_ema.pole_powers(*logits, exponents, np.dtype(logits[0].dtype))


def test_a_low_precision_product_is_differentiated_backwards_only() -> None:
    def narrow(x):
        return jnp.sum(gemm(x, x, "mxfp8"))

    x = jax.ShapeDtypeStruct((2, 32), jnp.float32)
    assert jax.eval_shape(jax.grad(narrow), x) == x
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jit(lambda x: jax.jvp(narrow, (x,), (x,))).lower(x)


@pytest.mark.usefixtures("x64")
def test_packed_attention_is_differentiated_in_any_order() -> None:
    inner = ChunkedAttention(CONFIG.with_dtype("float64"))
    rng, heads = np.random.default_rng(1), (2, L, CONFIG.num_heads)
    widths = CONFIG.head_dim, CONFIG.head_dim, CONFIG.value_head_dim
    qkv, dots, ddots = (
        tuple(jnp.asarray(rng.standard_normal((2, *heads, d))) for d in widths) for _ in range(3)
    )

    def total(*qkv):
        positions = document_positions(DOCUMENTS, DOCUMENTS.shape, "the queries")
        return jnp.sum(inner(*qkv, positions=positions)[0] ** 2)

    def slope(qkv, dots):
        return jax.jvp(total, qkv, dots)[1]

    @jax.jit
    def derivatives(qkv, dots, ddots):
        def each(qkv, dots, ddots):
            backward = jax.grad(total, (0, 1, 2))(*qkv)
            curved = jax.jvp(lambda *qkv: slope(qkv, dots), qkv, ddots)[1]
            bent = jax.grad(slope)(qkv, dots)
            twice = jax.grad(lambda qkv: dot(jax.grad(total, (0, 1, 2))(*qkv), dots))(qkv)
            return (
                slope(qkv, dots),
                dot(backward, dots),
                curved,
                dot(bent, ddots),
                dot(twice, ddots),
            )

        of_batch = jax.grad(lambda qkv: jnp.sum(jax.vmap(total)(*qkv)))(qkv)
        return jax.vmap(each)(qkv, dots, ddots), jax.vmap(dot)(of_batch, dots)

    (forward, backward, curved, bent, twice), of_batch = derivatives(qkv, dots, ddots)
    for found, expected in (
        (forward, backward), (of_batch, backward), (bent, curved), (twice, curved)
    ):  # fmt: skip
        assert rel_l2(found, expected) <= EXACT_GRADIENT
        assert rel_l2(found[::-1], expected) > EXACT_GRADIENT


def dot(trees: Any, others: Any) -> jax.Array:
    return sum(map(jnp.vdot, trees, others), jnp.zeros(()))


@pytest.mark.traced_checks
def test_a_batch_of_calls_is_each_of_them() -> None:
    # Warnings are errors here: vmap of a jitted block once took float64 tables for float32.
    model = model_of(tiny(num_layers=1))
    ids = jnp.asarray(tokens(model.config, (3, L)))[:, None]

    @eqx.filter_jit
    def apart(model, ids):
        def one(ids):
            logits, cache = model(ids, return_cache=True)
            return logits, model(ids[:, -1:], cache=cache, return_cache=True)[0]

        return jax.vmap(one)(ids), one(ids[:, 0])

    with traced_checks(False):
        (whole, following), (expected, expected_following) = apart(model, ids)
        first, second = (
            rounding_bound(lambda *x, i=i: apart(*x)[1][i], model, ids) for i in (0, 1)
        )
    assert rel_l2(whole[:, 0], expected) <= first
    assert rel_l2(following[:, 0], expected_following) <= second
    assert rel_l2(whole[::-1, 0], expected) > first
