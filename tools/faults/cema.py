"""Planted bugs of the complex EMA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from megalodon_jax.layers import complex_ema
from megalodon_jax.layers.complex_ema import ComplexEMA
from parity.faults.fault import Family, Plant, around, fault, on_copy, on_result, rounded

_fault = partial(fault, Family.CEMA, stage="layers.0.cema", owner=ComplexEMA)


def _gains(change: Callable[..., Any]) -> Plant:
    """Return a plant that replaces the gains (p, gamma) by `change(p, gamma, self)`."""

    @around
    def plant(gains, self, dtype):
        return change(*gains(self, dtype), self)

    return plant


def _poles(change: Callable[..., Any]) -> Plant:
    """Return a plant that replaces the poles' parameters by `change(decay, turns)`.

    Both are (D, N): `decay` is 1 - |q|, and `turns` is the phase of q in units of 2 pi.
    """

    @around
    def plant(poles, alpha, delta, theta):
        return change(*poles(alpha, delta, theta))

    return plant


def _unit_phase(self: Any, like: Any) -> Any:
    q = self.q(jnp.real(like).dtype)
    return q / jnp.abs(q)


@around
def _absolute(response, weights, tables, length):
    real = response(weights, tables, length)
    imag = response(weights * jnp.asarray(-1j, weights.dtype), tables, length)
    return jnp.sqrt(jnp.square(real) + jnp.square(imag))


@around
def _circular(convolve, x, kernel):
    L = x.shape[-1]
    spectrum = jnp.fft.rfft(x, n=L) * jnp.fft.rfft(kernel, n=L)
    return jnp.fft.irfft(spectrum, n=L)


@around
def _backwards(convolve, x, kernel):
    return convolve(x[..., ::-1], kernel)[..., ::-1]


@around
def _mask_ignored(call, self, x, h_init=None, return_state=False, mask=None):
    return call(self, x, h_init, return_state, None)


def _radius_in_float32(decay, turns):
    radius = (1.0 - decay).astype(jnp.float32)
    return 1.0 - radius.astype(decay.dtype), turns


_gain = partial(_fault, attribute="gains")
_pole = partial(_fault, owner=complex_ema, attribute="_poles")

FAULTS = (
    _gain(
        "cema_gamma_conjugated",
        "Re(conj(gamma) h): the sign of a product of two imaginary parts",
        _gains(lambda p, gamma, self: (p, jnp.conj(gamma))),
    ),
    _gain(
        "cema_gamma_unscaled",
        "1/sqrt(N) left out",
        _gains(lambda p, gamma, self: (p, gamma * self.ndim**0.5)),
    ),
    _gain(
        "cema_gamma_over_n",
        "1/N for 1/sqrt(N)",
        _gains(lambda p, gamma, self: (p, gamma * self.ndim**-0.5)),
    ),
    _fault(
        "cema_phase_on_p",
        "p = alpha' e^(i phi), the paper's other form",
        _gains(lambda p, gamma, self: (p, gamma * _unit_phase(self, gamma))),
        attribute="gains",
    ),
    _gain(
        "cema_p_complement",
        "p = 1 - alpha', as in other moving averages",
        _gains(lambda p, gamma, self: (1 - p, gamma)),
    ),
    _gain(
        "cema_p_dropped",
        "the input gain taken for part of gamma",
        _gains(lambda p, gamma, self: (jnp.ones_like(p), gamma)),
    ),
    _fault(
        "cema_power_one_late",
        "kernel q^(j+1): the state read before the input enters",
        _gains(lambda p, gamma, self: (p, gamma * self.q(p.dtype))),
        attribute="gains",
    ),
    _fault(
        "cema_delta_dropped",
        "q = 1 - alpha', an undamped average",  # sigmoid(40) is 1 in float64.
        on_copy(delta=lambda self: jnp.full_like(self.delta, 40.0)),
        attribute="_powers",
    ),
    _pole(
        "cema_theta_not_over_n",
        "phi_n = 2 pi n sigmoid(theta)",
        _poles(lambda decay, turns: (decay, turns * turns.shape[-1])),
    ),
    _pole(
        "cema_orders_from_zero",
        "n = 0 .. N-1",
        _poles(lambda decay, turns: (decay, turns - turns[:, :1])),
    ),
    _pole(
        "cema_phase_dropped",
        "a real EMA: q cast to real",
        _poles(lambda decay, turns: (decay, jnp.zeros_like(turns))),
    ),
    _pole(
        "cema_exponential_decay",
        "|q| = exp(-alpha' delta'), as state-space models have it",
        _poles(lambda decay, turns: (-jnp.expm1(-decay), turns)),
    ),
    _pole(
        "cema_radius_in_float32",
        "1 - alpha' delta' rounded before its power is taken",
        _poles(_radius_in_float32),
        witness="slow_decay",
    ),
    _fault(
        "cema_abs_for_real",
        "the modulus of a complex sum where its real part is meant",
        _absolute,
        owner=complex_ema,
        attribute="response",
    ),
    _fault(
        "cema_circular_wrap",
        "FFT without zero padding: the end of the text wraps onto its start",
        _circular,
        owner=complex_ema,
        attribute="causal_convolution",
    ),
    _fault(
        "cema_not_causal",
        "time reversed: the kernel reads the future",
        _backwards,
        owner=complex_ema,
        attribute="causal_convolution",
    ),
    _fault(
        "cema_kernel_bfloat16",
        "kernel rounded to the compute dtype",
        on_result(lambda kernel, *args: rounded(kernel)),
        owner=complex_ema,
        attribute="response",
    ),
    _fault(
        "cema_omega_dropped",
        "no path around the filter",
        on_copy(omega=lambda self: jnp.zeros_like(self.omega)),
    ),
    _fault(
        "cema_omega_through_sigmoid",
        "omega taken for a logit like alpha and delta",
        on_copy(omega=lambda self: jax.nn.sigmoid(self.omega)),
    ),
    _fault(
        "cema_reads_padding",
        "masked inputs enter although they are to be zeroed",
        _mask_ignored,
        witness="right_padding",
    ),
)
