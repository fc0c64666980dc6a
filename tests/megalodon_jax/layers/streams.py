"""Streams for the tests of caches: how a text is cut, and what each token may see."""

from __future__ import annotations

from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from megalodon_jax import (
    LayerCache,
    MegalodonConfig,
    MegalodonForCausalLM,
    ModelCache,
    init_cache,
)
from parity.megalodon import oracle
from tests.helpers import TINY, model_of, rel_l2, tiny, tokens, wide_arrays

B, L, C = 2, 14, TINY.chunk_size
IDS = tokens(TINY, (B, L))
LOCAL = TINY
SLIDING = tiny(num_layers=1, max_cache_len=6)
UNBOUNDED = tiny(num_layers=1, cache_unbounded=True)
LAZILY = {"allocate_kv": False, "allocate_norm": False, "allocate_ema": False}
"""A cache without arrays, which the first call fills."""

# One compilation each; 6 is longer than a chunk, and no piece divides one.
PIECES = (1, 3, 6)
splits = st.lists(st.sampled_from(PIECES), min_size=1, max_size=8)
few = settings(max_examples=10, derandomize=True, deadline=None)


@cache
def wide(config: MegalodonConfig) -> MegalodonForCausalLM:
    return model_of(config.with_dtype("float64"))


@eqx.filter_jit
def step(model, ids, cache=None, mask=None):
    return model(ids, mask, cache=cache, return_cache=True)


def fresh(model: MegalodonForCausalLM, rows: int = B) -> ModelCache:
    return init_cache(model.config, rows)


def completed(split: list[int]) -> list[int]:
    """The split cut to L tokens, its rest fed token by token."""
    pieces: list[int] = []
    for n in split:
        if sum(pieces) + n <= L:
            pieces.append(n)
    return pieces + [1] * (L - sum(pieces))


def streamed(model, pieces, ids=IDS, cache=None) -> tuple[np.ndarray, ModelCache]:
    cache, start, parts = fresh(model) if cache is None else cache, 0, []
    for n in pieces:
        logits, cache = step(model, jnp.asarray(ids[:, start : start + n]), cache)
        parts.append(np.asarray(logits))
        start += n
    return np.concatenate(parts, axis=1), cache


def distance(left: ModelCache, right: ModelCache) -> float:
    """Largest relative L2 over the leaves; infinite where a dtype or an integer differs."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    worst = 0.0
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        exact = a.dtype == b.dtype and (a.dtype != jnp.int32 or np.array_equal(a, b))
        worst = max(worst, rel_l2(a, b) if exact else np.inf)
    return worst


# The visibility rule, written from docs/model.md "Chunked attention", and a dense evaluation of it.


def chunk_local(length: int = L) -> np.ndarray:
    position = np.arange(length)
    same = position[:, None] // C == position[None, :] // C
    return same & np.tri(length, dtype=bool)


def window(pieces: list[int], size: int) -> np.ndarray:
    """Blocks of at most C tokens from the start of each call; keys cut to the last `size`."""
    visible, start = np.zeros((sum(pieces), sum(pieces)), bool), 0
    for n in pieces:
        for begin in range(start, start + n, C):
            end = min(begin + C, start + n)
            for query in range(begin, end):
                visible[query, max(0, end - size) : query + 1] = True
        start += n
    return visible


def dense(config: MegalodonConfig, visible: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Logits of the oracle with one visibility matrix (L, L) in the place of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "visibility", lambda *_: visible)
        return oracle.forward(config, wide_arrays(config), ids)


def resized(held: ModelCache, capacity: int) -> ModelCache:
    layers = tuple(
        LayerCache(c.attn.resized(capacity), c.norm, c.ema, c.position) for c in held.layer_caches
    )
    return ModelCache(layers, held.final_norm)
