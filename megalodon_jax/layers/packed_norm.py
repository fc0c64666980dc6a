"""Running statistics of packed documents: counts, means and variances that restart at each
document.

The sum over a document is never computed as a difference of two sums over the row: if a document of
large values precedes one of small values, the difference would lose the digits of the small values.
Source: docs/model.md "Packed documents".
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from megalodon_jax.layers.packed_ema import last_document
from megalodon_jax.sharding.axes import SEQUENCE
from megalodon_jax.sharding.sequence import Moments, incoming_moments, shards_back, stretch
from megalodon_jax.types import NormState

VARIANCE_FLOOR = 1e-6
"""Lower bound of the running variances by which features are normalised."""


class PackedMoments(NamedTuple):
    """Running mean and variance (B, L, G) of each group at each token of packed documents.

    `mean` is relative to `origin`, which is constant within a document. The variance is at least
    `VARIANCE_FLOOR`. `final` is the state after the last token; its mean is absolute.
    """

    origin: Float[Array, "B L G"]
    mean: Float[Array, "B L G"]
    var: Float[Array, "B L G"]
    final: NormState


def packed_moments(
    groups: Float[Array, "B L G g"],
    state: NormState,
    mask: Bool[Array, "B L"] | None,
    positions: Int32[Array, "B L"],
    parts: int = 1,
) -> PackedMoments:
    """Return the statistics by which each token is normalised, and the final state.

    Args:
        groups: features (B, L, G, g), g in each of G groups.
        state: state from which the first document continues, if it started before this call.
        mask: True where a token is valid.
        positions: index of each token within its document.
        parts: number of shards of the sequence, of which this is one.
    """
    B, L = positions.shape
    valid = jnp.ones((B, L), bool) if mask is None else mask
    dtype = groups.dtype
    averages = groups.mean(-1)
    first = _first_valid(valid, positions)
    own = jnp.take_along_axis(jax.lax.stop_gradient(averages), first[..., None], axis=1)
    if parts == 1:
        mean0, var0, count0 = state.mean.astype(dtype), state.var.astype(dtype), state.count
        held = jax.lax.stop_gradient(mean0)
        held = jnp.where(count0[:, None] > 0, held, own[:, 0])
        mean0 = mean0 - held
    else:
        before = _before_shard(averages, own, state, valid, positions)
        held, mean0, count0 = before.origin, before.mean, before.count
        var0 = before.m2 / jnp.maximum(count0, 1).astype(dtype)[:, None]
    # Only the first document of a row can have started before it.
    carried = positions > jnp.arange(L, dtype=jnp.int32)
    goes_on = carried[..., None]
    origin = jnp.where(goes_on, held[:, None], own)
    mean0 = jnp.where(goes_on, mean0[:, None], -origin)
    var0 = jnp.where(goes_on, var0[:, None], 1.0)
    count0 = jnp.where(carried, count0[:, None], 0)

    # Counts are integers: their differences are exact.
    counted = jnp.cumsum(valid, axis=1, dtype=jnp.int32)
    earlier = jnp.take_along_axis(counted - valid.astype(jnp.int32), _begin(positions), axis=1)
    count = count0 + counted - earlier
    mu = (groups - origin[..., None]).mean(-1)
    mu = jnp.where(valid[..., None], mu, 0.0)
    n, n0 = (jnp.maximum(c, 1).astype(dtype)[..., None] for c in (count, count0))
    seen = (count > 0)[..., None]
    total = mean0 * count0.astype(dtype)[..., None] + running_sum(mu, positions)
    mean = jnp.where(seen, total / n, mean0)
    previous = jnp.concatenate([mean0[:, :1], mean[:, :-1]], axis=1)
    previous = jnp.where((positions > 0)[..., None], previous, mean0)
    moved = jnp.where(valid[..., None], (mu - previous) * (mu - mean), 0.0)
    var = (var0 * n0 + running_sum(moved, positions)) / n
    if L == 1:
        # As in `timestep_norm`: a stream of single tokens updates its variance incrementally.
        var = var0 + (moved - var0 * (n - n0)) / n
    var = jnp.maximum(jnp.where(seen, var, var0), VARIANCE_FLOOR)
    final = NormState(count[:, -1], mean[:, -1] + origin[:, -1], var[:, -1])
    return PackedMoments(origin, mean, var, final)


def running_sum(x: Float[Array, "B L G"], positions: Int32[Array, "B L"]) -> Float[Array, "B L G"]:
    """Return the sums over each document up to and including each token.

    A segmented scan (Blelloch, 1990, "Prefix sums and their applications", section 1.5): other
    documents are left out rather than multiplied by 0, which would turn an infinity into NaN. The
    error grows with the logarithm of the length.
    """

    def added(earlier: tuple[Array, Array], later: tuple[Array, Array]) -> tuple[Array, Array]:
        begins, total = later
        carried = jnp.where(begins[..., None], 0.0, earlier[1])
        return earlier[0] | begins, total + carried

    return jax.lax.associative_scan(added, (positions == 0, x), axis=1)[1]


def _begin(positions: Int32[Array, "B L"]) -> Int32[Array, "B L"]:
    """Return the index where each token's document starts; 0 if it starts before the row."""
    return jnp.maximum(jnp.arange(positions.shape[1], dtype=jnp.int32) - positions, 0)


def _first_valid(valid: Bool[Array, "B L"], positions: Int32[Array, "B L"]) -> Int32[Array, "B L"]:
    """Return the index of the first valid token of each token's document.

    If none is valid, it is the index of the document's first token.
    """
    L = positions.shape[1]
    index = jnp.arange(L, dtype=jnp.int32)
    begin = _begin(positions)
    following = jax.lax.cummin(jnp.where(valid, index, L - 1), axis=1, reverse=True)
    first = jnp.take_along_axis(following, begin, axis=1)
    same = jnp.take_along_axis(begin, first, axis=1) == begin
    return jnp.where(same, first, begin)


def _before_shard(
    averages: Float[Array, "B L G"],
    own: Float[Array, "B L G"],
    state: NormState,
    valid: Bool[Array, "B L"],
    positions: Int32[Array, "B L"],
) -> Moments:
    """Return the moments of the first token's document over its tokens before this shard.

    `averages` are the group means of this shard's tokens; `own` has, at each token, the group means
    of its document's first valid token in this shard.
    """
    dtype = averages.dtype
    reach = shards_back(positions)
    from_state = reach > jax.lax.axis_index(SEQUENCE)
    count = jnp.where(from_state, state.count, 0)
    goes_on = from_state[:, None]
    mean = jnp.where(goes_on, state.mean.astype(dtype), 0.0)
    var = jnp.where(goes_on, state.var.astype(dtype), 1.0)
    held = jax.lax.stop_gradient(mean)
    n = jnp.maximum(count, 1).astype(dtype)[:, None]
    start = Moments(count, held, mean - held, var * n)
    origin = own[:, -1]
    last = valid & last_document(positions)
    ends = stretch(averages - origin[:, None], last, origin)
    # If nothing comes before, the origin is that of this shard's first document.
    before = incoming_moments(ends, start, reach)
    nothing = (before.count == 0)[:, None]
    origin = jnp.where(nothing, own[:, 0], before.origin)
    return before._replace(origin=origin, mean=before.mean + before.origin - origin)
