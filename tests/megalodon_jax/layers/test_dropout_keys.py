"""Dropout draws every mask anew: for each layer, site, row, block of attention and micro-batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megalodon_jax.layers import attention, ffn
from megalodon_jax.layers.dropout import dropout
from megalodon_jax.loss import accumulate_gradients
from tests.helpers import model_of, tiny, tokens

# A rate no other test has: a block traced elsewhere would not be listened to.
B, RATE, LAYERS, STRIPE = 2, 0.45, 2, 2
RATES = {"dropout": RATE, "hidden_dropout": RATE, "attention_dropout": RATE}
SITES = 5
"""Dropouts of a layer besides attention: after the EMA, the gate, the output, and two of the FFN.
"""
heard: list[tuple[bytes, np.ndarray, np.ndarray]] = []
rates: list[tuple[int, float]] = []
"""Width and rate of every dropout that was traced."""


@pytest.fixture(autouse=True)
def listening(monkeypatch):
    """Every dropout reports its key, input and output when it runs."""

    def report(key, x, out):
        heard.append((np.asarray(key).tobytes(), np.asarray(x), np.asarray(out)))

    def reporting(x, rate, key):
        rates.append((x.shape[-1], rate))
        out = dropout(x, rate, key)
        jax.debug.callback(report, jax.random.key_data(key), x, out)
        return out

    for module in (attention, ffn):
        monkeypatch.setattr(module, "dropout", reporting)
    monkeypatch.setattr(attention, "STRIPE", STRIPE)
    heard.clear()
    rates.clear()


def run(model, ids, **options):
    logits, _ = model(jnp.asarray(ids), deterministic=False, key=jax.random.key(0), **options)
    jax.effects_barrier()
    return logits


# 4 tokens in stripes of 2, and 2 more; blocks of 4, 4 and 1.
@pytest.mark.few(1)
@pytest.mark.parametrize(("length", "streams", "layers"), [(6, False, LAYERS), (9, True, 1)])
def test_every_mask_is_drawn_with_a_key_of_its_own(length: int, streams: bool, layers) -> None:
    window = 6 if streams else None
    model = model_of(tiny(num_layers=layers, max_cache_len=window, **RATES))
    run(model, tokens(model.config, (B, length)), return_cache=streams)
    keys = [key for key, _, _ in heard]
    assert len(keys) == layers * (SITES + 3)
    assert len(set(keys)) == len(keys)


def test_no_two_rows_share_a_mask() -> None:
    model = model_of(tiny(num_layers=LAYERS, **RATES))
    # Equal rows: with one mask for both, they would stay equal.
    ids = np.repeat(tokens(model.config, (1, 6)), B, axis=0)
    logits = run(model, ids)
    assert not np.array_equal(logits[0], logits[1])
    assert len(heard) == LAYERS * (SITES + 3)
    alike = 0
    for _, x, out in heard:
        assert x.shape[0] % B == 0, "a mask that is drawn for fewer rows is spread over all"
        # Attention has its heads and rows in one axis, rows first.
        rows, kept = x.reshape(B, -1), out.reshape(B, -1) != 0
        live = np.all(rows != 0, axis=0)
        alike += np.array_equal(kept[0, live], kept[1, live])
    # By chance a mask of six numbers, the smallest, repeats once in 70.
    assert alike <= 1


def test_every_site_has_the_rate_that_is_named_for_it() -> None:
    """Outputs of both halves at `dropout`, what is inside of them at `hidden_dropout`."""
    config = tiny(num_layers=1, dropout=0.11, hidden_dropout=0.12, attention_dropout=0.13)
    run(model_of(config), tokens(config, (B, STRIPE)))
    D, inside = config.model_dim, (config.model_dim, config.value_dim, config.ffn_hidden_dim)
    hidden, output = [(width, 0.12) for width in inside], [(D, 0.11), (D, 0.11)]
    assert sorted(rates) == sorted([*hidden, *output, (STRIPE, 0.13)])


def test_every_micro_batch_has_a_key_of_its_own() -> None:
    keys: list[bytes] = []

    def report(key):
        keys.append(np.asarray(key).tobytes())

    class Model:
        def compute_loss(self, ids, labels, mask, ignore_index, deterministic, key, loss_chunk):
            assert not deterministic
            jax.debug.callback(report, jax.random.key_data(key))
            return jnp.zeros(())

    ids = jnp.ones((3, B, 4), jnp.int32)
    accumulate_gradients(Model(), ids, ids, deterministic=False, key=jax.random.key(0))
    jax.effects_barrier()
    assert len(keys) == len(set(keys)) == 3
