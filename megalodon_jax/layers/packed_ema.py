"""The complex EMA over packed documents; no document contributes to another, even by rounding.

An FFT over a row would leave rounding noise in every document, 1e-7 of the largest document's
values. So tokens are processed in blocks, and contributions to later tokens are selected, never
subtracted: within a block from close neighbours (`_taps`) and from first to second halves
(`_second_halves`), between blocks through the state (`_from_states`).

Products are batched over channels, so arrays here are (D, B, L). The token `r` places before a
token is in the same document if the token's position is at least `r`. Source: docs/model.md "Packed
documents".
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Complex, Float, Int32

BLOCK = 32
"""Tokens per block of the packed EMA. Larger blocks need more products inside, smaller blocks need
more states."""
SPAN = 256
"""Tokens processed at once: their values in all channels fit into a processor's cache."""
TAPS = 4
"""Length of runs within which contributions are summed token by token; a matrix product over fewer
tokens would be slower."""


class Coefficients(NamedTuple):
    """Coefficients of the EMA in blocks of `BLOCK` tokens; each power is rounded once from float64.

    `powers` are q^0 .. q^S, S = `BLOCK`: real and imaginary part, each (D, N, S + 1). `power` is
    q^S again (D, N), and `lost` the unrounded q^S minus it. `p` and `gamma` (D, N) are the input
    and output gains, and `omega` (D,) is the skip gain.
    """

    powers: tuple[Float[Array, "D N S1"], Float[Array, "D N S1"]]
    power: Complex[Array, "D N"]
    lost: Complex[Array, "D N"]
    p: Float[Array, "D N"]
    gamma: Complex[Array, "D N"]
    omega: Float[Array, " D"]


def filtered(
    u: Float[Array, "B D L"],
    positions: Int32[Array, "B L"],
    coefficients: Coefficients,
    h_init: Complex[Array, "B D N"] | None,
) -> Float[Array, "B D L"]:
    """Return the output of the EMA with its skip path; each document starts from a zero state.

    Args:
        u: input, 0 where masked.
        positions: index of each token within its document.
        coefficients: coefficients of the filter.
        h_init: state from which the first document continues, if it started before this call; None
            is zero.
    """
    B, D, L = u.shape
    # A loop over spans, not one pass over the whole row: there XLA would fuse the preceding norm
    # into every tap and every half, and these into every reader of the following norm.
    span = min(SPAN, L + -L % BLOCK)
    short = -L % span
    u = jnp.pad(u, ((0, 0), (0, 0), (0, short))).reshape(B, D, -1, span)
    positions = jnp.pad(positions, ((0, 0), (0, short))).reshape(B, -1, span)
    real, imag = coefficients.powers
    p, gamma = coefficients.p, coefficients.gamma
    kernel = _einsum("dn,dns->ds", p * jnp.real(gamma), real)
    kernel = kernel - _einsum("dn,dns->ds", p * jnp.imag(gamma), imag)
    kernel = kernel.at[:, 0].add(coefficients.omega)

    def step(h: Array, part: tuple[Array, Array]) -> tuple[Array, Array]:
        u, positions = part
        y = _taps(u, positions, kernel)
        half = TAPS
        while half < BLOCK:
            y = y + _second_halves(u, positions, kernel, half)
            half *= 2
        heard, h = _from_states(u, positions, coefficients, h)
        return h, y + heard

    if h_init is None:
        rest = jnp.zeros_like(u, shape=(D, B, p.shape[-1]))
        h = jax.lax.complex(rest, rest)
    else:
        h = jnp.swapaxes(h_init, 0, 1)
    parts = jnp.transpose(u, (2, 1, 0, 3)), jnp.moveaxis(positions, 1, 0)
    _, y = jax.lax.scan(step, h, parts)
    return jnp.transpose(y, (2, 1, 0, 3)).reshape(B, D, -1)[..., :L]


def last_document(positions: Int32[Array, "B L"]) -> Bool[Array, "B L"]:
    """Return which tokens are in the same document as the last token of their row.

    `positions` are the tokens' positions in their documents, from 0.
    """
    L = positions.shape[1]
    return positions[:, -1:] >= jnp.arange(L - 1, -1, -1, dtype=jnp.int32)


def _taps(
    u: Float[Array, "D B L"], positions: Int32[Array, "B L"], kernel: Float[Array, "D S1"]
) -> Float[Array, "D B L"]:
    """Return each token's output due to its document's tokens in its run, up to itself.

    Rows are cut into runs of `TAPS` tokens. Column r of `kernel` is the impulse response r tokens
    later, from 0 to `BLOCK`.
    """
    within = jnp.arange(u.shape[-1], dtype=jnp.int32) % TAPS
    reach = jnp.minimum(positions, within)
    y = kernel[:, 0, None, None] * u
    for r in range(1, TAPS):
        earlier = jnp.pad(u, ((0, 0), (0, 0), (r, 0)))[..., :-r]
        y = y + kernel[:, r, None, None] * jnp.where(reach >= r, earlier, 0.0)
    return y


def _second_halves(
    u: Float[Array, "D B L"],
    positions: Int32[Array, "B L"],
    kernel: Float[Array, "D S1"],
    half: int,
) -> Float[Array, "D B L"]:
    """Return the outputs in the second half of each run of `2 half` tokens due to its first half.

    They are 0 in first halves. `kernel` is that of `_taps`. Only the document that contains the
    last token before the middle lies on both sides of the middle. So this is one matrix product
    with a mask on each side.
    """
    D, B, L = u.shape
    at = positions.reshape(B, L // (2 * half), 2, half)
    back = jnp.arange(half, dtype=jnp.int32)
    first = at[:, :, 0, -1:] >= back[::-1]
    second = at[:, :, 1] >= back + 1
    heard = jnp.where(first, u.reshape(D, B, L // (2 * half), 2, half)[:, :, :, 0], 0.0)
    lags = half + np.arange(half) - np.arange(half)[:, None]
    y = jnp.where(second, _einsum("dbjs,dst->dbjt", heard, kernel[:, lags]), 0.0)
    return jnp.stack([jnp.zeros_like(y), y], axis=3).reshape(D, B, L)


def _from_states(
    u: Float[Array, "D B L"],
    positions: Int32[Array, "B L"],
    coefficients: Coefficients,
    h: Complex[Array, "D B N"],
) -> tuple[Float[Array, "D B L"], Complex[Array, "D B N"]]:
    """Return each token's output due to earlier blocks, and the state after the last block.

    Blocks are runs of `BLOCK` tokens. `h` is the state before the first block. Only tokens of the
    same document contribute.
    """
    (D, B, L), S = u.shape, BLOCK
    real, imag = coefficients.powers
    p, gamma = coefficients.p, coefficients.gamma
    N = p.shape[-1]
    at = positions.reshape(B, L // S, S)
    back = jnp.arange(S, dtype=jnp.int32)
    # The state after a block is that of the document of its last token.
    late = jnp.where(at[:, :, -1:] >= back[::-1], u.reshape(D, B, L // S, S), 0.0)
    decays = jnp.concatenate([p[..., None] * x[..., :S] for x in (real, imag)], axis=1)
    ends = _einsum("dbjs,dms->jdbm", late, decays[..., ::-1])
    whole = jnp.swapaxes(at[:, :, -1], 0, 1)[:, None, :, None] >= S

    power, lost = coefficients.power[:, None], coefficients.lost[:, None]

    def step(h: Array, block: tuple[Array, Array]) -> tuple[Array, Array]:
        end, whole = block
        kept = jnp.where(whole, h, 0.0)
        # As in `ComplexEMA.step`: without `lost`, the rounding error of the power would shift the
        # phase of a long memory by a constant amount per block.
        after = power * kept + (lost * kept + jax.lax.complex(end[..., :N], end[..., N:]))
        return after, h

    h, before = jax.lax.scan(step, h, (ends, whole))
    pairs = jnp.concatenate([jnp.real(before), jnp.imag(before)], axis=-1)
    wr, wi = jnp.real(gamma)[..., None], jnp.imag(gamma)[..., None]
    real, imag = real[..., 1:], imag[..., 1:]
    answers = jnp.concatenate([wr * real - wi * imag, -(wr * imag + wi * real)], axis=1)
    y = _einsum("jdbm,dms->dbjs", pairs, answers)
    return jnp.where(at > back, y, 0.0).reshape(D, B, L), h


def _einsum(spec: str, *operands: Float[Array, "..."]) -> Float[Array, "..."]:
    # As in `complex_ema`: never TF32.
    return jnp.einsum(spec, *operands, precision=jax.lax.Precision.HIGHEST)
