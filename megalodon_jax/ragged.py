"""Rows of unequal length with a cache: each row of a call (B, L) holds L tokens or fewer.

The tokens of a row are adjacent, with padding on the left, the right or both. The model moves the
tokens to the left once, before its embedding. Then positions count from each row's first token, and
the padding, which comes later, affects no token, since all layers are causal. The layers only need
to return the state after the last token of each row.

Source: docs/model.md "Caches".
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Shaped

from megalodon_jax.checks import checked
from megalodon_jax.inputs import SPLIT_ROW, traced

Tree = TypeVar("Tree")


def padding_of(mask: Tree, shape: tuple[int, ...]) -> Tree | None:
    """Return `mask`, or None if it is known to have no padding.

    Without padding, all rows of a cache share one position. A traced mask has no value, so it may
    have padding. An invalid mask is returned unchanged, so that `megalodon_jax.inputs.as_mask`
    rejects it.
    """
    given: Any = mask
    known = isinstance(given, np.ndarray) or (
        isinstance(given, jax.Array) and not traced(given) and given.is_fully_addressable
    )
    if not known or given.shape != shape or given.dtype.kind not in "bui":
        return mask
    return None if (np.asarray(given) == 1).all() else mask


def lengths_of(mask: Bool[Array, "B L"]) -> Int32[Array, " B"]:
    """Return the number of valid tokens of each row."""
    return jnp.sum(mask, axis=1, dtype=jnp.int32)


class Aligned(NamedTuple):
    """Inputs of a call after the tokens of each row were moved to its left end.

    `lengths` (B,) is the number of tokens per row. `start` (B,) is the column of each row's first
    token before the move, or None if nothing was moved.
    """

    ids: Int32[Array, "B L"]
    mask: Bool[Array, "B L"]
    lengths: Int32[Array, " B"]
    start: Int32[Array, " B"] | None


def aligned(ids: Int32[Array, "B L"], mask: Bool[Array, "B L"]) -> Aligned:
    """Move the valid tokens of each row to the left.

    Raises:
        RuntimeError: a row has padding between its tokens (also under jit).
    """
    before = jnp.pad(mask[:, :-1], ((0, 0), (1, 0)))
    ids = checked(ids, jnp.sum(mask & ~before, axis=1) > 1, SPLIT_ROW)
    L, lengths, start = ids.shape[1], lengths_of(mask), None
    if L > 1:
        start = jnp.argmax(mask, axis=1).astype(jnp.int32)
        ids = rolled(ids, start)
    return Aligned(ids, jnp.arange(L, dtype=jnp.int32)[None] < lengths[:, None], lengths, start)


def to_place(x: Float[Array, "B L D"], start: Int32[Array, " B"]) -> Float[Array, "B L D"]:
    """Move outputs for `Aligned` inputs back to the original columns of their tokens."""
    return rolled(x, -start)


def rolled(x: Shaped[Array, "B L ..."], by: Int32[Array, " B"]) -> Shaped[Array, "B L ..."]:
    """Rotate each row so that its element at index `by` comes first; earlier elements come last."""
    L = x.shape[1]
    index = (jnp.arange(L, dtype=jnp.int32)[None] + by[:, None]) % L
    index = index.reshape(index.shape + (1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1, mode="clip")


def kept(lengths: Int32[Array, " B"], new: Tree, old: Tree) -> Tree:
    """Return the state `new`; rows without a token (length 0) are those of `old`, bit for bit."""

    def choose(new: Array, old: Array) -> Array:
        some = (lengths > 0).reshape((-1,) + (1,) * (new.ndim - 1))
        return jnp.where(some, new, old.astype(new.dtype))

    return jax.tree.map(choose, new, old)
