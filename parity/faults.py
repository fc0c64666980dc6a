"""Planted porting bugs: the harness is judged by whether it finds each and names where it starts.

A fault is a small named patch of the JAX model, and the tap where its effect must first be seen.
Source: spec/parity.md "Faults".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp

from megalodon_jax.layers.complex_ema import ComplexEMA
from megalodon_jax.layers.norms import RMSNorm
from megalodon_jax.layers.rotary import RotaryEmbedding, _rotate
from megalodon_jax.layers.timestep_norm import TimestepNorm


@dataclass(frozen=True, slots=True)
class Fault:
    """One bug: where it is planted, what stands there instead, and where it must first show."""

    name: str
    owner: Any
    attribute: str
    plant: Callable[[Any], Any]
    """Takes the healthy attribute and returns the faulty one."""
    stage: str
    """Name of the first tap that must be reported, after `layers.0.`."""

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Context in which the JAX model has this bug."""
        faulty = self.plant(getattr(self.owner, self.attribute))
        # Compiled functions would go on as if nothing had happened.
        jax.clear_caches()
        try:
            with patch.object(self.owner, self.attribute, faulty):
                yield
        finally:
            jax.clear_caches()


def _keys_one_late(call):
    def faulty(self, q, k, start_index=0):
        q, _ = call(self, q, k, start_index)
        cos, sin = self.tables(start_index + 1, k.shape[1], k.dtype)
        return q, _rotate(k, cos, sin)

    return faulty


def _gain_without_one(call):
    def faulty(self, x):
        if self.gamma is None:
            return call(self, x)
        return call(self, x) * (self.gamma / (self.gamma + 1.0)).astype(x.dtype)

    return faulty


def _unscaled_gamma(gains):
    def faulty(self, dtype):
        p, gamma = gains(self, dtype)
        return p, gamma * self.ndim**0.5

    return faulty


def _conjugate_gamma(gains):
    def faulty(self, dtype):
        p, gamma = gains(self, dtype)
        return p, jnp.conj(gamma)

    return faulty


def _mask_ignored(call):
    def faulty(self, x, state=None, mask=None):
        return call(self, x, state, None)

    return faulty


FAULTS = (
    Fault("rope_keys_one_late", RotaryEmbedding, "__call__", _keys_one_late, "inner"),
    Fault("rmsnorm_plus_one_dropped", RMSNorm, "__call__", _gain_without_one, "rmsnorm"),
    Fault("cema_gamma_unscaled", ComplexEMA, "gains", _unscaled_gamma, "cema"),
    Fault("cema_gamma_conjugated", ComplexEMA, "gains", _conjugate_gamma, "cema"),
    Fault("timenorm_counts_padding", TimestepNorm, "__call__", _mask_ignored, "timenorm"),
)


def by_name(name: str) -> Fault:
    """Return the fault called `name`.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    for fault in FAULTS:
        if fault.name == name:
            return fault
    raise ValueError(f"no fault {name!r}; there are {', '.join(f.name for f in FAULTS)}.")
