"""Packed documents: the position of each token within its document.

Layers receive one array, the index of every token within its document, which is all they need: the
token `r` places before a token is in the same document if the token's index is at least `r`.
"""

from __future__ import annotations

from typing import TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, Integer

from megalodon_jax.checks import checked
from megalodon_jax.inputs import Tensor, as_int32
from megalodon_jax.sharding.axes import placed
from megalodon_jax.types import LayerCache, ModelCache, NormState

SegmentIds: TypeAlias = Integer[Tensor, "B L"]
"""Document of each token, as any integers; a change of the id starts a new document."""
Positions: TypeAlias = Int32[Array, "B L"]
"""Index of each token within its document."""


def document_positions(
    segment_ids: SegmentIds | None, shape: tuple[int, ...], owner: str
) -> Positions | None:
    """Return the index of each token within its document, (B, L); None stays None.

    Args:
        segment_ids: neighbouring tokens with equal ids are one document; an id may occur again
            later for another document.
        shape: the shape that `segment_ids` must have.
        owner: name of the array with that shape, for errors.

    Raises:
        ValueError: `segment_ids` are not integers, or have another shape.
    """
    check_segment_ids(segment_ids, shape, owner)
    if segment_ids is None:
        return None
    # Replicated over the sequence axis: a row of booleans is smaller than the data that a running
    # maximum over shards would communicate.
    changed = placed(begins(segment_ids), "batch", None)
    index = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    begin = jax.lax.cummax(jnp.where(changed, index, 0), axis=1)
    return placed(index - begin, "batch", "sequence")


def stream_ids(segment_ids: SegmentIds) -> Int32[Array, "B L"]:
    """Return segment ids as int32, in which a cache stores them.

    Raises:
        RuntimeError: an id does not fit int32, so two documents could get one id (also under jit).
    """
    ids = as_int32("segment_ids", segment_ids, "B L", "give each token the number of its document")
    # `as_int32` clipped values that do not fit to the ends of the range.
    ends = jnp.iinfo(jnp.int32)
    return checked(
        ids,
        (ids == ends.min) | (ids == ends.max),
        "segment_ids with a cache must be above -2**31 and below 2**31 - 1: the cache stores the "
        "last id of each row as int32.",
    )


def continued(cache: ModelCache, first: Int32[Array, " B"]) -> ModelCache:
    """Return a cache with rows reset to the initial state unless their document continues.

    Args:
        cache: cache with positions per row, and the current document of each row.
        first: segment id of each row's next token.
    """
    goes_on = first == cache.document

    def kept(leaf: Array, fresh: int = 0) -> Array:
        rows = goes_on.reshape((-1,) + (1,) * (leaf.ndim - 1))
        return jnp.where(rows, leaf, jnp.asarray(fresh, leaf.dtype))

    def layer(held: LayerCache) -> LayerCache:
        # Keys and values need no reset: a ring buffer whose counters are 0 is empty.
        attn = held.attn and eqx.tree_at(
            lambda ring: (ring.count, ring.first), held.attn, replace_fn=kept
        )
        norm, ema = norm_of(held.norm), jax.tree.map(kept, held.ema)
        return LayerCache(attn, norm, ema, kept(held.position))

    def norm_of(state: NormState | None) -> NormState | None:
        return state and NormState(kept(state.count), kept(state.mean), kept(state.var, 1))

    layers = tuple(map(layer, cache.layer_caches))
    return ModelCache(layers, norm_of(cache.final_norm), cache.document)


def begins(segment_ids: Integer[Tensor, "... L"]) -> Bool[Array, "... L"]:
    """Return a mask that is True at first tokens of documents, and of rows."""
    # Compared in their own dtype: narrowed first, two wide ids could become equal.
    numpy = np if isinstance(segment_ids, np.ndarray) else jnp
    changed = segment_ids[..., 1:] != segment_ids[..., :-1]
    first = numpy.ones_like(segment_ids[..., :1], bool)
    return jnp.asarray(numpy.concatenate([first, changed], axis=-1))


def check_segment_ids(
    segment_ids: Integer[Tensor, "*batch L"] | None, shape: tuple[int, ...], owner: str
) -> None:
    """Check that segment ids, if given, are integers of the shape `shape` of the array `owner`.

    Raises:
        ValueError: the dtype or the shape differs.
    """
    if segment_ids is None:
        return
    received = getattr(segment_ids, "shape", None)
    dtype = getattr(segment_ids, "dtype", type(segment_ids).__name__)
    if received != shape or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"segment_ids are {dtype} {received}, expected integers of the shape of {owner}, "
            f"{shape}: for each token the number of its document."
        )
