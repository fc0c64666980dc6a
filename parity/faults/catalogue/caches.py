"""Bugs of the states a stream carries from one call to the next, and of generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from megalodon_jax.layers import timestep_norm
from megalodon_jax.layers.attention import MegalodonAttention
from megalodon_jax.layers.complex_ema import ComplexEMA
from megalodon_jax.layers.timestep_norm import TimestepNorm
from megalodon_jax.model import MegalodonModel
from parity.faults.fault import (
    Family,
    Plant,
    altered,
    of,
    on_result,
    rounded,
    streamed,
)
from parity.megalodon import runner

_fault = of(Family.CACHES, "stream", streamed)


def _count(change: Callable[[Any], Any]) -> Plant:
    def changed(result, *args):
        y, state = result
        return y, altered(state, count=change(state.count))

    return on_result(changed)


def _state_lost(call):
    def faulty(self, x, state=None, mask=None):
        return call(self, x, None, mask)

    return faulty


def _prior_not_times_count(run):
    def faulty(mu, mean0, var0, count0, mask):
        n0 = jnp.maximum(count0, 1).astype(var0.dtype)[:, None]
        return run(mu, mean0, var0 / n0, count0, mask)

    return faulty


def _carried_state_left_out(final_state):
    def faulty(self, u, h_init, p, tables):
        return final_state(self, u, None, p, tables)

    return faulty


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


def _pad_not_allowed(pick):
    def faulty(logits):
        return pick(logits[..., 1:])

    return faulty


_LAYER = "state/layers.0."


FAULTS = (
    _fault(
        "cache_count_early",
        "a token counted before it is seen",
        _LAYER + "norm_count",
        TimestepNorm,
        "__call__",
        _count(lambda count: count + 1),
    ),
    _fault(
        "cache_norm_count_reset",
        "the count starts over with every call",
        _LAYER + "norm_count",
        TimestepNorm,
        "__call__",
        _count(jnp.zeros_like),
    ),
    _fault(
        "cache_norm_state_lost",
        "the norm of a layer is called without its state",
        _LAYER + "norm_count",
        TimestepNorm,
        "__call__",
        _state_lost,
    ),
    _fault(
        "cache_norm_prior_not_times_count",
        "M2 continued from var, not from var n",
        _LAYER + "norm_var",
        timestep_norm,
        "_running",
        _prior_not_times_count,
    ),
    _fault(
        "cache_final_norm_not_kept",
        "the final norm is not part of any layer's cache and is forgotten",
        "state/norm_count",
        MegalodonModel,
        "__call__",
        on_result(_final_norm_not_kept),
    ),
    _fault(
        "cache_ema_stale",
        "the state after the first call is never written again",
        _LAYER + "ema",
        MegalodonAttention,
        "_filtered",
        on_result(_state_not_written),
    ),
    _fault(
        "cache_ema_not_carried",
        "the final state of a call is that of its own tokens",
        _LAYER + "ema",
        ComplexEMA,
        "_final_state",
        _carried_state_left_out,
    ),
    _fault(
        "cache_ema_conjugated",
        "the imaginary part stored with the other sign",
        _LAYER + "ema",
        MegalodonAttention,
        "_filtered",
        on_result(_state_conjugated),
    ),
    _fault(
        "cache_ema_bfloat16",
        "the state kept in the compute dtype",
        _LAYER + "ema",
        MegalodonAttention,
        "_filtered",
        on_result(_state_bfloat16),
    ),
    _fault(
        "cache_step_without_omega",
        "the path for one token misses what the path for many has",
        _LAYER + "k",
        ComplexEMA,
        "step",
        on_result(_step_without_omega),
        "stream_tokens",
    ),
    _fault(
        "generation_forbids_the_first_token",
        "argmax over the vocabulary without its first entry",
        "generated",
        runner,
        "greedy_token",
        _pad_not_allowed,
    ),
)
