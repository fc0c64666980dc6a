"""Poles of the EMA: their memory, and the effect of storage and of float32 arithmetic on it.

A pole is `q = (1 - x) exp(i phi)` with `x = alpha' delta'` and `phi = n sigmoid(theta) 2 pi / N`,
where alpha' and delta' are the sigmoids of the stored logits, and n counts the N poles of a channel
from 1. The memory of a pole is 1 / (1 - |q|) = 1 / x steps. A format with m stored mantissa bits
has no number between 1 - 2^-(m+1) and 1. A longer memory is therefore rounded to 2^(m+1) steps or
to infinity. Everything here is computed in float64 from the stored parameters.

Source: docs/stability.md "EMA poles", docs/model.md "CEMA", docs/model.md "What float32 gets
wrong".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import expit

from stability.core.number_formats import BF16, Format
from stability.core.parameter_leaves import leaves_of, listed, parameters_of, seed_of

SOURCE = 'docs/stability.md "EMA poles"'
CHANNELS = 4
"""Default number of channels per layer whose response is computed: 4 channels of 16 poles take
0.1 s for 32,768 steps."""
_PARTS = ("alpha", "delta", "theta")


@dataclass(frozen=True, slots=True)
class Poles:
    """The poles of one EMA, from its parameters in float64: D channels of N poles each."""

    layer: str
    """Path of the EMA, such as `model.layers.0.attn.cema`."""
    alpha: np.ndarray
    """Stored logits, (D, N); alpha' is their sigmoid."""
    delta: np.ndarray
    """Stored logits, (D, N); delta' is their sigmoid."""
    theta: np.ndarray
    """Stored logits, (D, 1); the phase of pole n (1 to N) is their sigmoid times n / N, in turns a
    step."""

    @property
    def decay(self) -> np.ndarray:
        """Decay per step x = alpha' delta' = 1 - |q|, (D, N)."""
        return expit(self.alpha) * expit(self.delta)

    @property
    def turns(self) -> np.ndarray:
        """Phase per step of each pole, in turns (1 is 2 pi), (D, N)."""
        N = self.alpha.shape[1]
        return np.arange(1, N + 1) * expit(self.theta) / N

    def memory(self) -> np.ndarray:
        """Return the memory 1 / (1 - |q|) in steps, (D, N)."""
        return _inverse(self.decay)

    def memory_stored(self, fmt: Format | None = BF16) -> np.ndarray:
        """Return the memory in steps with |q| stored in `fmt` (None: float32); inf for |q| = 1."""
        radius = (1.0 - self.decay).astype(np.float32)
        stored = radius if fmt is None else fmt.round(radius)
        return _inverse(1.0 - stored.astype(np.float64))

    def float32_q(self) -> np.ndarray:
        """Return q computed from the logits in float32 arithmetic, as complex128 (D, N)."""
        alpha, delta, theta = (
            expit(x.astype(np.float32)) for x in (self.alpha, self.delta, self.theta)
        )
        N = self.alpha.shape[1]
        step = np.float32(2 * math.pi / N)
        phase = np.arange(1, N + 1, dtype=np.float32) * theta * step
        radius = np.float32(1.0) - alpha * delta
        return (radius * np.exp(1j * phase).astype(np.complex64)).astype(np.complex128)

    def narrow(self, fmt: Format = BF16) -> Poles:
        """Return the poles that result if alpha, delta and theta are rounded to `fmt`."""
        rounded = (fmt.round(x).astype(np.float64) for x in (self.alpha, self.delta, self.theta))
        return Poles(self.layer, *rounded)

    def phase_error(self, length: int, fmt: Format | None = BF16) -> np.ndarray:
        """Return the phase error after `length` steps, (D, N) in turns, capped at 1/2.

        Args:
            length: number of steps.
            fmt: storage format of theta. None: theta is exact, and the phase per step is rounded to
                float32, as in an implementation that multiplies it by the position.
        """
        if fmt is None:
            stored = (2 * np.pi * self.turns).astype(np.float32).astype(np.float64) / (2 * np.pi)
        else:
            stored = self.narrow(fmt).turns
        off = np.abs(stored - self.turns) * length
        return np.where(off < 0.5, off, 0.5)


def find_poles(source: Any) -> dict[str, Poles]:
    """Return the poles of every EMA in a pytree, state dict or checkpoint, by the EMA's path.

    Raises:
        ValueError: there is no EMA, an EMA lacks alpha, delta or theta, their shapes do not match,
            or a value is not finite.
    """
    leaves = leaves_of(source)
    layers = [n.removesuffix(".alpha") for n in leaves if n.endswith("cema.alpha")]
    if not layers:
        raise ValueError(
            "no EMA here: expected parameters named like model.layers.0.attn.cema.alpha, found "
            f"{listed(list(leaves))}. Only a Megalodon has poles to analyse."
        )
    tensors = {}
    for layer in layers:
        for part in _PARTS:
            name = f"{layer}.{part}"
            if name not in leaves:
                raise ValueError(
                    f"{layer} has no {part}: expected {', '.join(_PARTS)} together; export the "
                    "checkpoint again with all of them."
                )
            tensors[name] = leaves[name].load()
    parameters_of(tensors)
    return {layer: _poles(layer, tensors) for layer in layers}


def _poles(layer: str, tensors: Mapping[str, np.ndarray]) -> Poles:
    alpha, delta, theta = (np.asarray(tensors[f"{layer}.{p}"], np.float64) for p in _PARTS)
    if alpha.ndim < 2 or alpha.shape != delta.shape or theta.size != alpha.shape[0]:
        raise ValueError(
            f"{layer}: alpha {alpha.shape}, delta {delta.shape}, theta {theta.shape}; expected "
            "(D, N, 1), (D, N, 1) and (D, 1, 1)."
        )
    D = alpha.shape[0]
    return Poles(layer, alpha.reshape(D, -1), delta.reshape(D, -1), theta.reshape(D, 1))


def collapsed(poles: Poles, fmt: Format = BF16) -> float:
    """Return the fraction of poles that never forget: |q|, itself stored in `fmt`, becomes 1."""
    return float(np.mean(np.isinf(poles.memory_stored(fmt))))


def float32_error(poles: Poles, length: int, channels: int = CHANNELS) -> float:
    """Return the relative L2 error of an EMA's impulse response when q is computed in float32.

    The exact response has q in float64. Both responses take powers of q in float64, so only the
    rounding of `1 - alpha' delta'` and of the phase counts, without the rounding of any state.

    Args:
        poles: the poles of an EMA. Input gains are alpha'; output gains are drawn as at
            initialisation.
        length: number of steps of the response.
        channels: number of channels to use, drawn with a seed from the EMA's path.
    """
    rng = np.random.default_rng(seed_of(poles.layer))
    D, N = poles.alpha.shape
    rows = np.sort(rng.choice(D, min(channels, D), replace=False))
    some = Poles(poles.layer, poles.alpha[rows], poles.delta[rows], poles.theta[rows])
    gain = (expit(some.alpha) * rng.standard_normal((len(rows), N)))[..., None]
    exact = (np.log1p(-some.decay) + 2j * np.pi * some.turns)[..., None]
    narrow = np.log(some.float32_q())[..., None]
    difference = total = 0.0
    # Computed in blocks: powers of one channel for 131,072 steps would take tens of megabytes.
    for start in range(0, length, _BLOCK):
        j = np.arange(start, min(length, start + _BLOCK))
        wide, single = ((gain * np.exp(log_q * j)).sum(axis=1).real for log_q in (exact, narrow))
        difference += float(np.square(single - wide).sum())
        total += float(np.square(wide).sum())
    return math.sqrt(difference / total)


_BLOCK = 4096
"""Number of steps whose powers are in memory at once."""


def _inverse(x: np.ndarray) -> np.ndarray:
    return np.divide(1.0, x, out=np.full(x.shape, np.inf), where=x > 0)
