"""The loss: which targets count."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megalodon_jax.loss import next_token_loss
from tests.helpers import EXACT, rel_l2

B, L, V = 2, 6, 5
LABELS = np.random.default_rng(0).integers(0, V, (B, L)).astype(np.int32)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


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
    labels = np.where(mask, LABELS, 999).astype(np.int32)
    expected = by_hand(logits(), LABELS, mask[:, 1:])
    assert rel_l2(loss(logits(), labels, mask), expected) <= EXACT
    assert rel_l2(loss(logits(), LABELS), expected) > EXACT


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
    other[:, 0] = -7
    assert loss(x, other) == loss(x, LABELS)


@pytest.mark.parametrize("bad", [-1, V])
def test_a_label_out_of_range_raises(bad: int) -> None:
    labels = jnp.asarray(LABELS).at[1, 3].set(bad)
    message = rf"labels must be in \[0, {V}\) or ignore_index=-100"
    x = logits().astype(jnp.float32)
    with pytest.raises(RuntimeError, match=message):
        next_token_loss(x, labels)
    with pytest.raises(eqx.EquinoxRuntimeError, match=message):
        loss(x, labels).block_until_ready()


def test_the_loss_is_taken_in_the_dtype_asked_for() -> None:
    x = logits().astype(jnp.bfloat16)
    wide = next_token_loss(x, jnp.asarray(LABELS))
    assert wide.dtype == jnp.float32
    assert wide == next_token_loss(x.astype(jnp.float32), jnp.asarray(LABELS))
