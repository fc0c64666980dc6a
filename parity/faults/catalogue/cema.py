"""Bugs of the complex EMA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from megalodon_jax.layers import complex_ema
from megalodon_jax.layers.complex_ema import ComplexEMA
from parity.faults.fault import (
    Family,
    Fault,
    Patch,
    Plant,
    anything,
    on_copy,
    on_result,
    padded,
    rounded,
    uncached,
)
from parity.megalodon.cases import Case


def _fault(
    name: str,
    how: str,
    attribute: str,
    plant: Plant,
    owner: Any = ComplexEMA,
    witness: str = "length_c",
    shows: Callable[[Case], bool] = uncached,
) -> Fault:
    patch = Patch(owner, attribute, plant)
    return Fault(Family.CEMA, name, how, "layers.0.cema", patch, witness, shows)


def _gains(change: Callable[..., Any]) -> Plant:
    """Change (p, gamma): `change(p, gamma, self)`."""

    def plant(gains):
        def faulty(self, dtype):
            return change(*gains(self, dtype), self)

        return faulty

    return plant


def _poles(change: Callable[..., Any]) -> Plant:
    """Change log|q| and the phase in turns, both (D, N): `change(log_radius, turns)`."""

    def plant(log_poles):
        def faulty(alpha, delta, theta):
            return change(*log_poles(alpha, delta, theta))

        return faulty

    return plant


def _unit_phase(self: Any, like: Any) -> Any:
    q = self.q(jnp.real(like).dtype)
    return q / jnp.abs(q)


def _absolute(response):
    def faulty(weights, tables, length):
        real = response(weights, tables, length)
        imag = response(weights * jnp.asarray(-1j, weights.dtype), tables, length)
        return jnp.sqrt(jnp.square(real) + jnp.square(imag))

    return faulty


def _circular(convolve):
    def faulty(x, kernel):
        L = x.shape[-1]
        spectrum = jnp.fft.rfft(x, n=L) * jnp.fft.rfft(kernel, n=L)
        return jnp.fft.irfft(spectrum, n=L)

    return faulty


def _backwards(convolve):
    def faulty(x, kernel):
        return convolve(x[..., ::-1], kernel)[..., ::-1]

    return faulty


def _mask_ignored(call):
    def faulty(self, x, h_init=None, return_state=False, mask=None):
        return call(self, x, h_init, return_state, None)

    return faulty


def _radius_in_float32(log_radius, turns):
    radius = jnp.exp(log_radius).astype(jnp.float32)
    return jnp.log(radius.astype(log_radius.dtype)), turns


def _masked_filter(case: Case) -> bool:
    return padded(case) and case.config.mask_ema


_LOG_POLES = {"attribute": "_log_poles", "owner": complex_ema, "shows": anything}

FAULTS = (
    _fault(
        "cema_gamma_conjugated",
        "Re(conj(gamma) h): the sign of a product of two imaginary parts",
        "gains",
        _gains(lambda p, gamma, self: (p, jnp.conj(gamma))),
        shows=anything,
    ),
    _fault(
        "cema_gamma_unscaled",
        "1/sqrt(N) left out",
        "gains",
        _gains(lambda p, gamma, self: (p, gamma * self.ndim**0.5)),
        shows=anything,
    ),
    _fault(
        "cema_gamma_over_n",
        "1/N for 1/sqrt(N)",
        "gains",
        _gains(lambda p, gamma, self: (p, gamma * self.ndim**-0.5)),
        shows=anything,
    ),
    _fault(
        "cema_phase_on_p",
        "p = alpha' e^(i phi), the paper's other form",
        "gains",
        _gains(lambda p, gamma, self: (p, gamma * _unit_phase(self, gamma))),
    ),
    _fault(
        "cema_p_complement",
        "p = 1 - alpha', as in other moving averages",
        "gains",
        _gains(lambda p, gamma, self: (1 - p, gamma)),
        shows=anything,
    ),
    _fault(
        "cema_p_dropped",
        "the input gain taken for part of gamma",
        "gains",
        _gains(lambda p, gamma, self: (jnp.ones_like(p), gamma)),
        shows=anything,
    ),
    _fault(
        "cema_power_one_late",
        "kernel q^(j+1): the state read before the input enters",
        "gains",
        _gains(lambda p, gamma, self: (p, gamma * self.q(p.dtype))),
    ),
    _fault(
        "cema_delta_dropped",
        "q = 1 - alpha', an undamped average",
        "_powers",
        # sigmoid(40) is 1 in float64.
        on_copy(delta=lambda self: jnp.full_like(self.delta, 40.0)),
        shows=anything,
    ),
    _fault(
        "cema_theta_not_over_n",
        "phi_n = 2 pi n sigmoid(theta)",
        plant=_poles(lambda log_radius, turns: (log_radius, turns * turns.shape[-1])),
        **_LOG_POLES,
    ),
    _fault(
        "cema_orders_from_zero",
        "n = 0 .. N-1",
        plant=_poles(lambda log_radius, turns: (log_radius, turns - turns[:, :1])),
        **_LOG_POLES,
    ),
    _fault(
        "cema_phase_dropped",
        "a real EMA: q cast to real",
        plant=_poles(lambda log_radius, turns: (log_radius, jnp.zeros_like(turns))),
        **_LOG_POLES,
    ),
    _fault(
        "cema_exponential_decay",
        "|q| = exp(-alpha' delta'), as state-space models have it",
        plant=_poles(lambda log_radius, turns: (jnp.expm1(log_radius), turns)),
        **_LOG_POLES,
    ),
    _fault(
        "cema_radius_in_float32",
        "1 - alpha' delta' rounded before its power is taken",
        plant=_poles(_radius_in_float32),
        witness="slow_decay",
        **_LOG_POLES,
    ),
    _fault(
        "cema_abs_for_real",
        "the modulus of a complex sum where its real part is meant",
        "response",
        _absolute,
        complex_ema,
    ),
    _fault(
        "cema_circular_wrap",
        "FFT without zero padding: the end of the text wraps onto its start",
        "causal_convolution",
        _circular,
        complex_ema,
    ),
    _fault(
        "cema_not_causal",
        "time reversed: the kernel reads the future",
        "causal_convolution",
        _backwards,
        complex_ema,
    ),
    _fault(
        "cema_kernel_bfloat16",
        "kernel rounded to the compute dtype",
        "response",
        on_result(lambda kernel, *args: rounded(kernel)),
        complex_ema,
    ),
    _fault(
        "cema_omega_dropped",
        "no path around the filter",
        "__call__",
        on_copy(omega=lambda self: jnp.zeros_like(self.omega)),
    ),
    _fault(
        "cema_omega_through_sigmoid",
        "omega taken for a logit like alpha and delta",
        "__call__",
        on_copy(omega=lambda self: jax.nn.sigmoid(self.omega)),
    ),
    _fault(
        "cema_reads_padding",
        "masked inputs enter although they are to be zeroed",
        "__call__",
        _mask_ignored,
        witness="right_padding",
        shows=_masked_filter,
    ),
)
