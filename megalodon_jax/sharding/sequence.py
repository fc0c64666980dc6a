"""Communication between shards of a sequence: states and single tokens, never activations.

Except for `following`, call these functions on shards, inside `axes.on_shards`. `incoming_state`
and `incoming_moments` gather a few numbers per row and channel from all shards, in collectives
whose size does not depend on the length. Every device then combines the numbers of the shards
before it, so no shard waits for its predecessor.

Source: docs/sharding.md "What crosses".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Complex, Float, Int, Int32, Shaped

from megalodon_jax.config import widened
from megalodon_jax.sharding.axes import SEQUENCE, AnyMesh, on_shards, shards, spec_of
from megalodon_jax.sharding.placement import check_length


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations of the group means of consecutive tokens, per row.

    The mean is relative to `origin`, which is close to the values: a large common offset would cost
    float32 the digits of their differences.
    """

    count: Int32[Array, " B"]
    origin: Float[Array, "B G"]
    mean: Float[Array, "B G"]
    m2: Float[Array, "B G"]


def incoming_state(
    end: Complex[Array, "B D N"],
    powers: Complex[Array, "D N parts"],
    start: Complex[Array, "B D N"] | None,
    reach: Int32[Array, " B"] | None = None,
) -> Complex[Array, "B D N"]:
    """Return the state of a complex EMA before the first token of this shard.

    For shard k this is `h_k = q^(kL) start + sum_{j<k} q^(L(k-1-j)) end_j`, linear in the ends of
    earlier shards, so no shard waits for another.

    Args:
        end: the state after this shard's L tokens, starting from zero.
        powers: q^(jL) for j below the number of shards, each rounded once from float64: a product
            of rounded powers would change the phase of a long memory.
        start: the state before the first shard; None is zero.
        reach: for packed documents, into how many earlier shards the document of this shard's first
            token extends (`shards_back`); `end` is then the state of a shard's last document.
    """
    parts, here = powers.shape[-1], jax.lax.axis_index(SEQUENCE)
    # Real and imaginary part side by side, since NCCL has no complex numbers.
    pair = jnp.stack([jnp.real(end), jnp.imag(end)])
    pairs = jax.lax.all_gather(pair, SEQUENCE)
    ends = jax.lax.complex(pairs[:, 0], pairs[:, 1])
    distance = here - 1 - jnp.arange(parts, dtype=jnp.int32)
    weights = jnp.moveaxis(powers[..., jnp.maximum(distance, 0)], -1, 0)
    weights = jnp.where((distance >= 0)[:, None, None], weights, 0.0)
    if reach is None:
        before = jnp.sum(weights[:, None] * ends, axis=0)
        return before if start is None else before + powers[..., here] * start
    same = (distance[:, None] < reach)[..., None, None]
    before = jnp.sum(jnp.where(same, weights[:, None] * ends, 0.0), axis=0)
    if start is None:
        return before
    return before + jnp.where((reach > here)[:, None, None], powers[..., here] * start, 0.0)


def shards_back(positions: Int32[Array, "B L"]) -> Int32[Array, " B"]:
    """Return how many earlier shards of equal length the first token's document extends into.

    If that document started before the row, the result exceeds the number of earlier shards.
    """
    return -(-positions[:, 0] // positions.shape[1])


def incoming_moments(
    own: Moments, start: Moments, reach: Int32[Array, " B"] | None = None
) -> Moments:
    """Return the moments of all tokens before this shard: `start`, then all earlier shards.

    With `reach` (see `incoming_state`), only the document of this shard's first token is counted.
    Then `own` has the moments of the shard's last document, and `start` those of the first token's
    document before the row.

    This is the parallel formula of Chan, Golub and LeVeque (1983) for all shards at once: the mean
    is the average of the means, weighted by counts; the squares of their deviations from it are
    added to the sums of squares.
    """
    parts, here = jax.lax.axis_size(SEQUENCE), jax.lax.axis_index(SEQUENCE)
    wide = own.mean.dtype
    counts = jax.lax.all_gather(own.count, SEQUENCE)
    gathered = jax.lax.all_gather(jnp.stack([own.origin, own.mean, own.m2]), SEQUENCE)
    shard = jnp.arange(parts, dtype=jnp.int32)[:, None]
    before = shard < here
    if reach is not None:
        before = before & (here - 1 - shard < reach)
    counts = jnp.concatenate([start.count[None], jnp.where(before, counts, 0)])
    origins, means, m2s = (
        jnp.concatenate([first[None], rest])
        for first, rest in zip(start[1:], jnp.moveaxis(gathered, 1, 0), strict=True)
    )
    # The origin of the first part that has a token; if none has, the origin that this shard would
    # use.
    seen = counts > 0
    first = jnp.argmax(seen, axis=0)
    origin = jnp.take_along_axis(origins, first[None, :, None], axis=0)[0]
    origin = jnp.where(jnp.any(seen, axis=0)[:, None], origin, own.origin)
    origin = jax.lax.stop_gradient(origin)
    weights = counts.astype(wide)[..., None]
    count = jnp.sum(counts, axis=0, dtype=jnp.int32)
    total = jnp.maximum(count, 1).astype(wide)[:, None]
    moved = jnp.where(weights > 0, jax.lax.stop_gradient(origins) - origin + means, 0.0)
    mean = jnp.sum(weights * moved, axis=0) / total
    m2 = jnp.where(
        jnp.concatenate([jnp.ones_like(before[:1]), before])[..., None],
        m2s + weights * jnp.square(moved - mean),
        0.0,
    )
    # If no token came before, the mean is the initial one.
    fresh = start.origin - origin + start.mean
    mean = jnp.where((count > 0)[:, None], mean, fresh)
    return Moments(count, origin, mean, jnp.sum(m2, axis=0))


def last_shards(tree: Any) -> Any:
    """Return the last shard's value of every leaf, on all shards."""
    last = jax.lax.axis_index(SEQUENCE) == jax.lax.axis_size(SEQUENCE) - 1

    def sent(x: Array) -> Array:
        return jax.lax.psum(jnp.where(last, x, jnp.zeros_like(x)), SEQUENCE)

    return jax.tree.map(sent, tree)


def following(
    x: Shaped[Array, "... B L"], fill: int | Int[Array, ""], mesh: AnyMesh | None
) -> Shaped[Array, "... B L"]:
    """Return `x` shifted left by one token, with `fill` at the end.

    On shards of a sequence, the first token of each shard is sent to its left neighbour; nothing
    else is communicated. Call this on whole arrays, outside of `on_shards`.

    Raises:
        ValueError: the length is not divisible by the number of shards.
    """
    end = jnp.full_like(x[..., :1], fill)
    if shards(mesh, "sequence") == 1:
        return jnp.concatenate([x[..., 1:], end], axis=-1)
    assert mesh is not None
    check_length(mesh, x.shape[-1], 1)

    def moved(x: Array, end: Array) -> Array:
        parts = jax.lax.axis_size(SEQUENCE)
        pairs = [(j, j - 1) for j in range(1, parts)]
        next_first = jax.lax.ppermute(x[..., :1], SEQUENCE, pairs)
        last = jax.lax.axis_index(SEQUENCE) == parts - 1
        return jnp.concatenate([x[..., 1:], jnp.where(last, end, next_first)], axis=-1)

    ahead = (None,) * (x.ndim - 2)
    spec = spec_of(mesh, x.shape, (*ahead, "batch", "sequence"))
    ends = spec_of(mesh, end.shape, (*ahead, "batch", None))
    return on_shards(moved, mesh, (x, end), (spec, ends), spec)


def stretch(x: Float[Array, "B L G"], valid: Any, origin: Float[Array, "B G"]) -> Moments:
    """Return the moments of one shard's group means `x`, relative to `origin`, where `valid`.

    This takes two passes over the values: a difference of sums of squares would cancel.
    """
    wide = widened(x.dtype)
    count = jnp.sum(valid, axis=1, dtype=jnp.int32)
    weights = valid[..., None]
    total = jnp.maximum(count, 1).astype(wide)[:, None]
    mean = jnp.sum(jnp.where(weights, x, 0.0), axis=1) / total
    m2 = jnp.sum(jnp.where(weights, jnp.square(x - mean[:, None]), 0.0), axis=1)
    return Moments(count, origin, mean, m2)
