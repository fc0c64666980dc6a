"""Validation of inputs: token ids, labels, masks and counts, with the same rules everywhere.

Integers are converted to int32 here and nowhere else. In uint8, `ignore_index=-100` would wrap to
156, and no narrow type can be compared with the size of a vocabulary.
"""

from __future__ import annotations

import operator
from typing import SupportsIndex, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Integer, Shaped

from megalodon_jax.checks import checked

Tensor: TypeAlias = jax.Array | np.ndarray
Ids: TypeAlias = Integer[Tensor, "B L"]
"""Token ids or labels, of any integer dtype."""
Mask: TypeAlias = Bool[Tensor, "B L"] | Integer[Tensor, "B L"]
"""Token mask: True, or 1, where a token is valid."""
Rate: TypeAlias = float | int | np.floating | np.integer | Float[Tensor, ""] | Integer[Tensor, ""]

SPLIT_ROW = (
    "with a cache, the valid tokens of a row must stand next to each other, but attention_mask has "
    "padding between some of them. Move the padding to the ends of the row, or call without a "
    "cache."
)
PACKED_MASK = (
    "with a cache, segment_ids cannot be combined with an attention_mask that has padding. Give "
    "padding at the end of a row a separate segment id, or run each document in a separate row."
)
PACKED_WINDOW = (
    "segment_ids with a cache need a cache of chunk_size tokens, since a document attends within "
    "its chunks: set max_cache_len to None or chunk_size, and cache_unbounded to False."
)
PACKED_STREAM = (
    "segment_ids need a cache that records the document of each row, but this cache is from calls "
    "without segment_ids. Begin with init_cache(config, batch_size, packed=True), or with a call "
    "that has segment_ids and no cache."
)
_INT32 = jnp.iinfo(jnp.int32)


def traced(x: object) -> bool:
    """Return whether `x` is being traced and so has no value yet."""
    return isinstance(x, jax.core.Tracer)  # pyright: ignore[reportAttributeAccessIssue]


def as_int32(name: str, x: Shaped[Tensor, "..."], axes: str, remedy: str) -> Int32[Array, "..."]:
    """Convert an array of integers of any width to int32.

    A value outside int32 is clipped to the nearest limit, where a later range check finds it; a
    wrapped value might be in range.

    Args:
        name: name of the array in errors.
        x: a NumPy or JAX array.
        axes: names of the expected axes, such as "B L".
        remedy: end of the error message, such as "give one row a first axis".

    Raises:
        ValueError: `x` is not an array of integers, or has another number of axes.
    """
    dtype, shape = getattr(x, "dtype", type(x).__name__), getattr(x, "shape", "")
    expected = axes.split()
    if isinstance(shape, str) or not (
        jnp.issubdtype(dtype, jnp.integer) and len(shape) == len(expected)
    ):
        wanted = f"({expected[0]},)" if len(expected) == 1 else f"({', '.join(expected)})"
        raise ValueError(f"{name} are {dtype} {shape}, expected integers {wanted}; {remedy}.")
    return _narrowed(x)


def as_mask(
    name: str, mask: Shaped[Tensor, "..."] | None, shape: tuple[int, ...], owner: str
) -> Bool[Array, "..."] | None:
    """Return a mask as booleans, True where a token is valid; None stays None.

    Args:
        name: name of the mask in errors.
        mask: booleans, or integers that are 0 or 1.
        shape: the shape that the mask must have.
        owner: name of the array with that shape, for errors.

    Raises:
        ValueError: the mask has another shape or dtype.
        RuntimeError: an integer is neither 0 nor 1, also under jit.
    """
    if mask is None:
        return None
    dtype, received = getattr(mask, "dtype", None), getattr(mask, "shape", None)
    if dtype is None or received is None:
        raise ValueError(f"{name} is a {type(mask).__name__}, expected an array {shape} of bool.")
    if received != shape:
        raise ValueError(f"{name} has shape {received}, expected that of {owner}, {shape}.")
    if dtype == np.bool_:
        return jnp.asarray(mask)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"{name} is {dtype}, expected bool, or integers that are 0 or 1; to say which tokens "
            "are valid, write mask > 0."
        )
    number = _narrowed(mask)
    return checked(
        number != 0,
        (number != 0) & (number != 1),
        f"{name} holds integers other than 0 (padding) and 1 (valid). It marks padding only: "
        "segment_ids separate the documents of a row, and weights are not supported.",
    )


def as_integer(name: str, value: SupportsIndex, least: int | None = None, remedy: str = "") -> int:
    """Convert a Python or NumPy integer, which must not be traced, to a Python int.

    Args:
        name: name of the value in errors.
        value: the value.
        least: smallest allowed value; None allows every 32-bit integer.
        remedy: end of the error message, with its punctuation, such as ", or None".

    Raises:
        ValueError: `value` is not an integer, is below `least`, or does not fit 32 bits.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    lowest = _INT32.min if least is None else least
    if number is None or isinstance(value, (bool, np.bool_)) or not lowest <= number <= _INT32.max:
        rule = "an integer of 32 bits" if least is None else f"at least {least}, an integer"
        raise ValueError(f"{name}={value} must be {rule}{remedy}.")
    return number


def _narrowed(x: Tensor) -> jax.Array:
    limits = jnp.iinfo(x.dtype)
    if limits.max > _INT32.max:
        # NumPy arrays are clipped by NumPy: JAX would first narrow them to 32 bits.
        numpy = np if isinstance(x, np.ndarray) else jnp
        x = numpy.clip(x, max(limits.min, _INT32.min), _INT32.max)
    return jnp.asarray(x.astype(np.int32))
