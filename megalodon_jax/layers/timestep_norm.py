"""TimestepNorm: group normalisation with running statistics along the sequence."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Int32

from megalodon_jax.config import checked_dtype, widened
from megalodon_jax.inputs import Mask, as_mask
from megalodon_jax.layers.entry import check_inputs, check_parameters, check_positive, check_sizes
from megalodon_jax.layers.packed_norm import VARIANCE_FLOOR, packed_moments
from megalodon_jax.sharding.axes import (
    AnyMesh,
    as_varied,
    check_divisible,
    mesh_of,
    on_shards,
    shards,
    spec_of,
)
from megalodon_jax.sharding.sequence import Moments, incoming_moments, last_shards, stretch
from megalodon_jax.types import NormState


class TimestepNorm(eqx.Module):
    """Normalise each token by the running mean and variance of its groups.

    The statistics are those of the per-token group means `mu_1 .. mu_t`, up to and including the
    token itself, without masked tokens. The variance is the sum of squared deviations, plus 1 for
    the initial variance, divided by the number of tokens, and at least 1e-6. The output at token t
    is `(x - mean_t) / sqrt(var_t + eps) * (weight + 1) + bias`, in the dtype of the input. Source:
    docs/model.md "TimestepNorm".
    """

    weight: Float[Array, " D"] | None
    bias: Float[Array, " D"] | None
    num_features: int = eqx.field(static=True)
    num_groups: int = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    def __init__(
        self,
        num_features: int,
        num_groups: int,
        eps: float = 1e-5,
        affine: bool = True,
        dtype: DTypeLike = jnp.float32,
    ):
        check_sizes("TimestepNorm", num_features=num_features, num_groups=num_groups)
        check_positive("TimestepNorm", eps=eps)
        dtype = checked_dtype("dtype", dtype, "TimestepNorm")
        if num_features % num_groups:
            raise ValueError(
                f"TimestepNorm: num_features={num_features} must be a multiple of "
                f"num_groups={num_groups}."
            )
        self.weight = jnp.zeros(num_features, dtype) if affine else None
        self.bias = jnp.zeros(num_features, dtype) if affine else None
        self.num_features = num_features
        self.num_groups = num_groups
        self.eps = eps

    def __call__(
        self,
        x: Float[Array, "B L D"],
        state: NormState | None = None,
        mask: Mask | None = None,
        positions: Int32[Array, "B L"] | None = None,
    ) -> tuple[Float[Array, "B L D"], NormState]:
        """Normalise (B, L, D), continuing from `state`; return the output and the new state.

        With `positions`, the index of each token within its document, every document has its own
        statistics. The first continues from `state` if its first index in `x` is above 0, and the
        returned state is that of the last document.

        Statistics are kept relative to an origin per group (the carried mean, or the first valid
        token of a fresh stream), because a large common offset would cost float32 its digits. The
        result does not depend on the origin, so no gradient flows through it.

        Raises:
            ValueError: a shape or a dtype does not fit, or is float16.
        """
        self._check(x, state)
        B, L, _ = x.shape
        check_inputs("TimestepNorm", jnp.integer, positions=(positions, (B, L)))
        mask = as_mask("mask", mask, (B, L), "the tokens")
        dtype = widened(x.dtype)
        if state is None:
            state = NormState.fresh(B, self.num_groups, dtype)
        if L == 0:
            return x, state
        mesh = mesh_of(x)
        if mesh is None:
            return self._normalised(x, state, mask, positions)
        return self._on_mesh(mesh, x, state, mask, positions)

    def _on_mesh(
        self,
        mesh: AnyMesh,
        x: Float[Array, "B L D"],
        state: NormState,
        mask: Bool[Array, "B L"] | None,
        positions: Int32[Array, "B L"] | None,
    ) -> tuple[Float[Array, "B L D"], NormState]:
        """Normalise on a mesh: each device normalises its rows, tokens and groups.

        The statistics of earlier tokens come from the devices that hold these tokens.
        """
        check_divisible(mesh, "tensor", norm_num_groups=self.num_groups)
        B, L, _ = x.shape
        parts = shards(mesh, "sequence")
        arrays, static = eqx.partition(self, eqx.is_array)

        channels = spec_of(mesh, (self.num_features,), ("tensor",))
        whole = spec_of(mesh, x.shape, ("batch", "sequence", "tensor"))
        states = jax.tree.map(
            lambda a: spec_of(mesh, a.shape, ("batch", "tensor")[: a.ndim]), state
        )
        rows = spec_of(mesh, (B, L), ("batch", "sequence"))
        tokens = tuple(None if a is None else rows for a in (mask, positions))
        params = jax.tree.map(lambda _: channels, arrays)

        def local(arrays, x, state, mask, positions):
            norm = eqx.combine(as_varied(arrays, params, whole), static)
            return norm._normalised(x, state, mask, positions, parts)

        ins = (params, whole, states, *tokens)
        return on_shards(local, mesh, (arrays, x, state, mask, positions), ins, (whole, states))

    def _normalised(
        self,
        x: Float[Array, "B L D"],
        state: NormState,
        mask: Bool[Array, "B L"] | None,
        positions: Int32[Array, "B L"] | None = None,
        parts: int = 1,
    ) -> tuple[Float[Array, "B L D"], NormState]:
        """Run `__call__` on checked inputs, or the part of it that one device of a mesh computes.

        With `parts` > 1 shards of the sequence, `x`, `mask` and `positions` are those of this
        device's shard; `state` and the returned state are those of the whole rows.
        """
        B, L, D = x.shape
        dtype = widened(x.dtype)
        width = self.num_features // self.num_groups
        G = D // width
        groups = x.astype(dtype).reshape(B, L, G, width)
        if positions is not None:
            moments = packed_moments(groups, state, mask, positions, parts)
            y = self._scaled(groups - moments.origin[..., None], moments.mean, moments.var)
            final = last_shards(moments.final) if parts > 1 else moments.final
            return y.reshape(B, L, D).astype(x.dtype), final
        mean0, var0, count0 = state.mean.astype(dtype), state.var.astype(dtype), state.count
        origin = jax.lax.stop_gradient(_origin(groups, state, mask))
        if parts == 1:
            groups = groups - origin[:, None, :, None]
            mu, mean0 = groups.mean(-1), mean0 - origin
        else:
            before = _before(groups, state, mask)
            origin, mean0, count0 = before.origin, before.mean, before.count
            var0 = before.m2 / jnp.maximum(count0, 1).astype(dtype)[:, None]
            groups = groups - origin[:, None, :, None]
            mu = groups.mean(-1)
        mean, var, count = _running(mu, mean0, var0, count0, mask)
        y = self._scaled(groups, mean, var)
        final = NormState(count=count, mean=mean[:, -1] + origin, var=var[:, -1])
        if parts > 1:
            final = last_shards(final)
        return y.reshape(B, L, D).astype(x.dtype), final

    def _scaled(
        self,
        groups: Float[Array, "B L G g"],
        mean: Float[Array, "B L G"],
        var: Float[Array, "B L G"],
    ) -> Float[Array, "BL D"]:
        """Return the output as a matrix (B L, D); `groups` and `mean` have the same origin."""
        B, L, G, width = groups.shape
        # As rows of a matrix, as in `norms`: XLA's CPU gradients of (1, L, ...) are slow.
        centred = (groups - mean[..., None]).reshape(B * L * G, width)
        y = centred * jax.lax.rsqrt(var + self.eps).reshape(B * L * G, 1)
        y = y.reshape(B * L, G * width)
        if self.weight is not None and self.bias is not None:
            y = y * (self.weight + 1.0).astype(y.dtype) + self.bias.astype(y.dtype)
        return y

    def _check(self, x: Array, state: NormState | None) -> None:
        owner, rows, groups = "TimestepNorm", x.shape[:1], self.num_groups
        check_parameters(self)
        check_inputs(owner, x=(x, ("B", "L", self.num_features)))
        if state is not None:
            moments = {"state.mean": state.mean, "state.var": state.var}
            check_inputs(owner, **{n: (m, (*rows, groups)) for n, m in moments.items()})
            check_inputs(owner, jnp.integer, **{"state.count": (state.count, rows)})


def _origin(
    groups: Float[Array, "B L G g"], state: NormState, mask: Bool[Array, "B L"] | None
) -> Float[Array, "B G"]:
    first = groups[:, 0] if mask is None else _take(groups, jnp.argmax(mask, axis=1))
    return jnp.where(state.count[:, None] > 0, state.mean.astype(groups.dtype), first.mean(-1))


def _before(
    groups: Float[Array, "B L G g"], state: NormState, mask: Bool[Array, "B L"] | None
) -> Moments:
    """Return the moments of all tokens before this shard of a sequence.

    The variance floor is not applied to them; it applies only where features are divided.
    """
    B, L = groups.shape[:2]
    dtype = groups.dtype
    mean0, var0 = state.mean.astype(dtype), state.var.astype(dtype)
    n0 = jnp.maximum(state.count, 1).astype(dtype)[:, None]
    held = jax.lax.stop_gradient(mean0)
    start = Moments(state.count, held, mean0 - held, var0 * n0)
    fresh = NormState(jnp.zeros_like(state.count), mean0, var0)
    origin = jax.lax.stop_gradient(_origin(groups, fresh, mask))
    valid = jnp.ones((B, L), bool) if mask is None else mask
    own = stretch((groups - origin[:, None, :, None]).mean(-1), valid, origin)
    return incoming_moments(own, start)


def _take(groups: Float[Array, "B L G g"], index: Int[Array, " B"]) -> Float[Array, "B G g"]:
    return jnp.take_along_axis(groups, index[:, None, None, None], axis=1)[:, 0]


def _running(
    mu: Float[Array, "B L G"],
    mean0: Float[Array, "B G"],
    var0: Float[Array, "B G"],
    count0: Int32[Array, " B"],
    mask: Bool[Array, "B L"] | None,
) -> tuple[Float[Array, "B L G"], Float[Array, "B L G"], Int32[Array, " B"]]:
    """Return running mean and floored variance (B, L, G) of group means `mu`, final count (B,)."""
    B, L, _ = mu.shape
    valid = jnp.ones((B, L), bool) if mask is None else mask
    count = count0[:, None] + jnp.cumsum(valid, axis=1, dtype=jnp.int32)
    mu = jnp.where(valid[..., None], mu, 0.0)
    n = jnp.maximum(count, 1).astype(mu.dtype)[..., None]
    n0 = count0.astype(mu.dtype)[:, None, None]
    seen = (count > 0)[..., None]

    total = mean0[:, None] * n0 + jnp.cumsum(mu, axis=1)
    mean = jnp.where(seen, total / n, mean0[:, None])
    previous = jnp.concatenate([mean0[:, None], mean[:, :-1]], axis=1)
    m2 = var0[:, None] * jnp.maximum(n0, 1.0)
    moved = jnp.where(valid[..., None], (mu - previous) * (mu - mean), 0.0)
    m2 = m2 + jnp.cumsum(moved, axis=1)
    var = m2 / n
    if L == 1:
        # A stream of single tokens rounds its variance at every call, so update it incrementally.
        var = var0[:, None] + (moved - var0[:, None] * (n - jnp.maximum(n0, 1.0))) / n
    var = jnp.where(seen, var, var0[:, None])
    return mean, jnp.maximum(var, VARIANCE_FLOOR), count[:, -1]
