"""The vocabulary on the axis `tensor`: rows of the embedding, columns of the logits.

If the axis does not divide the vocabulary, the program pads the matrices with rows that no token
uses: these are never looked up, and their logits are -inf, which does not affect a softmax. The
stored size does not change.

Source: docs/sharding.md "Vocabulary".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from megalodon_jax.sharding.axes import TENSOR, AnyMesh, on_shards, placed, shards, spec_of


def filled_rows(table: Float[Array, "V D"], mesh: AnyMesh) -> Float[Array, "W D"]:
    """Return embedding or head on `mesh`, cut by rows.

    Zero rows are appended, so that their number W is a multiple of the mesh axis `tensor`'s size.
    """
    short = -table.shape[0] % shards(mesh, "tensor")
    return placed(jnp.pad(table, ((0, short), (0, 0))), "tensor", None)


def rows_of(
    table: Float[Array, "W D"], ids: Int32[Array, "B L"], size: int, mesh: AnyMesh
) -> Float[Array, "B L D"]:
    """Return the table's row for each id, channels split over `tensor`; NaN outside [0, size).

    `table` is a result of `filled_rows`; its rows from `size` on are padding. Each shard looks up
    its own rows and contributes zeros otherwise, so the sum over shards is exact.
    """
    parts = shards(mesh, "tensor")
    outside = (ids < 0) | (ids >= size)

    def local(table: Array, ids: Array) -> Array:
        offset = 0 if parts == 1 else jax.lax.axis_index(TENSOR) * table.shape[0]
        here = ids - offset
        mine = (here >= 0) & (here < table.shape[0])
        rows = jnp.where(mine[..., None], table[jnp.where(mine, here, 0)], 0.0)
        if parts == 1:
            return rows
        return jax.lax.psum_scatter(rows, TENSOR, scatter_dimension=2, tiled=True)

    ins = (spec_of(mesh, table.shape, ("tensor", None)), spec_of(mesh, ids.shape, _TOKENS))
    shape = (*ids.shape, table.shape[1])
    outs = spec_of(mesh, shape, (*_TOKENS, "tensor"))
    rows = on_shards(local, mesh, (table, ids), ins, outs)
    return jnp.where(outside[..., None], jnp.nan, rows)


def masked_columns(logits: Float[Array, "B L W"], size: int) -> Float[Array, "B L W"]:
    """Return logits with -inf in padding columns, those from `size` on."""
    if logits.shape[-1] == size:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < size, logits, -jnp.inf)


def at_target(
    logits: Float[Array, "B L W"], targets: Int32[Array, "B L"], mesh: AnyMesh
) -> Float[Array, "B L"]:
    """Return the target's logit at each position; NaN if the target is not a column of `logits`.

    Each shard looks up its own columns: indexing a sharded axis would gather all logits first.
    """
    parts = shards(mesh, "tensor")

    def local(logits: Array, targets: Array) -> Array:
        offset = 0 if parts == 1 else jax.lax.axis_index(TENSOR) * logits.shape[-1]
        here = targets - offset
        mine = (here >= 0) & (here < logits.shape[-1])
        chosen = jnp.take_along_axis(logits, jnp.where(mine, here, 0)[..., None], axis=-1)
        chosen = jnp.where(mine, chosen[..., 0], 0.0)
        return chosen if parts == 1 else jax.lax.psum(chosen, TENSOR)

    tokens = spec_of(mesh, targets.shape, _TOKENS)
    ins = (spec_of(mesh, logits.shape, (*_TOKENS, "tensor")), tokens)
    chosen = on_shards(local, mesh, (logits, targets), ins, tokens)
    return jnp.where((targets >= 0) & (targets < logits.shape[-1]), chosen, jnp.nan)


_TOKENS = ("batch", "sequence")
