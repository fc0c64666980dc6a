"""Planted bugs of uncached chunked attention, and of the gain and shift of queries and keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from megalodon_jax.layers import attention
from megalodon_jax.layers.attention import ChunkedAttention, MegalodonAttention
from parity.faults.fault import Family, Plant, around, fault, on_copy, on_result

_fault = partial(fault, Family.ATTENTION, stage="layers.0.inner")


def _attend(change: Callable[..., dict[str, Any]]) -> Plant:
    """Return a plant that calls `attend` with the arguments that `change` returns, by name.

    `change` gets `(q, k, mask, config)`; other arguments stay as they are.
    """

    @around
    def plant(call, q, k, v, mask, config, *, key=None):
        given = {"q": q, "k": k, "v": v, "mask": mask, "config": config, "key": key}
        given |= change(q, k, mask, config)
        return call(*(given[n] for n in ("q", "k", "v", "mask", "config")), key=given["key"])

    return plant


def _config(**changes: Any) -> Callable[..., dict[str, Any]]:
    return lambda q, k, mask, config: {"config": dataclasses.replace(config, **changes)}


def _dropping(q, k, mask, config):
    changed = dataclasses.replace(config, attention_dropout=0.1)
    return {"config": changed, "key": jax.random.key(0)}


def _scaled_again(q, k, mask, config):
    return {"q": q / math.sqrt(q.shape[-1])}


def _not_itself(q, k, mask, config):
    return {"mask": mask & ~jnp.eye(*mask.shape[-2:], dtype=bool)}


def _the_next(q, k, mask, config):
    return {"mask": mask | jnp.eye(*mask.shape[-2:], k=1, dtype=bool)}


def _average_where_empty(out, q, k, v, mask, *rest):
    seen = jnp.any(mask, axis=-1)[..., None, None]
    return jnp.where(seen, out, jnp.mean(v, axis=-3, keepdims=True).astype(out.dtype))


def _nan_where_empty(out, q, k, v, mask, *rest):
    return jnp.where(jnp.any(mask, axis=-1)[..., None, None], out, jnp.nan)


def _chunks_of(size: Callable[[int], int]) -> Plant:
    def changed(self):
        return dataclasses.replace(self.config, chunk_size=size(self.config.chunk_size))

    return on_copy(config=changed)


@around
def _mask_ignored(call, self, q, k, v, mask=None, *args, **options):
    return call(self, q, k, v, None, *args, **options)


def _heads_last(out, *args):
    return jnp.swapaxes(out, -1, -2).reshape(out.shape)


def _key_is_query(result, *args):
    return result[0], result[0]


def _unscaled_gain(self):
    d = self.config.head_dim
    return (self.gamma + 1.0) * math.sqrt(d) - 1.0


_CORE, _AFFINE = ChunkedAttention, MegalodonAttention

_attended = partial(_fault, owner=attention, attribute="attend")
_affine = partial(_fault, owner=_AFFINE, attribute="queries_keys")

FAULTS = (
    _attended(
        "attention_scaled_again",
        "1/sqrt(d) in the scores, which the gains hold already",
        _attend(_scaled_again),
    ),
    _affine(
        "attention_gain_unscaled",
        "1/sqrt(d) left out of the gains",
        on_copy(gamma=_unscaled_gain),
        stage="layers.0.q",
    ),
    _affine(
        "attention_gain_plus_one_dropped",
        "query/key gains used as they are stored",
        on_copy(gamma=lambda self: self.gamma - 1.0),
        stage="layers.0.q",
    ),
    _affine(
        "attention_shift_scaled",
        "1/sqrt(d) applied to beta too",
        on_copy(beta=lambda self: self.beta / math.sqrt(self.config.head_dim)),
        stage="layers.0.q",
    ),
    _affine(
        "attention_key_is_query",
        "row 0 of gamma and beta for both",
        on_result(_key_is_query),
        stage="layers.0.k",
    ),
    _attended(
        "attention_not_itself", "a strict triangle: mask shifted by one", _attend(_not_itself)
    ),
    _attended(
        "attention_sees_the_next",
        "triangle shifted the other way: the future leaks",
        _attend(_the_next),
    ),
    _fault(
        "attention_chunk_leak",
        "keys of the chunk before are visible",
        _chunks_of(lambda C: 2 * C),
        owner=_CORE,
        attribute="_block_diagonal",
        witness="plain",
    ),
    _fault(
        "attention_chunk_one_short",
        "chunks of C - 1",
        _chunks_of(lambda C: C - 1),
        owner=_CORE,
        attribute="_block_diagonal",
    ),
    _attended(
        "attention_softmax_bfloat16",
        "softmax in the compute dtype of an autocast",
        _attend(_config(softmax_dtype="bfloat16")),
    ),
    _attended(
        "attention_dropout_left_on",
        "the model was never put into evaluation mode",
        _attend(_dropping),
    ),
    _fault(
        "attention_padding_visible",
        "the padding mask does not reach the scores",
        _mask_ignored,
        owner=_CORE,
        witness="interior_padding_as_reference",
    ),
    _attended(
        "attention_empty_row_averages",
        "masking with a large negative number: a row without keys becomes uniform",
        on_result(_average_where_empty),
        witness="left_padding_as_reference",
    ),
    _attended(
        "attention_empty_row_is_nan",
        "masking with -inf: a row without keys becomes NaN",
        on_result(_nan_where_empty),
        witness="left_padding_as_reference",
    ),
    _attended(
        "attention_heads_merged_last",
        "(B, L, e, H) flattened in place of (B, L, H, e)",
        on_result(_heads_last),
    ),
)
