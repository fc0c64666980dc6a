"""Random small configurations: logits and loss in float64 are those of the oracle."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megalodon_jax import MegalodonConfig
from megalodon_jax.loss import next_token_loss
from megalodon_jax.weights import EMBEDDING, HEAD, build_model
from parity.megalodon import oracle
from parity.megalodon.cases import IGNORED
from tests.helpers import EXACT, arrays, rel_l2, tiny, tokens

B = 2
PLANTED = 1e-9


# Fields and not the configuration: beartype looks at a random item of a sequence, and no strategy
# may depend on such randomness.
@st.composite
def fields(draw) -> dict[str, Any]:
    heads, groups = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((1, 2, 4)))
    vocabulary = draw(st.sampled_from((7, 17)))
    return {
        "vocab_size": vocabulary,
        "num_layers": draw(st.sampled_from((1, 1, 2))),
        "num_heads": heads,
        "z_dim": heads * draw(st.sampled_from((2, 4))),
        "value_dim": heads * draw(st.sampled_from((1, 3))),
        "norm_num_groups": groups,
        "model_dim": groups * draw(st.sampled_from((1, 3))) + groups,
        "ffn_hidden_dim": draw(st.sampled_from((1, 5))),
        "cema_ndim": draw(st.sampled_from((1, 2, 3))),
        "chunk_size": draw(st.sampled_from((1, 3, 4))),
        "rope_base": draw(st.sampled_from((None, 50.0))),
        "norm_eps": draw(st.sampled_from((1e-5, 1e-3))),
        "output_size": draw(st.sampled_from((-1, vocabulary + 2))),
        "pad_token_id": draw(st.sampled_from((0, 3))),
        "swiglu": draw(st.booleans()),
        "rescale_nffn": draw(st.booleans()),
        "scale_emb": draw(st.booleans()),
        "norm_affine": draw(st.booleans()),
        "mask_ema": draw(st.booleans()),
    }


@st.composite
def masks(draw) -> np.ndarray | None:
    length = draw(st.sampled_from((1, 2, 7, 12)))
    kind = draw(st.sampled_from(("none", "left", "right", "interior", "random")))
    t = np.arange(length)
    # A row may lose every token.
    counts = np.array([draw(st.integers(0, length)) for _ in range(B)])[:, None]
    match kind:
        case "left":
            return t >= counts
        case "right":
            return t < counts
        case "interior":
            return (t < counts // 2) | (t >= counts)
        case "random":
            seed = draw(st.integers(0, 9))
            return np.random.default_rng(seed).random((B, length)) < 0.6
    return np.ones((B, length), bool)


@eqx.filter_jit
def evaluate(model, ids, labels, mask):
    logits, _ = model(ids, mask)
    return logits, next_token_loss(logits, labels, mask, dtype=model.config.softmax_dtype)


@given(fields(), masks(), st.integers(0, 99))
@settings(max_examples=8, derandomize=True, deadline=None)
def test_any_small_model_is_the_oracle(chosen, mask, seed: int) -> None:
    config = MegalodonConfig(**chosen)
    weights = {name: w.astype(np.float64) for name, w in arrays(config, seed).items()}
    ids = tokens(config, mask.shape, seed)
    ids = np.where(mask, ids, config.pad_token_id).astype(np.int32)
    labels = np.where(np.arange(mask.shape[1]) % 5 == 4, IGNORED, ids).astype(np.int32)
    given_mask = None if mask.all() else jnp.asarray(mask)
    with jax.enable_x64(True):
        model = build_model(config.with_dtype("float64"), weights)
        logits, loss = evaluate(model, jnp.asarray(ids), jnp.asarray(labels), given_mask)
        assert logits.dtype == loss.dtype == jnp.float64
    expected = oracle.forward(config, weights, ids, mask, mask_ema=config.mask_ema)
    assert rel_l2(logits, expected) <= EXACT
    assert rel_l2(loss, oracle.loss(expected, labels, mask)) <= EXACT
    # The control: a part in 10^9 of one parameter is more than the bound lets pass.
    head = EMBEDDING if config.tied else HEAD
    off = weights | {head: weights[head] * (1 + PLANTED)}
    other = oracle.forward(config, off, ids, mask, mask_ema=config.mask_ema)
    assert rel_l2(logits, other) > EXACT


def test_the_bound_sees_a_part_in_a_billion_of_any_parameter() -> None:
    config = tiny(swiglu=True, output_size=19)
    weights = {name: w.astype(np.float64) for name, w in arrays(config, 2).items()}
    ids = tokens(config, (B, 10))
    expected = oracle.forward(config, weights, ids)
    unseen = []
    for name, value in weights.items():
        off = oracle.forward(config, weights | {name: value * (1 + PLANTED)}, ids)
        if rel_l2(off, expected) <= EXACT:
            unseen.append(name)
    assert unseen == []
