"""Every argument of `compute_loss` and `generate`, drawn off its default, against plain loops.

What changes a program (which arguments are there, and the static ones) comes from a short list, so
that few are compiled; everything else is drawn.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megalodon_jax import MegalodonForCausalLM, generate
from megalodon_jax.loss import accumulate_gradients
from parity.megalodon import oracle
from tests.helpers import EXACT, model_of, rel_l2, tiny, wide_arrays

V, B = 17, 2
RATES = {"dropout": 0.5, "hidden_dropout": 0.5, "attention_dropout": 0.5}
SEED = 2
drawn = settings(max_examples=6, derandomize=True, deadline=None)


@cache
def model(**rates: float) -> MegalodonForCausalLM:
    config = tiny(num_layers=1, output_size=V - 1, **rates)
    return model_of(config.with_dtype("float64"), SEED)


def plain_logits(ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    return oracle.forward(model().config, wide_arrays(model().config, SEED), ids, mask)


# The loss.

L = 7
FORMS: dict[str, dict[str, Any]] = {
    # Rates that only `deterministic` keeps from acting, and a key that must not matter.
    "whole": {"rates": RATES, "deterministic": True, "dtype": np.uint8},
    "by chunks": {"rates": {}, "deterministic": False, "dtype": np.int32, "loss_chunk": 3},
    "by micro-batches": {"rates": {}, "deterministic": False, "dtype": np.int16, "loss_chunk": 4},
}


@eqx.filter_jit
def loss_of(form: str, model, ids, labels, mask, ignore_index, key):
    rules = {k: v for k, v in FORMS[form].items() if k in ("deterministic", "loss_chunk")}
    rules |= {"ignore_index": ignore_index, "key": key}
    if form != "by micro-batches":
        return model.compute_loss(ids, labels, mask, **rules)
    return accumulate_gradients(model, *(x[:, None] for x in (ids, labels, mask)), **rules)[0]


def plain_loss(logits, labels, mask, ignored: int) -> float:
    costs = []
    for b, t in np.ndindex(B, L - 1):
        label = labels[b, t + 1]
        if label != ignored and mask[b, t + 1]:
            costs.append(np.log(np.sum(np.exp(logits[b, t]))) - logits[b, t, label])
    return float(np.mean(costs)) if costs else 0.0


def batch(seed: int, ignored: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    ids, labels = rng.integers(1, V - 1, (2, B, L))
    labels = np.where(rng.random((B, L)) < 0.3, ignored, labels)
    return ids, labels, rng.random((B, L)) < 0.7


@given(st.sampled_from(sorted(FORMS)), st.integers(0, 2**31), st.sampled_from((-100, -1, 3, 99)))
@settings(drawn, max_examples=9)
def test_the_loss_is_the_plain_loss(form: str, seed: int, ignored: int) -> None:
    dtype = FORMS[form]["dtype"]
    if ignored < 0 and dtype == np.uint8:
        ignored = 99
    ids, labels, mask = batch(seed, ignored)
    arguments = [jnp.asarray(x.astype(dtype)) for x in (ids, labels, mask)]
    with jax.enable_x64(True):
        number, key = jnp.asarray(ignored, jnp.int32), jax.random.key(seed)
        loss = loss_of(form, model(**FORMS[form]["rates"]), *arguments, number, key)
    assert rel_l2(loss, plain_loss(plain_logits(ids, mask), labels, mask, ignored)) <= EXACT


def test_the_plain_loss_depends_on_every_argument() -> None:
    """The control: what is expected would be another number if an argument were dropped."""
    ids, labels, mask = batch(0, 3)
    logits = plain_logits(ids, mask)
    expected = plain_loss(logits, labels, mask, 3)
    others = {
        "input_ids": (plain_logits(labels, mask), labels, mask, 3),
        "labels": (logits, ids, mask, 3),
        "mask of the loss": (logits, labels, mask | True, 3),
        "mask of the model": (plain_logits(ids), labels, mask, 3),
        "ignore_index": (logits, labels, mask, -100),
    }
    same = [name for name, other in others.items() if rel_l2(plain_loss(*other), expected) <= EXACT]
    assert same == []


# Generation.

CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"length": 5, "new": 6, "top_k": None, "sampled": False},
    "sampled": {"length": 5, "new": 6, "top_k": 4, "sampled": True},
    "from nothing": {"length": 0, "new": 3, "top_k": 0, "sampled": True},
    "padded": {"length": 5, "new": 1, "top_k": 9, "sampled": True},
}


def plain_choice(logits, key, temperature, top_k, top_p) -> np.ndarray:
    """A token of each row: the k most likely, of these the fewest that reach p, and a draw."""
    scores = logits / temperature
    for row in scores:
        order = np.argsort(-row)
        row[order[top_k or len(row) :]] = -np.inf
        p = np.exp(row - row.max())
        p = p[order] / p.sum()
        reached = np.flatnonzero(np.cumsum(p) >= top_p)
        row[order[reached[0] + 1 if len(reached) else len(row) :]] = -np.inf
    return np.asarray(jax.random.categorical(key, jnp.asarray(scores), axis=-1))


def plain_text(ids, lengths, new: int, key, eos: int | None, rates) -> tuple[np.ndarray, Any]:
    done = np.zeros(len(ids), bool)
    for step in range(new):
        ends = lengths + step - 1
        logits = plain_logits(ids)[np.arange(len(ids)), ends]
        if rates is None:
            token = np.argmax(logits, axis=-1)
        else:
            key, draw = jax.random.split(key)
            token = plain_choice(logits, draw, *rates)
        token = np.where(done, -1 if eos is None else eos, token)
        done |= token == (-2 if eos is None else eos)
        ids = np.concatenate([ids, token[:, None]], axis=1)
    return ids, key


@given(
    st.sampled_from(sorted(CALLS)),
    st.integers(0, 2**31),
    st.floats(0.5, 3.0),
    st.floats(0.4, 1.0),
)
@settings(drawn, max_examples=10)
def test_generated_text_is_the_plain_loop(name: str, seed: int, temperature, top_p) -> None:
    call, rng = CALLS[name], np.random.default_rng(seed)
    length, new, eos = call["length"], call["new"], 3
    prompt = rng.integers(1, V - 1, (B, length))
    bos = int(rng.integers(1, V - 1))
    lengths = np.array([3, 5]) if name == "padded" else np.full(B, max(length, 1))
    options: dict[str, Any] = {"eos_token_id": eos, "temperature": 0.0}
    if name == "padded":
        options["attention_mask"] = (np.arange(length) < lengths[:, None]).astype(np.int8)
    if call["sampled"]:
        options |= {"temperature": temperature, "top_k": call["top_k"], "top_p": top_p}
    returns = name != "padded"
    with jax.enable_x64(True):
        start = jax.random.key(seed)
        ids, held, after = generate(
            model(),
            prompt.astype(np.uint8),
            new,
            start,
            bos_token_id=bos,
            return_cache=returns,
            **options,
        )
        first = prompt if length else np.full((B, 1), bos)
        rates = (temperature, call["top_k"], top_p) if call["sampled"] else None
        expected, key = plain_text(first, lengths, new, start, eos, rates)
        assert np.asarray(ids).tolist() == expected.tolist()
        assert jnp.array_equal(jax.random.key_data(after), jax.random.key_data(key))
        assert (held is not None) is returns
        if held is None:
            return
        # The cache ends before the last token: that is the next prompt.
        assert int(held.position) == expected.shape[1] - 1
        more, nothing, _ = generate(model(), ids[:, -1:], 2, after, cache=held, **options)
        assert nothing is None
        finished = expected[:, -1] == eos
        onward, _ = plain_text(expected, np.full(B, expected.shape[1]), 2, key, None, rates)
    for row in np.flatnonzero(~finished & (onward[:, -2] != eos)):
        assert more[row, 1:].tolist() == onward[row, -2:].tolist()
    assert np.all(np.asarray(more)[finished] == eos)
