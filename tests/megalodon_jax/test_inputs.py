"""What every entry accepts: ids and labels of any integer dtype, and masks by one rule."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from megalodon_jax import (
    MegalodonForCausalLM,
    ModelCache,
    NormState,
    decode_step,
    generate,
    index_cache,
    init_cache,
)
from megalodon_jax.inputs import as_int32, as_mask
from megalodon_jax.layers import ChunkedAttention, ComplexEMA, TimestepNorm
from megalodon_jax.loss import (
    accumulate_gradients,
    chunked_next_token_loss,
    loss_sum_and_count,
    next_token_loss,
)
from tests.helpers import model_of, rel_l2, rounding_bound, roundoff, tiny

B, L, V = 2, 6, 256
CONFIG = tiny(num_layers=1, vocab_size=V, output_size=V - 1)
IDS = np.random.default_rng(0).integers(1, 100, (B, L))
MASK = np.arange(L) < np.array([[4], [6]])
LOGITS = jnp.asarray(np.random.default_rng(1).standard_normal((B, L, V)), jnp.float32)
HEAD = jnp.asarray(np.random.default_rng(2).standard_normal((V, V)) / V, jnp.float32)
SUMS = roundoff(2 * V + B * L + 16)
"""Of the longest sums: over a head's width, the vocabulary and the tokens, and some functions."""


MODEL: MegalodonForCausalLM | None = None
"""In place of the model, where a test moves its weights."""


def model() -> MegalodonForCausalLM:
    return MODEL or model_of(CONFIG, 1)


def programs_apart(function: Callable[[Any], Any], given: Any) -> float:
    """Return how far two programs of `function(given)` may be apart, in relative L2.

    Another dtype of `given` is another program, whose fusions and sums may round otherwise: by the
    noise floor of what the weights become, and by the sums.
    """

    def run(weights: dict[str, Any]) -> Any:
        with mock.patch.multiple(sys.modules[__name__], **weights):
            return function(given)

    held = {"MODEL": model(), "LOGITS": LOGITS, "HEAD": HEAD, "QKV": QKV, "X": X}
    return SUMS + rounding_bound(run, held)


@pytest.fixture(autouse=True)
def unchecked_annotations(monkeypatch):
    """Annotations are checked in tests only; users meet the messages of the entries."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def project(x, head):
    return x @ head.T


def by_chunks(labels, mask=None):
    return chunked_next_token_loss(LOGITS, HEAD, project, labels, mask, chunk=4)


class Bigram(eqx.Module):
    """The least that has a loss."""

    table: jax.Array

    def compute_loss(self, ids, labels, mask, ignore_index, deterministic, key, loss_chunk):
        return next_token_loss(self.table[ids], labels, mask, ignore_index=ignore_index)


def by_micro_batches(labels, mask=None):
    ids, labels = jnp.asarray(IDS[:, None], jnp.int32), labels[:, None]
    mask = mask[:, None] if hasattr(mask, "shape") else mask
    return accumulate_gradients(Bigram(HEAD), ids, labels, mask)[0]


def gathered(rows):
    cache = ModelCache([None], NormState.fresh(128, 1))
    cache = eqx.tree_at(lambda c: c.final_norm.count, cache, jnp.arange(128, dtype=jnp.int32))
    return index_cache(cache, rows[0]).final_norm.count


def decoded(token):
    cache = init_cache(CONFIG, B, allocate_kv=True, allocate_norm=True, allocate_ema=True)
    return decode_step(model(), cache, token[:, 0])[0]


INTEGERS = {
    "model": lambda x: model()(x)[0],
    "ids of a loss": lambda x: model().compute_loss(x, jnp.asarray(IDS, jnp.int32)),
    "labels of a loss": lambda x: model().compute_loss(jnp.asarray(IDS, jnp.int32), x),
    "next_token_loss": lambda x: next_token_loss(LOGITS, x),
    "loss_sum_and_count": lambda x: loss_sum_and_count(LOGITS, x)[0],
    "chunked_next_token_loss": by_chunks,
    "accumulate_gradients": by_micro_batches,
    "generate": lambda x: generate(model(), x, 1, temperature=0.0)[0],
    "decode_step": decoded,
    "index_cache": gathered,
}
DTYPES = ("int8", "uint8", "int16", "uint16", "uint32", "int64", "uint64")


@pytest.mark.few(3)
@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.traced_checks
def test_every_entry_takes_integers_of_any_dtype(name: str) -> None:
    function = INTEGERS[name]
    expected = function(jnp.asarray(IDS, jnp.int32))
    bound = programs_apart(function, jnp.asarray(IDS, jnp.int32))
    for ids in (jnp.asarray(IDS, jnp.int8), jnp.asarray(IDS, jnp.uint8), IDS.astype(np.int64)):
        assert rel_l2(function(ids), expected) <= bound, ids.dtype
    assert rel_l2(function(jnp.asarray(IDS // 2, jnp.int32)), expected) > bound
    for bad in (IDS.astype(np.float32), IDS > 50):
        with pytest.raises(ValueError, match="expected integers"):
            function(bad)
    wrapping = IDS.astype(np.int64)
    wrapping[0, 0] += 2**32
    with pytest.raises(RuntimeError, match=r"must be in \[0, "):
        jax.block_until_ready(function(wrapping))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_integer_keeps_its_value_or_is_clipped_and_never_wraps(dtype: str) -> None:
    limits, ends = np.iinfo(dtype), np.iinfo(np.int32)
    values = [limits.min, limits.max, 0, 5, *(v for v in (2**32 - 100, 2**31) if v <= limits.max)]
    numbers = np.array(values, dtype)
    expected = np.clip(np.array(values, object), ends.min, ends.max).tolist()
    widened = as_int32("x", numbers, "K", "")
    assert (widened.tolist(), widened.dtype) == (expected, jnp.int32)
    with jax.enable_x64(True):
        assert as_int32("x", jnp.asarray(numbers), "K", "").tolist() == expected


@pytest.mark.parametrize("bad", [[1, 2], 3, np.int64(3), jnp.zeros((1, 2), jnp.int32), None])
def test_what_has_not_the_axes_of_ids_is_refused(bad) -> None:
    with pytest.raises(ValueError, match=r"ids are .*, expected integers \(K,\); do this\."):
        as_int32("ids", bad, "K", "do this")


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_unsigned_label_is_not_the_ignored_one(dtype: str) -> None:
    """-100 is 156 in eight bits without a sign."""
    labels = IDS.copy() % 100
    labels[:, 2] = 100 if dtype == "int8" else 156
    expected = next_token_loss(LOGITS, jnp.asarray(labels, jnp.int32))
    wrapped = next_token_loss(LOGITS, jnp.asarray(labels, jnp.int32), ignore_index=labels[0, 2])
    assert next_token_loss(LOGITS, labels.astype(dtype)) == expected != wrapped
    assert by_chunks(labels.astype(dtype), None) == by_chunks(labels.astype(np.int32), None)


def test_the_ignored_label_is_an_integer_of_any_kind() -> None:
    labels = np.where(IDS > 50, IDS, 7)
    expected = next_token_loss(LOGITS, labels, ignore_index=7)
    assert expected != next_token_loss(LOGITS, labels)
    for number in (np.int64(7), np.uint8(7), jnp.asarray(7, jnp.int16)):
        assert next_token_loss(LOGITS, labels, ignore_index=number) == expected
    for bad in (7.0, None, 2**40, True):
        with pytest.raises(ValueError, match=f"ignore_index={bad} must be an integer of 32 bits"):
            next_token_loss(LOGITS, labels, ignore_index=bad)


# Masks.

X = jnp.asarray(np.random.default_rng(3).standard_normal((B, L, CONFIG.model_dim)), jnp.float32)
QKV = jnp.asarray(np.random.default_rng(4).standard_normal((3, B, L, 2, 4)), jnp.float32)
IDS32 = jnp.asarray(IDS, jnp.int32)
MASKS = {
    "model": lambda m: model()(IDS32, m)[0],
    "TimestepNorm": lambda m: TimestepNorm(8, 2)(X, None, m)[1].mean,
    "ComplexEMA": lambda m: ComplexEMA(8, 2, key=jax.random.key(0))(
        jnp.swapaxes(X, 1, 2), None, True, m
    )[1],
    "ChunkedAttention": lambda m: ChunkedAttention(tiny(value_dim=8))(*QKV, m)[0],
    "compute_loss": lambda m: model().compute_loss(IDS32, IDS32, m),
    "compute_loss by chunks": lambda m: model().compute_loss(IDS32, IDS32, m, loss_chunk=4),
    "next_token_loss": lambda m: next_token_loss(LOGITS, IDS32, m),
    "loss_sum_and_count": lambda m: loss_sum_and_count(LOGITS, IDS32, m)[1],
    "chunked_next_token_loss": lambda m: by_chunks(IDS32, m),
    "accumulate_gradients": lambda m: by_micro_batches(IDS32, m),
    "generate": lambda m: generate(model(), IDS32, 1, temperature=0.0, attention_mask=m)[0],
}


@pytest.mark.parametrize("dtype", ["bool", "int32", *DTYPES])
def test_a_mask_is_the_same_of_any_dtype(dtype: str) -> None:
    assert np.array_equal(as_mask("mask", MASK.astype(dtype), (B, L), "ids"), MASK)
    assert np.array_equal(as_mask("mask", jnp.asarray(MASK.astype(dtype)), (B, L), "ids"), MASK)


@pytest.mark.parametrize(
    "wrong", [MASK * 2, np.cumsum(~MASK, axis=1), -MASK.astype(np.int8), MASK * 2**32]
)
@pytest.mark.traced_checks
def test_numbers_other_than_zero_and_one_are_no_mask(wrong) -> None:
    """Weights, segment ids, an additive mask, and what 32 bits would cut to zeros."""
    with pytest.raises(RuntimeError, match="integers other than 0"):
        jax.block_until_ready(as_mask("mask", wrong, (B, L), "ids"))


EAGER = ("ComplexEMA", "ChunkedAttention")
"""Layers alone compile operation by operation; the model has them."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.sweep) if n in EAGER else n for n in MASKS]
)
@pytest.mark.traced_checks
def test_a_mask_is_boolean_or_of_zeros_and_ones_everywhere(name: str) -> None:
    function = MASKS[name]
    expected = function(jnp.asarray(MASK))
    bound = programs_apart(function, jnp.asarray(MASK))
    assert rel_l2(function(MASK.astype(np.uint8)), expected) <= bound
    full = function(jnp.ones((B, L), jnp.int8))
    assert rel_l2(full, expected) > bound, "the control: the mask matters"
    with pytest.raises(RuntimeError, match="integers other than 0"):
        jax.block_until_ready(function(MASK * 2))
    with pytest.raises(ValueError, match="is float32, expected bool, or integers that are 0 or 1"):
        function(MASK.astype(np.float32))
    with pytest.raises(ValueError, match=r"mask has shape \(.*5\), expected that of"):
        function(MASK[:, :5])
    with pytest.raises(ValueError, match="expected an array"):
        function(True)


@pytest.mark.parametrize("name", ["next_token_loss", "generate"])
@pytest.mark.traced_checks
def test_a_mask_is_looked_at_under_jit(name: str) -> None:
    call = eqx.filter_jit(MASKS[name])
    jax.block_until_ready(call(MASK.astype(np.int32)))
    with pytest.raises(RuntimeError, match="integers other than 0"):
        jax.block_until_ready(call(MASK.astype(np.int32) * 2))


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.traced_checks
def test_attention_with_a_cache_refuses_padding_before_tokens(held: bool) -> None:
    layer = ChunkedAttention(tiny(value_dim=8))
    ring = layer.empty_ring(B, L) if held else None
    expected, _ = layer(*QKV, None, ring, True)
    out, _ = layer(*QKV, jnp.ones((B, L), bool), ring, True)
    bound = programs_apart(lambda mask: layer(*QKV, mask, ring, True)[0], None)
    assert rel_l2(out, expected) <= bound
    with pytest.raises(RuntimeError, match="a token behind padding"):
        layer(*QKV, jnp.asarray(MASK[:, ::-1]), ring, True)
