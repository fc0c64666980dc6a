"""Complex exponential moving average: a long convolution with coefficients in log space.

Per channel d and order n (docs/model.md "CEMA"): `h_t = q h_{t-1} + p u_t`,
`y_t = sum_n Re(gamma h_t) + omega u_t`, with `|q| = 1 - alpha' delta'` and phase
`phi = n sigmoid(theta) 2 pi / N` of q.

A trained EMA with a long memory has `alpha' delta'` near 1e-6. Rounding `1 - alpha' delta'` to
float32 loses the decay rate, and rounding `phi j` loses the phase of q^j at large j. So the radius
is represented as `log1p(-alpha' delta')` and the phase in turns (multiples of 2 pi), both in
float64, and only finished powers of q are rounded.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Complex, Float, Int32
from scipy.fft import next_fast_len

from megalodon_jax.config import checked_dtype, widened
from megalodon_jax.inputs import Mask, as_mask
from megalodon_jax.layers import packed_ema
from megalodon_jax.layers.entry import check_inputs, check_parameters, check_sizes
from megalodon_jax.layers.turns import cos_sin
from megalodon_jax.sharding.axes import AnyMesh, as_varied, mesh_of, on_shards, shards, spec_of
from megalodon_jax.sharding.sequence import incoming_state, last_shards, shards_back


class PowerTables(NamedTuple):
    """Powers of q factored as `q^(aS+b) = q^(aS) q^b`: about 2 sqrt(L) columns represent L powers.

    coarse (D, A, 2N) is [Re, Im] of q^(aS), fine (D, 2N, S) is [Re; Im] of q^b, A S >= L.
    """

    coarse: Float[Array, "D A 2N"]
    fine: Float[Array, "D 2N S"]


class ComplexEMA(eqx.Module):
    """Complex EMA over time, with N complex poles for each of D channels.

    Parameters are precision-sensitive: stored in at least float32, whatever the model's dtypes.
    """

    alpha: Float[Array, "D N 1"]
    delta: Float[Array, "D N 1"]
    theta: Float[Array, "D 1 1"]
    gamma_real: Float[Array, "D N"]
    gamma_imag: Float[Array, "D N"]
    omega: Float[Array, " D"]
    embed_dim: int = eqx.field(static=True)
    ndim: int = eqx.field(static=True)

    def __init__(
        self, embed_dim: int, ndim: int, dtype: DTypeLike = jnp.float32, *, key: jax.Array
    ):
        check_sizes("ComplexEMA", embed_dim=embed_dim, ndim=ndim)
        dtype = checked_dtype("dtype", dtype, "ComplexEMA")
        a_key, d_key, t_key, g_key, o_key = jax.random.split(key, 5)
        D, N = embed_dim, ndim
        self.embed_dim, self.ndim = D, N
        self.alpha = 0.2 * jax.random.normal(a_key, (D, N, 1), dtype)
        self.delta = 0.2 * jax.random.normal(d_key, (D, N, 1), dtype)
        schedule = jnp.exp(-jnp.arange(1, D + 1, dtype=dtype) * (math.log(D) / D))
        schedule = jnp.clip(jax.random.permutation(t_key, schedule), 1e-6, 1.0 - 1e-6)
        self.theta = jax.scipy.special.logit(schedule).reshape(D, 1, 1)
        self.gamma_real = jax.random.normal(g_key, (D, N), dtype)
        self.gamma_imag = jnp.zeros((D, N), dtype)
        self.omega = 0.25 * jax.random.truncated_normal(o_key, -4.0, 4.0, (D,), dtype)

    def __call__(
        self,
        x: Float[Array, "B D L"],
        h_init: Complex[Array, "B D N"] | None = None,
        return_state: bool = False,
        mask: Mask | None = None,
        positions: Int32[Array, "B L"] | None = None,
        *,
        lengths: Int32[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B D L"], Complex[Array, "B D N"] | None]:
        """Filter (B, D, L) along time; return the output and, on request, the state after it.

        Args:
            x: input in any float dtype; computations are in at least float32.
            h_init: state to continue from; None is zero.
            return_state: whether to compute the final state.
            mask: True where a token is valid; other inputs count as 0, but the state still decays.
            positions: index of each token within its document, for packed documents. Each document
                starts from zero, but the first continues from `h_init` if its first index in `x` is
                above 0.
            lengths: instead of `mask`, the number of tokens of each row, which come before its
                padding. The returned state is that after a row's last token; a row without tokens
                keeps its state.

        Returns:
            y (B, D, L) in the dtype of `x`, and the state (B, D, N) complex, or None.

        Raises:
            ValueError: a shape or a dtype does not fit, or is float16.
        """
        check_inputs("ComplexEMA", x=(x, ("B", self.embed_dim, "L")))
        self._check(x.shape[0], h_init)
        L = x.shape[-1]
        mask = as_mask("mask", mask, (x.shape[0], L), "the tokens")
        check_inputs("ComplexEMA", jnp.integer, positions=(positions, (x.shape[0], L)))
        dtype = widened(x.dtype)
        if L == 0:
            return x, self._empty_state(x.shape[0], h_init, dtype) if return_state else None
        mesh = mesh_of(x)
        if mesh is None:
            return self._filtered(x, h_init, return_state, mask, lengths, positions)
        return self._on_mesh(mesh, x, h_init, return_state, mask, lengths, positions)

    def _on_mesh(
        self,
        mesh: AnyMesh,
        x: Float[Array, "B D L"],
        h_init: Complex[Array, "B D N"] | None,
        return_state: bool,
        mask: Bool[Array, "B L"] | None,
        lengths: Int32[Array, " B"] | None = None,
        positions: Int32[Array, "B L"] | None = None,
    ) -> tuple[Float[Array, "B D L"], Complex[Array, "B D N"] | None]:
        """Run `__call__` on a mesh: each device filters its own rows, channels and tokens.

        The computation is inside `shard_map`; outside of it, XLA would gather the whole input of an
        FFT on each device.
        """
        arrays, static = eqx.partition(self, eqx.is_array)
        B, D, L = x.shape
        parts = shards(mesh, "sequence")

        def spec(shape, *dims):
            return spec_of(mesh, shape, dims)

        params = jax.tree.map(lambda a: spec(a.shape, "tensor", *(None,) * (a.ndim - 1)), arrays)
        whole = spec(x.shape, "batch", "tensor", "sequence")
        state = spec((B, D, self.ndim), "batch", "tensor", None)
        rows = spec((B, L), "batch", "sequence")
        tokens = tuple(None if a is None else rows for a in (mask, positions))
        ends = None if lengths is None else spec((B,), "batch")

        def local(arrays, x, h_init, mask, positions, lengths):
            ema = eqx.combine(as_varied(arrays, params, whole), static)
            return ema._filtered(x, h_init, return_state, mask, lengths, positions, parts)

        ins = (params, whole, None if h_init is None else state, *tokens, ends)
        outs = (whole, state if return_state else None)
        inputs = (arrays, x, h_init, mask, positions, lengths)
        return on_shards(local, mesh, inputs, ins, outs)

    def _filtered(
        self,
        x: Float[Array, "B D L"],
        h_init: Complex[Array, "B D N"] | None,
        return_state: bool,
        mask: Bool[Array, "B L"] | None,
        lengths: Int32[Array, " B"] | None = None,
        positions: Int32[Array, "B L"] | None = None,
        parts: int = 1,
    ) -> tuple[Float[Array, "B D L"], Complex[Array, "B D N"] | None]:
        """Run `__call__` on checked inputs, on one of `parts` shards of the sequence."""
        L = x.shape[-1]
        dtype = widened(x.dtype)
        u = x.astype(dtype)
        if lengths is not None:
            assert parts == 1, "a stream has one end: callers do not cut its tokens"
            mask = jnp.arange(L, dtype=jnp.int32)[None] < lengths[:, None]
        if mask is not None:
            u = jnp.where(mask[:, None, :], u, 0.0)
        if positions is not None:
            y, state = self._packed(u, h_init, return_state, positions, parts)
            return y.astype(x.dtype), state
        tables = self.power_tables(L, dtype)
        p, gamma = self.gains(dtype)
        if parts > 1:
            powers = jax.lax.complex(*self._powers(range(0, parts * L, L), dtype))
            h_init = incoming_state(self._final_state(u, None, p, tables), powers, h_init)
        y = causal_convolution(u, response(_scaled(p, gamma), tables, L))
        if mask is not None:
            # Outputs at left padding must be constant. Otherwise their cotangent, which the RMSNorm
            # of a zero amplifies 316 times, would add rounding noise to the gradients of the text.
            y = jnp.where(jnp.cumsum(mask, axis=1)[:, None, :] > 0, y, 0.0)
        # A filter that has seen only zeros has output 0. The FFT leaves rounding noise there, 1e-7
        # of the largest token, which the following norm would scale up to 1. This happens at the
        # first token if a group of TimestepNorm is a single feature.
        # Only the value is subtracted, so the derivative by an input that happens to be 0 remains.
        y = y - jax.lax.stop_gradient(jnp.where(_at_rest(u), y, 0.0))
        if h_init is not None:
            y = y + response(gamma * self.q(dtype) * h_init, tables, L)
        y = y + self._skip(u)
        ragged = () if lengths is None else (lengths,)
        state = self._final_state(u, h_init, p, tables, *ragged) if return_state else None
        if parts > 1 and state is not None:
            state = last_shards(state)
        return y.astype(x.dtype), state

    def _packed(
        self,
        u: Float[Array, "B D L"],
        h_init: Complex[Array, "B D N"] | None,
        return_state: bool,
        positions: Int32[Array, "B L"],
        parts: int,
    ) -> tuple[Float[Array, "B D L"], Complex[Array, "B D N"] | None]:
        """Run `_filtered` on each document separately; `u` is at least float32, 0 where masked."""
        L, dtype, S = u.shape[-1], u.dtype, packed_ema.BLOCK
        p, gamma = self.gains(dtype)

        def after(h_init: Array | None) -> Array:
            last = jnp.where(packed_ema.last_document(positions)[:, None], u, 0.0)
            if h_init is not None:
                h_init = jnp.where((positions[:, -1] >= L)[:, None, None], h_init, 0.0)
            return self._final_state(last, h_init, p, self.power_tables(L, dtype))

        if parts > 1:
            powers = jax.lax.complex(*self._powers(range(0, parts * L, L), dtype))
            h_init = incoming_state(after(None), powers, h_init, shards_back(positions))
        coefficients = packed_ema.Coefficients(
            powers=self._powers(range(S + 1), dtype),
            power=self._power(S, dtype),
            lost=self._lost(dtype, S),
            p=p,
            gamma=gamma,
            omega=self.omega.astype(dtype),
        )
        y = packed_ema.filtered(u, positions, coefficients, h_init)
        if not return_state:
            return y, None
        return y, last_shards(after(h_init)) if parts > 1 else after(h_init)

    def step(
        self, u: Float[Array, "B D"], h: Complex[Array, "B D N"]
    ) -> tuple[Float[Array, "B D"], Complex[Array, "B D N"]]:
        """Advance the recurrence by one token, as in decoding; return y (B, D) and the new state.

        The input u (B, D) and the state h (B, D, N) are float32 and complex64, or wider.

        Raises:
            ValueError: a shape or a dtype does not fit, or is float16.
        """
        check_inputs("ComplexEMA", u=(u, ("B", self.embed_dim)))
        self._check(u.shape[0], h)
        p, gamma = self.gains(u.dtype)
        drive = p * u[..., None]
        # An error of half an ulp in q is a constant phase error per token, which a long memory
        # accumulates. So the rounding error of q is applied as well.
        lost = self._lost(u.dtype) * h + jax.lax.complex(drive, jnp.zeros_like(drive))
        h = self.q(u.dtype) * h + lost
        y = jnp.sum(jnp.real(gamma * h), axis=-1) + self.omega.astype(u.dtype) * u
        return y, h

    def _check(self, rows: int, h: Array | None) -> None:
        check_parameters(self)
        shape = (rows, self.embed_dim, self.ndim)
        check_inputs("ComplexEMA", jnp.complexfloating, h=(h, shape))

    def gains(self, dtype: DTypeLike) -> tuple[Float[Array, "D N"], Complex[Array, "D N"]]:
        """Return the input gain p (D, N), real, and the output gain gamma (D, N), complex.

        gamma includes the factor 1/sqrt(N).
        """
        p = jax.nn.sigmoid(self.alpha[..., 0].astype(dtype))
        real, imag = self.gamma_real.astype(dtype), self.gamma_imag.astype(dtype)
        return p, jax.lax.complex(real, imag) * self.ndim**-0.5

    def q(self, dtype: DTypeLike) -> Complex[Array, "D N"]:
        """Return the poles q (D, N), computed in float64 and rounded once."""
        return self._power(1, dtype)

    def _lost(self, dtype: DTypeLike, exponent: int = 1) -> Complex[Array, "D N"]:
        """Return q^exponent (D, N) minus its value in `dtype`; gradients treat it as constant."""
        alpha, delta, theta = map(jax.lax.stop_gradient, (self.alpha, self.delta, self.theta))
        with jax.enable_x64(True):
            parts = _powers64(alpha[..., 0], delta[..., 0], theta[..., 0], [exponent])
            lost = ((x[..., 0] - _rounded(x[..., 0], dtype)).astype(dtype) for x in parts)
            return jax.lax.complex(*lost)

    def power_tables(self, length: int, dtype: DTypeLike) -> PowerTables:
        """Return the `PowerTables` of q^0 .. q^(length-1), computed in float64 and rounded once."""
        S = math.isqrt(length - 1) + 1
        A = -(-length // S)
        coarse = self._powers(range(0, A * S, S), dtype)
        fine = self._powers(range(S), dtype)
        return PowerTables(
            coarse=jnp.swapaxes(jnp.concatenate(coarse, axis=1), 1, 2),
            fine=jnp.concatenate(fine, axis=1),
        )

    def _powers(
        self, exponents: range, dtype: DTypeLike
    ) -> tuple[Float[Array, "D N S"], Float[Array, "D N S"]]:
        logits = (self.alpha[..., 0], self.delta[..., 0], self.theta[..., 0])
        powers: Any = pole_powers(*logits, exponents, jnp.dtype(dtype))
        return powers

    def _power(self, exponent: int, dtype: DTypeLike) -> Complex[Array, "D N"]:
        real, imag = self._powers(range(exponent, exponent + 1), dtype)
        return jax.lax.complex(real[..., 0], imag[..., 0])

    def _skip(self, u: Float[Array, "B D L"]) -> Float[Array, "B D L"]:
        """Return omega u, the skip path around the filter; for speed, computed as (B L, D)."""
        B, D, L = u.shape
        rows = jnp.swapaxes(u, 1, 2).reshape(B * L, D) * self.omega.astype(u.dtype)
        return jnp.swapaxes(rows.reshape(B, L, D), 1, 2)

    def _final_state(
        self,
        u: Float[Array, "B D L"],
        h_init: Complex[Array, "B D N"] | None,
        p: Float[Array, "D N"],
        tables: PowerTables,
        lengths: Int32[Array, " B"] | None = None,
    ) -> Complex[Array, "B D N"]:
        """Return h_L = q^L h_init + p sum_r q^r u_{L-1-r}, from the power tables, without a scan.

        With `lengths` (B,), L is the length of each row, beyond which `u` is 0.
        """
        B, D, L = u.shape
        N, A, S = self.ndim, tables.coarse.shape[1], tables.fine.shape[-1]
        if lengths is None:
            late_first = jnp.pad(u[..., ::-1], ((0, 0), (0, 0), (0, A * S - L)))
        else:
            # Count backwards from each row's own last token, so that no power has to grow.
            backwards = jnp.pad(u[..., ::-1], ((0, 0), (0, 0), (0, A * S)))
            late_first = jax.vmap(
                lambda row, n: jax.lax.dynamic_slice_in_dim(row, L - n, A * S, axis=1)
            )(backwards, lengths)
        late_first = late_first.reshape(B, D, A, S)
        inner = _einsum("bdas,dns->bdan", late_first, tables.fine)
        inner = jax.lax.complex(inner[..., :N], inner[..., N:])
        coarse = jax.lax.complex(tables.coarse[..., :N], tables.coarse[..., N:])
        state = _scaled(p, jnp.sum(coarse * inner, axis=2))
        if h_init is not None:
            decay = self._power(L, u.dtype) if lengths is None else self._power_of(lengths, tables)
            state = state + decay * h_init
        return state

    def _power_of(
        self, exponents: Int32[Array, " B"], tables: PowerTables
    ) -> Complex[Array, "B D N"]:
        """Return q^n (B, D, N) for each row's exponent n, from 0 to the length of the tables."""
        N, S = self.ndim, tables.fine.shape[-1]
        # The tables end at q^(length-1), so multiply by q once more; an empty row keeps its state.
        before = jnp.maximum(exponents - 1, 0)
        coarse = jnp.moveaxis(tables.coarse, 1, 0)[before // S]
        fine = jnp.moveaxis(tables.fine, 2, 0)[before % S]
        power = jax.lax.complex(coarse[..., :N], coarse[..., N:])
        power = power * jax.lax.complex(fine[..., :N], fine[..., N:]) * self.q(fine.dtype)
        return jnp.where((exponents > 0)[:, None, None], power, 1.0)

    def _empty_state(
        self, batch_size: int, h_init: Complex[Array, "B D N"] | None, dtype: DTypeLike
    ) -> Complex[Array, "B D N"]:
        if h_init is not None:
            return h_init
        shape = (batch_size, self.embed_dim, self.ndim)
        return jax.lax.complex(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def _at_rest(u: Float[Array, "B D L"]) -> Bool[Array, "B D L"]:
    """Return for each value whether it and all earlier ones of its row and channel are 0."""
    started = u != 0
    first = jnp.where(jnp.any(started, axis=-1), jnp.argmax(started, axis=-1), u.shape[-1])
    return jnp.arange(u.shape[-1]) < first[..., None]


def _scaled(factor: Float[Array, "D N"], z: Complex[Array, "*B D N"]) -> Complex[Array, "*B D N"]:
    """Return a real factor times a complex number, without implicit promotion."""
    return jax.lax.complex(factor * jnp.real(z), factor * jnp.imag(z))


@partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def pole_powers(
    alpha: Float[Array, "D N"],
    delta: Float[Array, "D N"],
    theta: Float[Array, "D 1"],
    exponents: range,
    dtype: np.dtype,
) -> tuple[Float[Array, "D N S"], Float[Array, "D N S"]]:
    """Return real and imaginary part of q^j, each (D, N, number of exponents), in `dtype`.

    `alpha`, `delta` and `theta` are the parameters of `ComplexEMA`, before the sigmoid. Both parts
    are computed in float64 and rounded once. No float64 value leaves this function, so it can
    also be traced where 64-bit types are off. The derivative by log q is j q^j. It is computed from
    the rounded powers, without further exponentials: later sums are in `dtype` anyway.
    """
    n, start, step = len(exponents), exponents.start, exponents.step
    S = math.isqrt(n - 1) + 1
    A = -(-n // S)
    with jax.enable_x64(True):
        if A == 1:
            real, imag = _powers64(alpha, delta, theta, list(exponents))
            return real.astype(dtype), imag.astype(dtype)
        few = [start + step * S * a for a in range(A)] + [step * b for b in range(S)]
        real, imag = _powers64(alpha, delta, theta, few)
        u, v = real[..., A:], imag[..., A:]

        def row(left: tuple[Array, Array]) -> tuple[Array, Array]:
            x, y = (z[..., None] for z in left)
            return (u * x - v * y).astype(dtype), (u * y + v * x).astype(dtype)

        # A loop, so that XLA does not fuse the elementary functions into the product, which would
        # evaluate them for every power.
        left = (jnp.moveaxis(z[..., :A], -1, 0) for z in (real, imag))
        rows = jax.lax.map(row, tuple(left))
        real, imag = (jnp.moveaxis(z, 0, -2).reshape(*alpha.shape, A * S) for z in rows)
        return real[..., :n], imag[..., :n]


@pole_powers.defjvp
def _pole_powers_jvp(exponents, dtype, logits, dots):
    real, imag = pole_powers(*logits, exponents, dtype)
    j = jnp.asarray(np.array(exponents, dtype))
    dots = _log_pole_dots(*(x.astype(dtype) for x in (*logits, *dots)))
    log_radius, phase = (j * dot[..., None] for dot in dots)
    powers_dot = real * log_radius - imag * phase, imag * log_radius + real * phase
    return (real, imag), powers_dot


def _log_pole_dots(
    alpha: Float[Array, "D N"],
    delta: Float[Array, "D N"],
    theta: Float[Array, "D 1"],
    alpha_dot: Float[Array, "D N"],
    delta_dot: Float[Array, "D N"],
    theta_dot: Float[Array, "D 1"],
) -> tuple[Float[Array, "D N"], Float[Array, "D N"]]:
    """Return the tangents of log|q| and of the phase in radians, (D, N), without cancellation."""
    N = alpha.shape[-1]
    (a, b), (d, e), (t, u) = (
        (jax.nn.sigmoid(x), jax.nn.sigmoid(-x)) for x in (alpha, delta, theta)
    )
    # 1 - a d without cancellation, and never 0: gradients stay finite where |q| has become 0.
    rest = jnp.maximum(b + a * e, jnp.finfo(a.dtype).tiny)
    log_radius = -(a * d * b / rest) * alpha_dot - (a * d * e / rest) * delta_dot
    orders = jnp.asarray(2.0 * math.pi / N * np.arange(1, N + 1), theta.dtype)
    return log_radius, orders * (t * u * theta_dot)


def _powers64(
    alpha: Float[Array, "D N"],
    delta: Float[Array, "D N"],
    theta: Float[Array, "D 1"],
    exponents: list[int],
) -> tuple[Float[Array, "D N S"], Float[Array, "D N S"]]:
    """Return real and imaginary part of q^j for S exponents j, each (D, N, S), in float64.

    Needs 64-bit types on.
    """
    decay, turns = _poles(alpha, delta, theta)
    j = jnp.asarray(np.array(exponents, np.float64))
    # Whole turns are subtracted before multiplying by 2 pi, so the phase is exact at large j.
    phase = turns[..., None] * j
    cos, sin = cos_sin(phase - jnp.round(phase))
    if exponents == [1]:
        # Avoids a logarithm per pole, half of the time that a decoded token spends on its poles.
        radius = 1.0 - decay[..., None]
    else:
        radius = jnp.exp(jnp.log1p(-decay)[..., None] * j)
    return radius * cos, radius * sin


def _poles(
    alpha: Float[Array, "D N"], delta: Float[Array, "D N"], theta: Float[Array, "D 1"]
) -> tuple[Float[Array, "D N"], Float[Array, "D N"]]:
    """Return 1 - |q| and the phase of q in turns (D, N), in float64; needs 64-bit types on."""
    N = alpha.shape[-1]
    product = jax.nn.sigmoid(alpha.astype(jnp.float64)) * jax.nn.sigmoid(delta.astype(jnp.float64))
    # At saturation |q| is 0 and its logarithm infinite; a decay just below 1 keeps it finite.
    decay = jnp.minimum(product, 1.0 - jnp.finfo(jnp.float64).eps)
    orders = jnp.arange(1, N + 1, dtype=jnp.float64) / N
    return decay, jax.nn.sigmoid(theta.astype(jnp.float64)) * orders[None, :]


def _rounded(x: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """Round float64 `x` to the precision of `dtype`, as float64.

    A conversion to `dtype` and back would not do: XLA may remove it.
    """
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant)


def response(
    weights: Complex[Array, "*B D N"], tables: PowerTables, length: int
) -> Float[Array, "*B D L"]:
    """Return `Re sum_n w_n q_n^j` for j < length and weights w, as one batched matrix product."""
    N = weights.shape[-1]
    real, imag = tables.coarse[..., :N], tables.coarse[..., N:]
    wr, wi = jnp.real(weights)[..., None, :], jnp.imag(weights)[..., None, :]
    left = jnp.concatenate([wr * real - wi * imag, -(wr * imag + wi * real)], axis=-1)
    table = _einsum("...dan,dns->...das", left, tables.fine)
    A, S = table.shape[-2:]
    return table.reshape(*table.shape[:-2], A * S)[..., :length]


def causal_convolution(
    x: Float[Array, "B D L"], kernel: Float[Array, "D L"]
) -> Float[Array, "B D L"]:
    """Return `y_t = sum_{j<=t} kernel_j x_{t-j}`; zero padding prevents wrap-around."""
    L = x.shape[-1]
    n = next_fast_len(2 * L - 1, real=True)
    spectrum = jnp.fft.rfft(x, n=n) * jnp.fft.rfft(kernel, n=n)
    return jnp.fft.irfft(spectrum, n=n)[..., :L]


def _einsum(spec: str, *operands: Float[Array, "..."]) -> Float[Array, "..."]:
    # Powers of q determine the model's memory: never let a GPU round them to TF32.
    return jnp.einsum(spec, *operands, precision=jax.lax.Precision.HIGHEST)
