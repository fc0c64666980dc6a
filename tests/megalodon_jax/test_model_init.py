"""Initialisation: each mode draws what it says, and only its key decides."""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megalodon_jax import MegalodonForCausalLM, traced_checks
from megalodon_jax.layers.linear import init_weight
from tests.helpers import same_leaves, tiny, tokens

SHAPE = (48, 64)
N = SHAPE[0] * SHAPE[1]
# Standard deviation of a unit normal cut at 3: 1 - 2*3*pdf(3)/(cdf(3) - cdf(-3)), square root.
CUT_AT_3 = 0.98658


def draw(mode: str, **arguments) -> np.ndarray:
    config = tiny(init_mode=mode)
    return np.asarray(init_weight(SHAPE, config, key=jax.random.key(0), **arguments), np.float64)


@pytest.mark.parametrize(
    ("mode", "arguments", "std"),
    [
        ("he", {}, np.sqrt(2 / 64)),
        # D = 8 in 2 groups: features of size 2 after the final norm, 8 of them in a logit.
        ("he", {"dim": 8}, 0.5 / (2 * np.sqrt(8))),
        ("bert", {}, 0.02),
        ("xavier", {}, np.sqrt(2 / (48 + 64))),
        ("gaussian", {}, CUT_AT_3),
        ("gaussian", {"dim": 16}, CUT_AT_3 / 4),
        ("none", {}, 1 / np.sqrt(3 * 64)),
        ("none", {"embedding": True}, 1.0),
    ],
)
def test_mean_and_deviation_are_those_of_the_mode(mode: str, arguments: dict, std: float) -> None:
    weight = draw(mode, **arguments)
    assert abs(weight.mean()) < 5 * std / np.sqrt(N)
    assert abs(weight.std() / std - 1) < 5 / np.sqrt(2 * N)


@pytest.mark.parametrize(
    ("mode", "arguments", "bound"),
    [
        ("xavier", {}, np.sqrt(6 / (48 + 64))),
        ("gaussian", {}, 3.0),
        ("gaussian", {"dim": 16}, 0.75),
        ("none", {}, 1 / 8),
    ],
)
def test_a_bounded_mode_reaches_its_bound_and_not_further(
    mode: str, arguments: dict, bound: float
) -> None:
    largest = np.abs(draw(mode, **arguments)).max()
    assert 0.9 * bound < largest <= np.float32(bound)


def test_weights_are_drawn_wide_and_stored_narrow() -> None:
    config = tiny(init_mode="he", param_dtype="bfloat16")
    weight = init_weight(SHAPE, config, key=jax.random.key(0))
    assert weight.dtype == jnp.bfloat16
    assert np.array_equal(weight, jnp.asarray(draw("he"), jnp.bfloat16))


def test_the_key_alone_decides() -> None:
    config = tiny(num_layers=1, swiglu=True)
    first, again, other = (MegalodonForCausalLM(config, key=jax.random.key(k)) for k in (0, 0, 1))
    assert same_leaves(first, again)
    assert not same_leaves(first, other)


def test_layers_and_their_projections_are_drawn_apart() -> None:
    model = MegalodonForCausalLM(tiny(), key=jax.random.key(0))
    first, second = model.model.layers
    assert not np.array_equal(first.attn.wz.weight, second.attn.wz.weight)
    assert not np.array_equal(first.attn.wv.weight, first.attn.wr.weight)
    assert not np.any(first.attn.wz.bias)


WIDE = tiny(vocab_size=300, model_dim=64, value_dim=64, ffn_hidden_dim=64, norm_num_groups=8)


@eqx.filter_jit
def first_loss(model, ids):
    return model.compute_loss(ids, ids)


@pytest.mark.parametrize("output_size", [-1, 301])
@pytest.mark.traced_checks
def test_training_starts_where_every_token_is_as_likely_as_another(output_size: int) -> None:
    config = dataclasses.replace(WIDE, output_size=output_size)
    model = MegalodonForCausalLM(config, key=jax.random.key(0))
    ids = jnp.asarray(tokens(config, (2, 64)))
    # The control: a head drawn like a map between features, as it once was.
    head = init_weight(model.head.shape, config, key=jax.random.key(1))
    where = (lambda m: m.model.embed.weight) if model.tied else (lambda m: m.lm_head.weight)
    wide = eqx.tree_at(where, model, head)
    uniform = np.log(model.head.shape[0])
    with traced_checks(False):
        assert 0.9 * uniform <= first_loss(model, ids) <= 1.1 * uniform < first_loss(wide, ids)
