"""Planted bugs of the states that a stream passes from call to call, and of generation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from megalodon_jax.layers import timestep_norm
from megalodon_jax.layers.attention import MegalodonAttention
from megalodon_jax.layers.complex_ema import ComplexEMA
from megalodon_jax.layers.timestep_norm import TimestepNorm
from megalodon_jax.model import MegalodonModel
from parity.engine.measure.quantity import Quantity
from parity.faults.fault import Family, Plant, altered, around, fault, on_result, rounded
from parity.megalodon import runner

_fault = partial(fault, Family.CACHES, witness="stream")


def _count(change: Callable[[Any], Any]) -> Plant:
    def changed(result, *args):
        y, state = result
        return y, altered(state, count=change(state.count))

    return on_result(changed)


@around
def _state_lost(call, self, x, state=None, mask=None):
    return call(self, x, None, mask)


@around
def _prior_not_times_count(run, mu, mean0, var0, count0, mask):
    n0 = jnp.maximum(count0, 1).astype(var0.dtype)[:, None]
    return run(mu, mean0, var0 / n0, count0, mask)


@around
def _carried_state_left_out(final_state, self, u, h_init, p, tables, *lengths):
    return final_state(self, u, None, p, tables, *lengths)


@around
def _state_at_the_padded_end(final_state, self, u, h_init, p, tables, *lengths):
    return final_state(self, u, h_init, p, tables)


@around
def _decay_of_the_longest(power, self, exponents, tables):
    return power(self, jnp.full_like(exponents, jnp.max(exponents)), tables)


@around
def _padding_counted(call, self, x, state=None, mask=None):
    return call(self, x, state)


def _state_not_written(result, self, u, mask, state, *args):
    return result if state is None else (result[0], state)


def _state_conjugated(result, *args):
    c, state = result
    return c, None if state is None else altered(state, h=jnp.conj(state.h))


def _state_bfloat16(result, *args):
    c, state = result
    if state is None:
        return c, None
    real, imag = rounded(jnp.real(state.h)), rounded(jnp.imag(state.h))
    return c, altered(state, h=real + imag * jnp.asarray(1j, state.h.dtype))


def _final_norm_not_kept(result, self, *args):
    hidden, cache = result
    if cache is None:
        return result
    fresh = timestep_norm.NormState.fresh(
        hidden.shape[0], self.config.norm_num_groups, hidden.dtype
    )
    return hidden, eqx.tree_at(lambda c: c.final_norm, cache, fresh)


def _step_without_omega(result, self, u, h):
    y, state = result
    return y - self.omega.astype(u.dtype) * u, state


@around
def _pad_not_allowed(pick, logits):
    return pick(logits[..., 1:])


_LAYER = Quantity.state("layers.0.")

_norm = partial(_fault, owner=TimestepNorm, stage=_LAYER + "norm_count")
_filtered = partial(_fault, stage=_LAYER + "ema", owner=MegalodonAttention, attribute="_filtered")

FAULTS = (
    _norm(
        "cache_count_early", "a token counted before it is seen", _count(lambda count: count + 1)
    ),
    _norm(
        "cache_norm_count_reset", "the count starts over with every call", _count(jnp.zeros_like)
    ),
    _norm("cache_norm_state_lost", "the norm of a layer is called without its state", _state_lost),
    _fault(
        "cache_norm_prior_not_times_count",
        "M2 continued from var, not from var n",
        _prior_not_times_count,
        stage=_LAYER + "norm_var",
        owner=timestep_norm,
        attribute="_running",
    ),
    _fault(
        "cache_final_norm_not_kept",
        "the final norm is not part of any layer's cache and is forgotten",
        on_result(_final_norm_not_kept),
        stage=Quantity.state("norm_count"),
        owner=MegalodonModel,
    ),
    _filtered(
        "cache_ema_stale",
        "the state after the first call is never written again",
        on_result(_state_not_written),
    ),
    _fault(
        "cache_ema_not_carried",
        "the final state of a call is that of its own tokens",
        _carried_state_left_out,
        stage=_LAYER + "ema",
        owner=ComplexEMA,
        attribute="_final_state",
    ),
    _fault(
        "ragged_ema_at_the_padded_end",
        "the state of a padded row decays on through its padding",
        _state_at_the_padded_end,
        stage=_LAYER + "ema",
        owner=ComplexEMA,
        attribute="_final_state",
        witness="stream_ragged",
    ),
    _fault(
        "ragged_ema_decays_as_the_longest",
        "what a row held before a call decays by the tokens of the longest row",
        _decay_of_the_longest,
        stage=_LAYER + "ema",
        owner=ComplexEMA,
        attribute="_power_of",
        witness="stream_ragged",
    ),
    _norm(
        "ragged_norm_counts_padding",
        "padding beside a cache enters the statistics",
        _padding_counted,
        witness="stream_ragged",
    ),
    _filtered(
        "cache_ema_conjugated",
        "the imaginary part stored with the other sign",
        on_result(_state_conjugated),
    ),
    _filtered(
        "cache_ema_bfloat16", "the state kept in the compute dtype", on_result(_state_bfloat16)
    ),
    _fault(
        "cache_step_without_omega",
        "the path for one token misses what the path for many has",
        on_result(_step_without_omega),
        stage=_LAYER + "k",
        owner=ComplexEMA,
        attribute="step",
        witness="stream_tokens",
    ),
    _fault(
        "generation_forbids_the_first_token",
        "argmax over the vocabulary without its first entry",
        _pad_not_allowed,
        stage="generated",
        owner=runner,
        attribute="greedy_token",
    ),
)
