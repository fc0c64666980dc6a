"""Digests of arrays inside jit: equal bits give equal digests, on any number of devices.

A digest consists of two sums of integers modulo 2^32, which have the same value in any order. So it
does not depend on how an array is sharded or on how a processor adds, only on dtype, shape, and the
bits and positions of the elements. Source: docs/training.md "Where two runs part".
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from megalodon_jax.weights import named_leaves
from parity.engine.programs.instrument import capture
from stability.core.reduced import reduced_loss

PARAMETER, INPUT = "parameter/", "input/"
"""Prefixes of the names of a step's inputs: of the model's parameters, and of other arguments."""
# Constants of the finaliser of MurmurHash3 (32 bits), which is a bijection of 32-bit integers: two
# arrays that differ in one element of at most 32 bits always have different digests.
FIRST, SECOND = 0x85EBCA6B, 0xC2B2AE35
# 2^32 divided by the golden ratio: neighbouring positions get distant numbers.
STEP = 0x9E3779B9
PART = 1 << 15
"""Number of elements in a part of an array. On a CPU, three arrays of this many 4-byte words fit
into the cache."""


class Digests(eqx.Module):
    """Digests of the values of one step, in the order of their computation."""

    names: tuple[str, ...] = eqx.field(static=True)
    """Names of the n values."""
    values: UInt32[Array | np.ndarray, "n 2"]
    """One digest (two 32-bit words) per name; a NumPy array if the training is in torch."""

    @classmethod
    def of(cls, found: Mapping[str, jax.Array]) -> Digests:
        """Collect digests by name, in the mapping's order; jit would sort a returned dictionary."""
        empty = jnp.zeros((0, 2), jnp.uint32)
        return cls(tuple(found), jnp.stack([*found.values()]) if found else empty)


def digest(x: jax.Array) -> UInt32[Array, "2"]:
    """Return the digest of an array of any shape and numeric dtype, from its bits.

    All NaN are equal, whatever their payload; -0 and 0 differ. Shape and dtype count too. Arrays
    that differ in several elements have equal digests with a probability of about 2^-64, those that
    differ in one element of more than 32 bits with 2^-32.
    """
    seed = jnp.uint32(zlib.crc32(f"{x.dtype}{x.shape}".encode()))
    index = jnp.zeros(x.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(x.ndim)):
        counted = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        index = index + counted * jnp.uint32(stride % 2**32)
        stride *= x.shape[axis]
    # The positions in a part and the number of the part are mixed separately, so that the digest of
    # a torch tensor takes the mixed positions from a table.
    inside = _mixed((index & (PART - 1)) * jnp.uint32(STEP))
    mixed = inside + _mixed(seed + (index // PART) * jnp.uint32(STEP))
    for word in _words(x):
        mixed = _mixed(mixed ^ word)
    # A second, different sum of the same numbers: with 32 bits alone, digests would collide by
    # chance in a run with millions of values.
    both = mixed, mixed * (mixed >> 16)
    return jnp.stack([jnp.sum(each, dtype=jnp.uint32) for each in both])


def _mixed(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(FIRST)
    x = (x ^ (x >> 13)) * jnp.uint32(SECOND)
    return x ^ (x >> 16)


def _words(x: jax.Array) -> list[jax.Array]:
    """Return the bits of every element as words of 32 bits, each of the shape of `x`."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*_words(x.real), *_words(x.imag)]
    if x.dtype == jnp.bool_:
        return [x.astype(jnp.uint32)]
    if jnp.issubdtype(x.dtype, jnp.floating):
        # Formats of less than a byte are widened, which is exact: XLA cannot bitcast them.
        x = x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 8 else x
        x = jnp.where(jnp.isnan(x), jnp.full_like(x, jnp.nan), x)
    elif jnp.iinfo(x.dtype).bits < 8:
        x = x.astype(jnp.int8)
    bits = x.dtype.itemsize * 8
    if bits == 64:
        pair = jax.lax.bitcast_convert_type(x, jnp.uint32)
        return [pair[..., 0], pair[..., 1]]
    whole = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[bits]
    return [jax.lax.bitcast_convert_type(x, whole).astype(jnp.uint32)]


def digests_of(tree: Any, prefix: str = "") -> Digests:
    """Return the digest of each array of a tree, such as an optimiser's state.

    PRNG keys are included. Names are `prefix` + dotted path.
    """
    return Digests.of(_leaves(tree, prefix))


def _leaves(tree: Any, prefix: str) -> dict[str, jax.Array]:
    def bits(leaf: Any) -> jax.Array:
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if is_key else jnp.asarray(leaf)

    return {prefix + name: digest(bits(leaf)) for name, leaf in named_leaves(tree).items()}


def hashed_loss(
    loss: Callable[..., jax.Array],
    *,
    intermediates: bool = True,
    cotangents: bool = False,
    numbered: Mapping[str, str] | None = None,
) -> Callable[..., tuple[tuple[jax.Array, Any], Digests]]:
    """Return a function (model, *args) -> ((loss, gradients), digests).

    The names of the digests are `parameter/...`, `input/...`, intermediates, `loss`,
    `bar/<intermediate>` for cotangents and `grad/<parameter>`, in order of computation. Call the
    function inside `eqx.filter_jit`. XLA no longer fuses across intermediates, so results may
    differ in their last bits from those of the loss alone: compare only runs with equal options.

    Args:
        loss: called as `loss(model, *args)`, returns a scalar; `args` are pytrees of arrays.
        intermediates: whether to digest values marked by `jax.ad_checkpoint.checkpoint_name` too.
        cotangents: whether to digest the derivative of the loss by each marked value too.
        numbered: name templates for values that share a `checkpoint_name`, by this name, such
            as `layers.{}.q` for `q` (see `parity.engine.programs.instrument.capture`). Without a
            template, the second value of name `q` is called `q#2`.
    """
    marked = partial(capture, numbered=numbered, once=False)
    step = reduced_loss(loss, digest, marked, intermediates=intermediates, cotangents=cotangents)

    def hashed(model: Any, *args: Any) -> tuple[tuple[jax.Array, Any], Digests]:
        start = _leaves(model, PARAMETER) | _leaves(args, INPUT)
        result, found = step(model, *args)
        return result, Digests.of(start | found)

    return hashed
