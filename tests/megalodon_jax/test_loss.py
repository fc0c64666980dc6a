"""The loss: which targets count, and that splitting the work does not change it."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megalodon_jax.loss import (
    accumulate_gradients,
    chunked_next_token_loss,
    loss_sum_and_count,
    next_token_loss,
)
from megalodon_jax.weights import named_leaves
from tests.helpers import EXACT, EXACT_GRADIENT, TINY, model_of, rel_l2, roundoff, tiny, tokens

B, L, V = 2, 6, 5
LABELS = np.random.default_rng(0).integers(0, V, (B, L)).astype(np.int32)


def logits() -> jax.Array:
    return jnp.asarray(3 * np.random.default_rng(1).standard_normal((B, L, V)))


@eqx.filter_jit
def loss(x, labels, mask=None, ignore_index=-100):
    return next_token_loss(x, labels, mask, ignore_index=ignore_index, dtype=x.dtype)


def by_hand(x: jax.Array, labels: np.ndarray, counts: np.ndarray) -> float:
    """The mean over positions t of -log p(label t+1), where `counts` (B, L-1) says so."""
    probability = np.exp(np.asarray(x))
    probability /= probability.sum(-1, keepdims=True)
    chosen = [
        -np.log(probability[b, t, labels[b, t + 1]])
        for b in range(B)
        for t in range(L - 1)
        if counts[b, t]
    ]
    return float(np.mean(chosen))


@pytest.mark.usefixtures("x64")
def test_each_position_predicts_the_next_label() -> None:
    every = np.ones((B, L - 1), bool)
    assert rel_l2(loss(logits(), LABELS), by_hand(logits(), LABELS, every)) <= EXACT
    unshifted = by_hand(logits(), np.roll(LABELS, 1, axis=1), every)
    assert rel_l2(loss(logits(), LABELS), unshifted) > EXACT


@pytest.mark.parametrize("ignored", [-100, 2])
@pytest.mark.usefixtures("x64")
def test_ignored_labels_do_not_count(ignored: int) -> None:
    labels = LABELS.copy()
    labels[0, 2] = labels[1, 4] = ignored
    counts = labels[:, 1:] != ignored
    expected = by_hand(logits(), LABELS, counts)
    assert rel_l2(loss(logits(), labels, None, ignored), expected) <= EXACT


@pytest.mark.usefixtures("x64")
def test_masked_targets_do_not_count_whatever_their_label() -> None:
    mask = np.ones((B, L), bool)
    mask[0, 3:] = mask[1, 1] = False
    labels = np.where(mask, LABELS, (LABELS + 1) % V).astype(np.int32)
    expected = by_hand(logits(), LABELS, mask[:, 1:])
    assert rel_l2(loss(logits(), labels, mask), expected) <= EXACT
    assert rel_l2(loss(logits(), labels), expected) > EXACT


def test_without_a_valid_target_loss_and_gradient_are_zero() -> None:
    x = logits().astype(jnp.float32)
    nothing = jnp.full((B, L), -100, jnp.int32)
    value, gradient = jax.value_and_grad(loss)(x, nothing)
    assert value == 0
    assert not np.any(gradient)
    assert np.any(jax.grad(loss)(x, jnp.asarray(LABELS)))


def test_the_first_label_is_never_a_target() -> None:
    x = logits().astype(jnp.float32)
    other = LABELS.copy()
    other[:, 0] = (LABELS[:, 0] + 1) % V
    assert loss(x, other) == loss(x, LABELS)


OUT_OF_RANGE = rf"labels must be in \[0, {V}\) or ignore_index="


@pytest.mark.parametrize("bad", [-1, V, -100])
@pytest.mark.traced_checks
def test_a_label_out_of_range_raises_wherever_it_stands(bad: int) -> None:
    """At the first position, which the shift drops, and under the mask as well."""
    x, ignored = logits().astype(jnp.float32), -2
    mask = jnp.ones((B, L), bool).at[0, 4:].set(False).at[1, 0].set(False)
    for place in np.ndindex(B, L):
        labels = jnp.asarray(LABELS).at[place].set(bad)
        with pytest.raises(eqx.EquinoxRuntimeError, match=OUT_OF_RANGE):
            loss(x, labels, mask, ignored).block_until_ready()
        # The control: what the message names as the exception is one.
        assert np.isfinite(loss(x, labels.at[place].set(ignored), mask, ignored))
    with pytest.raises(RuntimeError, match=OUT_OF_RANGE):
        next_token_loss(x, labels, ignore_index=ignored)


def test_the_loss_is_taken_in_the_dtype_asked_for() -> None:
    x = logits().astype(jnp.bfloat16)
    wide = next_token_loss(x, jnp.asarray(LABELS))
    assert wide.dtype == jnp.float32
    assert wide == next_token_loss(x.astype(jnp.float32), jnp.asarray(LABELS))


def test_sums_and_counts_of_parts_add_up_to_the_whole() -> None:
    x, labels = logits().astype(jnp.float32), jnp.asarray(LABELS).at[0, 2:].set(-100)
    parts = [loss_sum_and_count(x[b : b + 1], labels[b : b + 1]) for b in range(B)]
    counts = [int(count) for _, count in parts]
    assert counts == [1, L - 1]
    total = parts[0][0] + parts[1][0]
    # Equal to the last bit on some machines; each sums in an order of its own. All terms are
    # positive, and each is a sum over the vocabulary.
    bound = 2 * roundoff(sum(counts) + V + 8)
    assert rel_l2(total, loss_sum_and_count(x, labels)[0]) <= bound
    assert rel_l2(total / sum(counts), next_token_loss(x, labels)) <= bound


D = 4
HIDDEN = np.random.default_rng(2).standard_normal((B, L, D))
HEAD = np.random.default_rng(3).standard_normal((V, D))


def project(x: jax.Array, head: jax.Array) -> jax.Array:
    return x @ head.astype(x.dtype).T


@eqx.filter_jit
@eqx.filter_value_and_grad
def by_chunk(weights, labels, mask=None, chunk=2):
    hidden, head = weights
    rules = {"chunk": chunk, "dtype": hidden.dtype}
    return chunked_next_token_loss(hidden, head, project, labels, mask, **rules)


@eqx.filter_jit
@eqx.filter_value_and_grad
def at_once(weights, labels, mask=None):
    hidden, head = weights
    return next_token_loss(project(hidden, head), labels, mask, dtype=hidden.dtype)


# A tail of one position has no target: it is the tail of two that a sum may not drop.
@pytest.mark.parametrize("chunk", [1, 2, L - 2, L - 1, L, 50])
@pytest.mark.usefixtures("x64")
def test_chunks_give_the_loss_and_gradients_of_the_whole(chunk: int) -> None:
    weights, labels = (
        (jnp.asarray(HIDDEN), jnp.asarray(HEAD)),
        jnp.asarray(LABELS).at[0, 3].set(-100),
    )
    mask = jnp.ones((B, L), bool).at[0, 3].set(False).at[1, 5].set(False)
    value, gradients = by_chunk(weights, labels, mask, chunk)
    expected, expected_gradients = at_once(weights, labels, mask)
    assert value.dtype == jnp.float64
    assert rel_l2(value, expected) <= EXACT
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        assert rel_l2(actual, wanted) <= EXACT_GRADIENT


@pytest.mark.traced_checks
def test_chunks_check_labels_and_survive_having_nothing_to_count() -> None:
    weights = jnp.asarray(HIDDEN, jnp.float32), jnp.asarray(HEAD, jnp.float32)
    with pytest.raises(eqx.EquinoxRuntimeError, match=r"labels must be in \[0, 5\)"):
        jax.block_until_ready(by_chunk(weights, jnp.asarray(LABELS).at[0, 1].set(V)))
    value, gradients = by_chunk(weights, jnp.full((B, L), -100, jnp.int32))
    assert value == 0
    assert not any(np.any(gradient) for gradient in gradients)
    one = jnp.asarray(HIDDEN[:, :1], jnp.float32), weights[1]
    assert by_chunk(one, jnp.asarray(LABELS[:, :1]))[0] == 0


def test_a_bfloat16_head_does_not_collect_its_gradient_in_bfloat16() -> None:
    hidden, head = jnp.asarray(HIDDEN, jnp.float32), jnp.asarray(HEAD, jnp.bfloat16)
    _, (_, narrow) = by_chunk((hidden, head), jnp.asarray(LABELS), chunk=1)
    _, (_, wide) = by_chunk((hidden, head.astype(jnp.float32)), jnp.asarray(LABELS), chunk=1)
    assert narrow.dtype == jnp.bfloat16
    narrow, wide = (np.asarray(x, np.float64) for x in (narrow, wide))
    # Rounded once: half a unit in the last place, and what float32 may be off after L chunks.
    once = float(jnp.finfo(jnp.bfloat16).eps) / 2 * np.abs(wide)
    assert np.all(np.abs(narrow - wide) <= once + roundoff(B * L * V) * np.abs(wide).max())


@pytest.mark.parametrize("chunk", [0, -4])
def test_a_chunk_without_positions_is_refused(chunk: int) -> None:
    ids = jnp.asarray(tokens(TINY, (1, 3)))
    with pytest.raises(ValueError, match=rf"loss_chunk={chunk} must be at least 1, an integer"):
        eqx.filter_eval_shape(lambda m: m.compute_loss(ids, ids, loss_chunk=chunk), model_of(TINY))


MANY = 1200


def test_many_targets_are_counted_and_added_up_in_full() -> None:
    """bfloat16 counts to 256 and stops there: neither the sum nor the number may be kept in it.

    All logits are equal, so that every target costs log V, and rounding is that of one number.
    """
    dtype = jnp.bfloat16
    labels = jnp.zeros((1, MANY + 1), jnp.int32).at[0, 5].set(3)
    x = jnp.zeros((1, MANY + 1, V), dtype)
    head, hidden = jnp.zeros((V, D), dtype), jnp.zeros((1, MANY + 1, D), dtype)
    rules = {"ignore_index": 3, "dtype": dtype}
    total, count = loss_sum_and_count(x, labels, **rules)
    assert (total.dtype, int(count)) == (jnp.float32, MANY - 1)
    # Every target costs the same number of few bits, and so their sum is exact in float32.
    one, _ = loss_sum_and_count(x[:, :2], labels[:, :2], **rules)
    assert float(total) == int(count) * float(one)
    expected, slack = np.log(V), 2 * float(jnp.finfo(dtype).eps)
    assert rel_l2(float(total) / int(count), expected) <= slack
    halves = jnp.zeros((2, 1, MANY // 2), jnp.int32), labels[:, 1:].reshape(2, 1, -1)
    losses = {
        "whole": next_token_loss(x, labels, **rules),
        "by chunks": chunked_next_token_loss(hidden, head, project, labels, chunk=4, **rules),
        "by micro-batches": accumulate_gradients(Uniform(x[0, 0]), *halves, ignore_index=3)[0],
    }
    for name, value in losses.items():
        assert rel_l2(float(value), expected) <= slack, name


class Uniform(eqx.Module):
    """A language model that knows only how often each token comes."""

    logits: jax.Array

    def compute_loss(self, ids, labels, mask, ignore_index, deterministic, key, loss_chunk):
        x = jnp.broadcast_to(self.logits, (*ids.shape, self.logits.shape[0]))
        return next_token_loss(x, labels, mask, ignore_index=ignore_index, dtype=x.dtype)


@pytest.mark.parametrize("ignored", [2, -7])
@pytest.mark.usefixtures("x64")
def test_micro_batches_ignore_what_they_are_told_to(ignored: int) -> None:
    model = Uniform(logits()[0, 0])
    labels = jnp.asarray(LABELS).at[0, 2:].set(ignored)
    parts = (x[:, None] for x in (jnp.zeros((B, L), jnp.int32), labels))
    value, gradients = accumulate_gradients(model, *parts, ignore_index=ignored)
    ids = jnp.zeros((B, L), jnp.int32)

    def whole(m):
        return m.compute_loss(ids, labels, None, ignored, True, None, None)

    expected, wanted = eqx.filter_value_and_grad(whole)(model)
    assert rel_l2(value, expected) <= EXACT
    assert rel_l2(gradients.logits, wanted.logits) <= EXACT_GRADIENT


IDS = tokens(TINY, (4, 11))
LARGE = f"{IDS.shape[1]},{TINY.vocab_size}]"
"""How a jaxpr prints the end of the shape of all logits."""


def model_gradients(model, chunk):
    ids = jnp.asarray(IDS)
    return eqx.filter_value_and_grad(lambda m: m.compute_loss(ids, ids, loss_chunk=chunk))(model)


def test_with_chunks_the_logits_never_exist_at_once() -> None:
    def program(chunk):
        return str(eqx.filter_make_jaxpr(lambda m: model_gradients(m, chunk))(model_of(TINY))[0])

    assert LARGE in program(None)
    chunked = program(4)
    assert LARGE not in chunked
    assert f"4,{TINY.vocab_size}]" in chunked


@pytest.mark.sweep
@pytest.mark.usefixtures("x64")
def test_micro_batches_by_chunks_give_the_gradients_of_the_one_big_batch() -> None:
    config = tiny(num_layers=1, output_size=19).with_dtype("float64")
    model, ids = model_of(config), jnp.asarray(IDS)
    mask = jnp.ones(ids.shape, bool).at[0, 4:].set(False).at[2:, 1:].set(False)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def whole(model):
        return model.compute_loss(ids, ids, mask)

    @eqx.filter_jit
    def by_parts(model):
        micros = (x.reshape(2, 2, -1) for x in (ids, ids, mask))
        return accumulate_gradients(model, *micros, loss_chunk=4)

    expected, gradients = whole(model)
    value, parts = by_parts(model)
    assert value.dtype == expected.dtype
    assert rel_l2(value, expected) <= EXACT
    actual, wanted = named_leaves(parts), named_leaves(gradients)
    assert actual.keys() == wanted.keys()
    for name in wanted:
        assert rel_l2(actual[name], wanted[name]) <= EXACT_GRADIENT, name


class Scaled(eqx.Module):
    """A model of one number whose gradient is the first id of a micro-batch."""

    weight: jax.Array

    def compute_loss(self, ids, labels, mask, ignore_index, deterministic, key, loss_chunk):
        return self.weight.astype(jnp.float32) * ids[0, 0].astype(jnp.float32)


def test_gradients_of_many_micro_batches_are_added_up_wide() -> None:
    """In bfloat16 the sum would stay where the first, large one left it."""
    ids = jnp.ones((257, 1, 2), jnp.int32).at[0].set(512)
    _, gradients = accumulate_gradients(Scaled(jnp.ones((), jnp.bfloat16)), ids, ids)
    expected = (512 + 256) / 257
    assert gradients.weight.dtype == jnp.bfloat16
    assert rel_l2(float(gradients.weight), expected) <= float(jnp.finfo(jnp.bfloat16).eps)
