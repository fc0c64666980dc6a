"""Four dtypes, each where it belongs: products, sums, softmax, and what is never narrow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megalodon_jax import MegalodonBlock, MegalodonConfig
from megalodon_jax.convert import state_dict
from megalodon_jax.layers import MegalodonAttention, RotaryEmbedding
from megalodon_jax.layers.attention import attend
from megalodon_jax.weights import abstract_model
from parity.megalodon import oracle
from tests.helpers import EXACT, model_of, rel_l2, roundoff, tiny

B, L = 2, 5
NARROW, WIDE = "bfloat16", "float32"
POLICIES = [
    {"compute_dtype": compute, "accum_dtype": accum, "softmax_dtype": softmax}
    for compute, accum, softmax in product((NARROW, WIDE), repeat=3)
    if (compute, accum) != (WIDE, NARROW)
]
policies = pytest.mark.parametrize("policy", POLICIES, ids=lambda p: "-".join(p.values()))


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every operation of a program, those of its inner programs too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program):
            if is_program(inner):
                yield from equations(getattr(inner, "jaxpr", inner))


def is_program(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def dtypes(program: Any, *primitives: str) -> set[tuple[str, ...]]:
    """Dtypes of operands and result of operations by name."""
    return {
        tuple(v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars))
        for eqn in equations(program.jaxpr)
        if eqn.primitive.name in primitives
    }


@policies
def test_attention_multiplies_sums_and_weighs_each_in_its_dtype(policy: dict) -> None:
    config = tiny(**policy)
    compute, accum, softmax = policy.values()
    heads = jax.ShapeDtypeStruct((B, L, 2, 4), jnp.float32)
    mask = jax.ShapeDtypeStruct((B, L, L), jnp.bool_)
    program = jax.make_jaxpr(lambda q, k, v, m: attend(q, k, v, m, config))(*[heads] * 3, mask)
    assert dtypes(program, "dot_general") == {(compute, compute, accum)}
    assert dtypes(program, "exp", "reduce_max") == {(softmax, softmax)}
    assert dtypes(program, "reduce_sum") <= {(softmax, softmax), (WIDE, WIDE)}
    assert dtypes(program, "div", "sub") == {(softmax,) * 3}
    assert [aval.dtype.name for aval in program.out_avals] == [accum]


@policies
def test_a_block_keeps_norms_and_filter_wide_and_the_rest_in_its_dtype(policy: dict) -> None:
    config = tiny(**policy, swiglu=True)
    compute, accum, _ = policy.values()
    block = eqx.filter_eval_shape(MegalodonBlock, config, 1, key=jax.random.key(0))
    x = jax.ShapeDtypeStruct((B, L, config.model_dim), accum)
    program = eqx.filter_make_jaxpr(lambda block, x: block(x)[0])(block, x)[0]
    products = dtypes(program, "dot_general")
    assert (compute, compute, accum) in products
    # Powers of the poles and angles of RoPE are float64 or float32, and nothing else is a product.
    filters = products - {(compute, compute, accum)}
    assert filters <= {(WIDE,) * 3, ("float64",) * 3}
    assert dtypes(program, "rsqrt") == {(WIDE, WIDE)}
    assert dtypes(program, "fft") == {(WIDE, "complex64"), ("complex64", WIDE)}
    assert dtypes(program, "logistic") <= {(accum,) * 2, (WIDE,) * 2, ("float64",) * 2}
    assert [aval.dtype.name for aval in program.out_avals] == [accum]


def with_drawn_gains(config: MegalodonConfig) -> MegalodonAttention:
    return model_of(config).model.layers[0].attn


@policies
def test_queries_and_keys_are_scaled_in_float32_by_gains_that_are_not_zero(policy: dict) -> None:
    config = tiny(**policy)
    attn = with_drawn_gains(config)
    m = jnp.asarray(np.random.default_rng(1).standard_normal((B, L, config.model_dim)), jnp.float32)
    z = np.asarray(attn.wz(m), np.float64).reshape(B, L, config.num_heads, config.head_dim)
    z = z / np.sqrt((z**2).mean(-1, keepdims=True) + config.norm_eps)
    gamma, beta = (
        np.asarray(a, np.float64).reshape(2, *z.shape[2:]) for a in (attn.gamma, attn.beta)
    )
    # The sums of the norm, then a root, two products and an addition.
    bound = roundoff(config.head_dim + 8)
    for i, found in enumerate(attn.queries_keys(m)):
        assert found.dtype == jnp.float32
        assert rel_l2(found, z * (gamma[i] + 1) / math.sqrt(config.head_dim) + beta[i]) <= bound


@policies
def test_an_embedding_is_scaled_by_the_whole_of_the_root(policy: dict) -> None:
    config = tiny(**policy, scale_emb=True)
    model = model_of(config).model
    ids = jnp.arange(config.vocab_size)[None]
    root = np.float32(math.sqrt(config.model_dim))
    assert root != root.astype(jnp.bfloat16)
    stored = model.embed.weight.astype(config.accum_dtype).astype(jnp.float32)
    expected = (np.asarray(stored) * root).astype(config.accum_dtype)
    found = model._embedded(ids)
    assert found.dtype == config.accum_dtype
    assert np.array_equal(found[0], expected)


@pytest.mark.parametrize("base", [None, 7.0, 500.0])
def test_another_base_turns_and_is_exported_as_it_is(base: float | None) -> None:
    config = tiny(rope_base=base)
    half = config.head_dim // 2
    rates = (base or 10_000.0) ** (-np.arange(half) / half)
    exported = state_dict(model_of(config), include_rope_inv_freq=True)
    for i in range(config.num_layers):
        found = exported[f"model.layers.{i}.attn.inner.rope.inv_freq"]
        assert np.array_equal(found, rates.astype(np.float32))
    with jax.enable_x64(True):
        x = np.random.default_rng(0).standard_normal((B, L, 2, config.head_dim))
        rope = RotaryEmbedding(config.head_dim, config.effective_rope_base)
        turned, _ = rope(jnp.asarray(x), jnp.asarray(x))
        assert rel_l2(turned, oracle.rope(config, x)) <= EXACT
        cosines = rope.tables(1, 1, jnp.float64)[0]
        assert rel_l2(cosines[0, 0], np.cos(rates)) <= EXACT
    attn = abstract_model(config).model.layers[0].attn
    assert attn.inner.rope.base == config.effective_rope_base


def test_a_bias_is_added_as_it_is_stored() -> None:
    """Only what the multiplier reads is rounded: of an input of zeros the bias is left."""
    config = tiny(num_layers=1, compute_dtype="bfloat16")
    layer = model_of(config).model.layers[0].attn.wz
    bias = np.asarray(layer.bias)
    assert not np.array_equal(bias, bias.astype(jnp.bfloat16).astype(np.float32))
    out = layer(jnp.zeros((1, config.model_dim)))
    assert np.array_equal(out[0], bias)
