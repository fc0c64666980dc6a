"""The cache of `init_cache` as a carry: of a scan, a while loop, and a donated argument."""

from __future__ import annotations

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megalodon_jax import MegalodonForCausalLM, init_cache, reserve_cache
from megalodon_jax.stacked import stack_layers
from tests.helpers import EXACT, TINY, model_of, rel_l2, tiny
from tests.megalodon_jax.layers.streams import (
    IDS,
    LAZILY,
    LOCAL,
    SLIDING,
    UNBOUNDED,
    B,
    L,
    distance,
    step,
    wide,
)

MODES = {"local": LOCAL, "sliding": SLIDING, "unbounded": UNBOUNDED}


def token(model: Any, cache: Any, ids: Any, mask: Any = None) -> Any:
    logits, cache = model(ids[:, None], mask, cache=cache, return_cache=True)
    return cache, logits[:, 0]


@eqx.filter_jit
def scanned(model: Any, cache: Any, ids: Any, mask: Any = None) -> Any:
    def body(cache: Any, now: Any) -> Any:
        ids, mask = now
        return token(model, cache, ids, None if mask is None else mask[:, None])

    return jax.lax.scan(body, cache, (ids.T, None if mask is None else mask.T))


@eqx.filter_jit
def looped(model: Any, cache: Any, ids: Any) -> Any:
    def body(carry: Any) -> Any:
        t, cache, logits = carry
        cache, now = token(model, cache, jax.lax.dynamic_index_in_dim(ids, t, 1, keepdims=False))
        return t + 1, cache, logits.at[t].set(now)

    empty = jnp.zeros((ids.shape[1], ids.shape[0], model.config.vocab_size), jnp.float64)
    return jax.lax.while_loop(lambda c: c[0] < ids.shape[1], body, (0, cache, empty))[1:]


@partial(jax.jit, donate_argnums=1)
def donated(model: Any, cache: Any, ids: Any) -> Any:
    return token(model, cache, ids)


def start(model: Any, **options: Any) -> Any:
    cache = init_cache(model.config, B, **options)
    # Inside of a loop an unbounded cache does not grow.
    return reserve_cache(cache, L) if model.config.cache_unbounded else cache


@pytest.mark.parametrize(
    ("mode", "stacked"),
    [
        ("local", False),
        ("unbounded", False),
        pytest.param("sliding", False, marks=pytest.mark.sweep),
        pytest.param("local", True, marks=pytest.mark.sweep),
    ],
)
@pytest.mark.usefixtures("x64")
def test_a_fresh_cache_is_carried_as_the_python_loop_carries_it(mode: str, stacked: bool) -> None:
    model, ids = wide(MODES[mode]), jnp.asarray(IDS)
    model = stack_layers(model) if stacked else model
    held, expected = start(model), []
    for t in range(L):
        logits, held = step(model, ids[:, t : t + 1], held)
        expected.append(logits[:, 0])
    for loop in (scanned, looped):
        after, logits = loop(model, start(model), ids)
        assert rel_l2(logits, jnp.stack(expected)) <= EXACT
        assert distance(after, held) <= EXACT
    given = start(model)
    for t in range(3):
        before, (given, logits) = given, donated(model, given, ids[:, t])
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
        assert rel_l2(logits, expected[t]) <= EXACT


@pytest.mark.usefixtures("x64")
def test_rows_of_a_carried_cache_take_tokens_each_at_its_time() -> None:
    """With a mask in the loop: every second token of one row, from `per_row=True`."""
    model, n = wide(LOCAL), 8
    ids, mask = np.repeat(IDS[:, : n // 2], 2, axis=1), np.ones((B, n), bool)
    ids[0], mask[1, ::2] = IDS[0, :n], False
    after, logits = scanned(model, start(model, per_row=True), jnp.asarray(ids), jnp.asarray(mask))
    assert after.position.tolist() == [n, n // 2]
    for row, length in enumerate((n, n // 2)):
        _, alone = scanned(model, init_cache(model.config, 1), jnp.asarray(IDS[[row], :length]))
        ours = np.asarray(logits)[mask[row], row]
        assert rel_l2(ours, alone[:, 0]) <= EXACT


def signature(tree: Any) -> Any:
    return jax.tree.structure(tree), [
        (leaf.shape, leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(tree)
    ]


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_cache_len": 7},
        {"cache_unbounded": True},
        {"scan_layers": True},
        {"compute_dtype": "bfloat16"},
        {"compute_dtype": "bfloat16", "param_dtype": "bfloat16", "accum_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_a_call_returns_the_form_it_was_given(changes: dict[str, Any], per_row: bool) -> None:
    model = eqx.filter_eval_shape(MegalodonForCausalLM, tiny(**changes), key=jax.random.key(0))
    for options in ({}, {"dtype": jnp.float32}):
        held = eqx.filter_eval_shape(init_cache, model.config, B, per_row=per_row, **options)
        for length in (0, 1, 3, 9):
            ids, mask = jnp.zeros((B, length), jnp.int32), jnp.ones((B, length), bool)
            after = eqx.filter_eval_shape(step, model, ids, held, mask if per_row else None)[1]
            assert signature(after) == signature(held), length


def test_a_cache_that_is_filled_on_the_way_is_no_carry() -> None:
    """The control: the structure after the first call is another one."""
    model = model_of(TINY)
    with pytest.raises(TypeError, match="carry"):
        scanned(model, init_cache(TINY, B, **LAZILY), jnp.asarray(IDS))
