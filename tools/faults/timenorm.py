"""Planted bugs of TimestepNorm, whose statistics accumulate along the text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp

from megalodon_jax.layers import timestep_norm
from megalodon_jax.layers.timestep_norm import TimestepNorm
from parity.faults.fault import Family, Plant, altered, around, fault, on_copy, shifted_gain, zeroed

_norm = partial(fault, Family.NORMS, stage="layers.0.timenorm", owner=TimestepNorm)


_statistics = partial(_norm, owner=timestep_norm, attribute="_running")


def _running(change: Callable[..., Any]) -> Plant:
    """Return a plant that replaces running mean and variance by those that `change` returns.

    `change` gets keyword arguments: `mu`, the group means of each token; the correct `mean` and
    `var`; `n`, the number of valid tokens so far; and `previous`, the mean before each token.
    """

    @around
    def plant(run, mu, mean0, var0, count0, mask):
        mean, var, count = run(mu, mean0, var0, count0, mask)
        valid = jnp.ones(mu.shape[:2], bool) if mask is None else mask
        n = jnp.maximum(count0[:, None] + jnp.cumsum(valid, axis=1, dtype=jnp.int32), 1)
        n = n.astype(mu.dtype)[..., None]
        previous = jnp.concatenate([mean0[:, None], mean[:, :-1]], axis=1)
        return *change(mu=mu, mean=mean, var=var, n=n, previous=previous), count

    return plant


def _unbiased(mu, mean, var, n, previous):
    return mean, var * n / jnp.maximum(n - 1, 1)


def _one_late(mu, mean, var, n, previous):
    return previous, jnp.concatenate([jnp.ones_like(var[:, :1]), var[:, :-1]], axis=1)


def _of_the_whole_text(mu, mean, var, n, previous):
    return jnp.broadcast_to(mean[:, -1:], mean.shape), jnp.broadcast_to(var[:, -1:], var.shape)


def _old_mean_twice(mu, mean, var, n, previous):
    return mean, (1 + jnp.cumsum(jnp.square(mu - previous), axis=1)) / n


def _no_prior(mu, mean, var, n, previous):
    return mean, jnp.maximum(var - 1 / n, timestep_norm.VARIANCE_FLOOR)


def _mean_square_less_square(mu, mean, var, n, previous):
    return mean, (1 + jnp.cumsum(jnp.square(mu), axis=1)) / n - jnp.square(mean)


@around
def _from_raw_moments(call, self, x, state=None, mask=None):
    def no_origin(groups, state, mask):
        return jnp.zeros_like(groups[:, 0, :, 0])

    moments = _running(_mean_square_less_square)(timestep_norm._running)
    with (
        patch.object(timestep_norm, "_origin", no_origin),
        patch.object(timestep_norm, "_running", moments),
    ):
        return call(self, x, state, mask)


def _with_variance(change: Callable[..., Any]) -> Plant:
    """Return a plant that replaces the variance by `change(var, groups, eps)`.

    `groups` (B, L, G, g) is the input by group; the norm divides by sqrt(variance + eps).
    """

    @around
    def plant(call, self, x, state=None, mask=None):
        groups = x.reshape(*x.shape[:2], self.num_groups, -1)

        def inner(mu, mean, var, n, previous):
            return mean, change(var, groups, self.eps)

        with patch.object(timestep_norm, "_running", _running(inner)(timestep_norm._running)):
            return call(self, x, state, mask)

    return plant


def _plus_eps(var, groups, eps):
    # The norm adds eps and takes rsqrt, which gives 1 / (sqrt(var) + eps).
    return jnp.square(jnp.sqrt(var) + eps) - eps


def _plus_within(var, groups, eps):
    within = jnp.var(groups, axis=-1)
    return var + jnp.cumsum(within, axis=1) / jnp.arange(1, within.shape[1] + 1)[:, None].astype(
        var.dtype
    )


@around
def _interleaved_groups(call, self, x, state=None, mask=None):
    G, D = self.num_groups, self.num_features
    order = jnp.arange(D).reshape(-1, G).T.reshape(-1)
    y, state = call(altered(self, weight=None, bias=None), x[..., order], state, mask)
    y = y[..., jnp.argsort(order)]
    if self.weight is not None:
        y = y * (self.weight + 1.0).astype(y.dtype) + self.bias.astype(y.dtype)
    return y, state


@around
def _mask_ignored(call, self, x, state=None, mask=None):
    return call(self, x, state, None)


@around
def _masked_outputs_zeroed(call, self, x, state=None, mask=None):
    y, state = call(self, x, state, mask)
    return y if mask is None else jnp.where(mask[..., None], y, 0.0), state


FAULTS = (
    _norm("timenorm_eps_outside_sqrt", "x / (sqrt(var) + eps)", _with_variance(_plus_eps)),
    _norm(
        "timenorm_wrong_eps", "1e-6, the default of another norm", on_copy(eps=lambda self: 1e-6)
    ),
    _norm("timenorm_plus_one_dropped", "gain used as it is stored", shifted_gain("weight", -1.0)),
    _statistics("timenorm_unbiased_variance", "M2 over n - 1", _running(_unbiased)),
    _norm(
        "timenorm_within_group_variance",
        "the variance of all scalars of a group, as GroupNorm has it",
        _with_variance(_plus_within),
    ),
    _statistics(
        "timenorm_no_prior", "M2 of a fresh stream starts at 0, not at 1", _running(_no_prior)
    ),
    _statistics(
        "timenorm_statistics_one_late",
        "a token normalised by what came before it",
        _running(_one_late),
    ),
    _statistics(
        "timenorm_not_causal", "statistics of the whole text", _running(_of_the_whole_text)
    ),
    _statistics(
        "timenorm_old_mean_twice",
        "Welford's update with the old mean in both factors",
        _running(_old_mean_twice),
    ),
    _norm(
        "timenorm_raw_moments",
        "E[x^2] - E[x]^2: right on paper, cancels for a large mean",
        _from_raw_moments,
        witness="large_mean",
    ),
    _norm("timenorm_groups_interleaved", "channel c in group c mod G", _interleaved_groups),
    _norm(
        "timenorm_counts_padding",
        "masked tokens enter the statistics",
        _mask_ignored,
        witness="right_padding",
    ),
    _norm(
        "timenorm_zeroes_padding",
        "masked tokens give no output",
        _masked_outputs_zeroed,
        witness="right_padding",
    ),
    _norm("timenorm_bias_dropped", "one norm class without bias for all", zeroed("bias")),
)
