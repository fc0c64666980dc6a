"""Chunked attention over packed documents, with chunks counted from each document's first token.

A query sees the keys from the start of its chunk up to itself: a window of at most C tokens that
ends at its own position, wherever in the row its document lies. Queries are processed in stripes of
consecutive queries. Of the C keys before a stripe, only as many are read as its queries see at
most. This number depends on the data, so it selects one of several compiled branches. Source:
docs/model.md "Packed documents".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key

from megalodon_jax.config import widened
from megalodon_jax.layers.written_transpose import linear
from megalodon_jax.sharding.axes import SEQUENCE

Mix = Callable[..., Float[Array, "N Q e"]]
"""Function that returns the attention output. Its arguments are q, k, v (heads first), the mask of
visible keys, and `keep`, the dropout mask or None."""
LEAST_STRIPE = 128
"""Queries per stripe, but at most a chunk. Products of fewer rows are slow."""
MOST_BRANCHES = 8
"""Upper limit on the number of steps in which the number of earlier keys that a stripe reads grows
from 0 to the chunk size. Each step is a compiled branch."""


class Draws(NamedTuple):
    """Random keys for dropout of attention weights, which give the same draws on any mesh.

    Attributes:
        keys: a PRNG key for each row and head.
        first: index, in the whole row, of the first query of the current shard or stripe (the
            consecutive queries that are processed at once).
        rate: fraction of the weights that is dropped.
    """

    keys: Key[Array, "B H"]
    first: Int32[Array, ""]
    rate: Float[Array, ""]


class Tokens(NamedTuple):
    """Non-differentiable inputs: each query's offset in its chunk, valid keys, and dropout.

    `valid` is False at keys that no query may see. It has C (the chunk size) more columns than
    `offsets`, for the C keys before the first query.
    """

    offsets: Int32[Array, "B L"]
    valid: Bool[Array, "B K"]
    draws: Draws | None


def packed_attention(
    mix: Mix,
    q: Float[Array, "N L d"],
    k: Float[Array, "N L d"],
    v: Float[Array, "N L e"],
    positions: Int32[Array, "B L"],
    mask: Bool[Array, "B L"] | None,
    chunk: int,
    draws: Draws | None = None,
    parts: int = 1,
    earlier: tuple[Array, Array, Array] | None = None,
) -> Float[Array, "N L e"]:
    """Return attention within chunks of documents, on one of `parts` shards of the sequence.

    Args:
        mix: function that computes the attention output (N, Q, e) from queries (N, Q, d), keys and
            values (N, K, ..), a mask of visible keys and a dropout mask or None.
        q, k, v: queries, keys and values; the first axis, of size N = B H, holds the heads of row
            0, of row 1, ...
        positions: index of each token within its document.
        mask: True where a key is valid.
        chunk: tokens per chunk.
        draws: enables dropout.
        parts: number of shards; with several, each has at least `chunk` tokens.
        earlier: k (N, chunk, d), v (N, chunk, e) and mask (B, chunk) of the tokens before the first
            query, if a cache is continued, which requires `parts` to be 1; else None.
    """
    L = q.shape[1]
    valid = jnp.ones(positions.shape, bool) if mask is None else mask
    if earlier is None:
        # No query sees beyond the start of the row, except on a shard.
        C = min(chunk, L)
        k, v, valid = (_with_earlier(a, C, parts) for a in (k, v, valid))
    else:
        C = chunk
        pairs = zip(earlier, (k, v, valid), strict=True)
        k, v, valid = (jnp.concatenate([a.astype(b.dtype), b], axis=1) for a, b in pairs)
    stripe = min(C, LEAST_STRIPE)
    short = -L % stripe
    q, k, v = (jnp.pad(a, ((0, 0), (0, short), (0, 0))) for a in (q, k, v))
    offsets, valid = (jnp.pad(a, ((0, 0), (0, short))) for a in (positions % chunk, valid))
    out: Array = _windows(mix, C, q, k, v, Tokens(offsets, valid, draws))
    return out[:, :L]


def _with_earlier(x: Array, count: int, parts: int) -> Array:
    """Prepend the previous shard's last `count` tokens (axis 1) to `x`; zeros on the first."""
    end = x[:, x.shape[1] - count :]
    if parts == 1:
        return jnp.concatenate([jnp.zeros_like(end), x], axis=1)
    pairs = [(j, j + 1) for j in range(parts - 1)]
    return jnp.concatenate([jax.lax.ppermute(end, SEQUENCE, pairs), x], axis=1)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _windows(mix: Mix, C: int, q: Array, k: Array, v: Array, tokens: Tokens) -> Array:
    """Attend from L queries to L + C keys, one stripe of consecutive queries at a time.

    L is a multiple of the length of a stripe.

    The derivatives are written by hand: JAX's transpose of a loop with branches would store the
    attention weights of every branch, whereas here each stripe is recomputed.
    """

    def step(_: None, begin: Array) -> tuple[None, Array]:
        seen, index, sizes = _stripe(C, q, k, v, tokens, begin)

        def branch(size: int) -> Callable[[], Array]:
            return lambda: _mixed(mix, size, seen)

        return None, jax.lax.switch(index, [branch(size) for size in sizes])

    _, out = jax.lax.scan(step, None, _begins(C, q))
    return _joined(out)


class _Seen(NamedTuple):
    """Queries that are processed at once (a stripe), and all keys that they might see."""

    q: Float[Array, "N Q d"]
    k: Float[Array, "N K d"]
    v: Float[Array, "N K e"]
    tokens: Tokens


def _stripe(
    C: int, q: Array, k: Array, v: Array, tokens: Tokens, begin: Array
) -> tuple[_Seen, Array, list[int]]:
    """Cut out the stripe of queries at `begin`, and choose how many keys before it to read.

    Returns the stripe, an index, and the possible numbers of earlier keys in ascending order. The
    index is that of the smallest number that covers every query's window.
    """
    stripe = min(C, LEAST_STRIPE)

    def cut(x: Array, size: int) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, begin, size, axis=1)

    offsets, window = cut(tokens.offsets, stripe), C + stripe
    draws = tokens.draws
    draws = None if draws is None else draws._replace(first=draws.first + begin)
    own = Tokens(offsets, cut(tokens.valid, window), draws)
    step = max(stripe, -(-C // MOST_BRANCHES))
    sizes = [min(size, C) for size in range(0, C + step, step)]
    further = jnp.max(offsets - jnp.arange(stripe, dtype=jnp.int32))
    index = -(-jnp.maximum(further, 0) // step)
    return _Seen(cut(q, stripe), cut(k, window), cut(v, window), own), index, sizes


def _mixed(mix: Mix, size: int, seen: _Seen) -> Array:
    """Attend from a stripe of queries to the keys of its own tokens and of the `size` before."""
    stripe, offsets = seen.q.shape[1], seen.tokens.offsets
    skipped = seen.k.shape[1] - stripe - size
    queries, keys = (jnp.arange(n, dtype=jnp.int32) for n in (stripe, size + stripe))
    distance = size + queries[:, None] - keys
    visible = (distance >= 0) & (distance <= offsets[..., None])
    visible = visible & seen.tokens.valid[:, None, skipped:]
    k, v = (a[:, skipped:] for a in (seen.k, seen.v))
    draws = seen.tokens.draws
    keep = None if draws is None else drawn(draws, queries, keys - size)
    return mix(seen.q, k, v, visible, keep=keep)


def drawn(
    draws: Draws, queries: Int32[Array, " Q"], keys: Int32[Array, " K"]
) -> Bool[Array, "B H Q K"]:
    """Return which attention weights (B, H, Q, K) dropout keeps (True), for Q queries and K keys.

    `queries` and `keys` are indices relative to `draws.first`. The generator is counter-based
    (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): the random number of a
    weight is a hash of its row, head, query and key, at the cost of one number of a sequential
    generator. The random number depends neither on the mesh nor on the stripes in which queries are
    processed.
    """
    of_queries = jax.vmap(jax.random.fold_in, (None, 0))
    # Both steps use the same nested vmap: a PRNG key per query from the head's key, then one per
    # weight from the query's key.
    for_each = jax.vmap(jax.vmap(of_queries, (0, None)), (0, None))
    weights = jax.vmap(for_each, (2, None), 2)
    words = weights(for_each(draws.keys, draws.first + queries), draws.first + keys)
    first = jax.random.key_data(words)[..., 0].astype(jnp.uint32)
    # The upper 24 bits, exact in float32.
    share = (first >> 8).astype(jnp.float32) * 2.0**-24
    return share >= draws.rate


def _begins(C: int, q: Array) -> Int32[Array, " n"]:
    return jnp.arange(0, q.shape[1], min(C, LEAST_STRIPE), dtype=jnp.int32)


def _joined(stripes: Float[Array, "n N Q e"]) -> Float[Array, "N L e"]:
    n, N, Q, e = stripes.shape
    return jnp.moveaxis(stripes, 0, 1).reshape(N, n * Q, e)


@_windows.defjvp
def _windows_jvp(mix: Mix, C: int, primals: Any, tangents: Any) -> tuple[Array, Array]:
    out = _windows(mix, C, *primals)
    moved = partial(_windows_forward, mix, C), partial(_windows_backward, mix, C)
    return out, linear(*moved, primals, tangents[:3], out)


def _windows_forward(mix: Mix, C: int, inputs: tuple[Any, ...], dots: tuple[Any, ...]) -> Array:
    """Return the tangent of `_windows` for the tangents `dots` of q, k and v."""
    q, k, v, tokens = inputs

    def step(_: None, begin: Array) -> tuple[None, Array]:
        seen, index, sizes = _stripe(C, q, k, v, tokens, begin)
        dot_q, dot_k, dot_v = dots
        moved = _stripe(C, dot_q, dot_k, dot_v, tokens, begin)[0]

        def branch(size: int) -> Callable[[], Array]:
            def mixed(q: Array, k: Array, v: Array) -> Array:
                return _mixed(mix, size, seen._replace(q=q, k=k, v=v))

            return lambda: jax.jvp(mixed, seen[:3], moved[:3])[1]

        return None, jax.lax.switch(index, [branch(size) for size in sizes])

    _, out = jax.lax.scan(step, None, _begins(C, q))
    return _joined(out)


def _windows_backward(mix: Mix, C: int, inputs: tuple[Any, ...], bar: Array) -> tuple[Any, ...]:
    """Return the cotangents of q, k and v for the cotangent `bar` of the output of `_windows`."""
    q, k, v, tokens = inputs
    # Up to nine stripes add to one key's gradient, so the sums are in at least float32.
    zeros = jnp.zeros_like(k, widened(k.dtype)), jnp.zeros_like(v, widened(v.dtype))

    def step(sums: tuple[Array, Array], begin: Array) -> tuple[tuple[Array, Array], Array]:
        seen, index, sizes = _stripe(C, q, k, v, tokens, begin)
        own = jax.lax.dynamic_slice_in_dim(bar, begin, seen.q.shape[1], axis=1)

        def branch(size: int) -> Callable[[], tuple[Array, Array, Array]]:
            def pulled() -> tuple[Array, Array, Array]:
                def mixed(q: Array, k: Array, v: Array) -> Array:
                    return _mixed(mix, size, seen._replace(q=q, k=k, v=v))

                return jax.vjp(mixed, seen.q, seen.k, seen.v)[1](own)

            return pulled

        bar_q, *bars = jax.lax.switch(index, [branch(size) for size in sizes])

        def added(total: Array, part: Array) -> Array:
            held = jax.lax.dynamic_slice_in_dim(total, begin, part.shape[1], axis=1)
            held = held + part.astype(total.dtype)
            return jax.lax.dynamic_update_slice_in_dim(total, held, begin, axis=1)

        return (added(sums[0], bars[0]), added(sums[1], bars[1])), bar_q

    (bar_k, bar_v), bar_q = jax.lax.scan(step, zeros, _begins(C, q))
    return _joined(bar_q), bar_k.astype(k.dtype), bar_v.astype(v.dtype)
