"""Planted bugs of packed rows: values of one document leak into the next, also between calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp

from megalodon_jax import loss, model
from megalodon_jax.layers import attention, packed_ema, packed_norm
from megalodon_jax.layers.rotary import RotaryEmbedding
from parity.engine.measure.quantity import Quantity
from parity.faults.fault import Family, Plant, around, fault, on_result

_packed = partial(fault, witness="packed")
_streamed = partial(fault, Family.CACHES, witness="stream_documents")
_LAYER = Quantity.state("layers.0.")


def _of_the_row(positions: Any) -> Any:
    """Return positions (B, L) counted from the start of the row, as if it were one document."""
    return jnp.broadcast_to(jnp.arange(positions.shape[1], dtype=jnp.int32), positions.shape)


@around
def _state_goes_on(run, u, positions, coefficients, h):
    return run(u, _of_the_row(positions) + packed_ema.BLOCK, coefficients, h)


@around
def _sums_go_on(run, x, positions):
    return run(x, _of_the_row(positions))


@around
def _keys_of_the_row(call, self, q, k, start_index=0):
    turned, _ = call(self, q, k, start_index)
    return turned, call(self, q, k, 0)[1]


def _positions(change: Callable[[Any, int], Any]) -> Plant:
    @around
    def plant(run, mix, q, k, v, positions, mask, chunk, *rest):
        return run(mix, q, k, v, change(positions, chunk), mask, chunk, *rest)

    return plant


@around
def _shift_goes_on(targets, labels, mask, V, ignore_index, segment_ids=None):
    return targets(labels, mask, V, ignore_index)


def _layers_kept(*names: str) -> Plant:
    """Return a plant for `continued` that keeps parts of the state when a new document begins.

    `names` are the fields of a layer's cache that are kept.
    """

    def kept(after: Any, cache: Any, *_: Any) -> Any:
        layers = tuple(
            dataclasses.replace(fresh, **{name: getattr(held, name) for name in names})
            for fresh, held in zip(after.layer_caches, cache.layer_caches, strict=True)
        )
        return dataclasses.replace(after, layer_caches=layers)

    return on_result(kept)


FAULTS = (
    _packed(
        Family.CEMA,
        "packed_ema_state_goes_on",
        "the state of the moving average is not cut between documents",
        stage="layers.0.cema",
        owner=packed_ema,
        attribute="_from_states",
        plant=_state_goes_on,
    ),
    _packed(
        Family.NORMS,
        "packed_norm_count_goes_on",
        "TimestepNorm counts the tokens of the row, not of the document",
        stage="layers.0.timenorm",
        owner=packed_norm,
        attribute="_begin",
        plant=around(lambda run, positions: jnp.zeros_like(positions)),
    ),
    _packed(
        Family.NORMS,
        "packed_norm_sums_go_on",
        "sums of means and squares of the document before are added on",
        stage="layers.0.timenorm",
        owner=packed_norm,
        attribute="running_sum",
        plant=_sums_go_on,
    ),
    _packed(
        Family.ROPE,
        "packed_keys_at_positions_of_the_row",
        "queries are turned by their place in the document, keys by that in the row",
        stage="layers.0.inner",
        owner=RotaryEmbedding,
        attribute="__call__",
        plant=_keys_of_the_row,
    ),
    _packed(
        Family.ATTENTION,
        "packed_chunks_of_the_row",
        "chunks are counted from the start of the row",
        stage="layers.0.inner",
        owner=attention,
        attribute="packed_attention",
        plant=_positions(lambda at, chunk: jnp.minimum(at, _of_the_row(at) % chunk)),
    ),
    _packed(
        Family.ATTENTION,
        "packed_attention_sees_other_documents",
        "the mask knows of chunks and not of documents",
        stage="layers.0.inner",
        owner=attention,
        attribute="packed_attention",
        plant=_positions(lambda at, chunk: _of_the_row(at)),
    ),
    _packed(
        Family.LOSS,
        "packed_loss_shifts_across_documents",
        "the last token of a document predicts the first of the next",
        stage="loss",
        owner=loss,
        attribute="_targets",
        plant=_shift_goes_on,
    ),
    _streamed(
        "streamed_norm_goes_on",
        "a document that begins in a call goes on from the statistics of the one before",
        stage=_LAYER + "norm_count",
        owner=model,
        attribute="continued",
        plant=_layers_kept("norm"),
    ),
    _streamed(
        "streamed_ema_goes_on",
        "a document that begins in a call goes on from the EMA's state of the one before",
        stage=_LAYER + "ema",
        owner=model,
        attribute="continued",
        plant=_layers_kept("ema"),
    ),
)
