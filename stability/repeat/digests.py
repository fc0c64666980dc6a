"""Digests of arrays inside jit: equal bits give equal digests, on any number of devices.

A digest is a sum of integers modulo 2^32, which has the same value in any order. So it does not
depend on how an array is sharded or how a processor adds, only on the bits of the elements and on
their places. Source: docs/training.md "Where two runs part".
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from megalodon_jax.weights import named_leaves
from parity.engine.programs.instrument import capture
from stability.core.reduced import reduced_loss

PARAMETER, INPUT = "parameter/", "input/"
"""Prefixes of the names of what a step starts from."""
# Constants of the finaliser of MurmurHash3 (32 bits), which is a bijection of 32-bit integers: two
# arrays that differ in one element of at most 32 bits always have different digests.
_FIRST, _SECOND = 0x85EBCA6B, 0xC2B2AE35
# 2^32 divided by the golden ratio: places that are neighbours get distant numbers.
_STEP = 0x9E3779B9


class Digests(eqx.Module):
    """Digests of the values of one step, in the order of their computation."""

    names: tuple[str, ...] = eqx.field(static=True)
    values: UInt32[Array, "n 2"]

    @classmethod
    def of(cls, found: Mapping[str, jax.Array]) -> Digests:
        """Collect digests by name; jit would sort a dictionary."""
        empty = jnp.zeros((0, 2), jnp.uint32)
        return cls(tuple(found), jnp.stack([*found.values()]) if found else empty)


def digest(x: jax.Array) -> UInt32[Array, "2"]:
    """Return the digest of an array of any shape and numeric dtype, from its bits.

    NaN is one value, whatever its payload; -0 and 0 differ. Shape and dtype enter. Arrays that
    differ in several elements have equal digests with a probability of about 2^-64.
    """
    seed = zlib.crc32(f"{x.dtype}{x.shape}".encode())
    place = jnp.full(x.shape, seed, jnp.uint32)
    stride = 1
    for axis in reversed(range(x.ndim)):
        counted = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        place = place + counted * jnp.uint32(stride * _STEP % 2**32)
        stride *= x.shape[axis]
    mixed = _mixed(place)
    for word in _words(x):
        mixed = _mixed(mixed ^ word)
    # Of a second, different sum of the same numbers: one of 32 bits would meet by chance in a run
    # of millions of values.
    other = (mixed ^ (mixed >> 15)) * jnp.uint32(_STEP)
    sums = (jnp.sum(each, dtype=jnp.uint32) for each in (mixed, other ^ (other >> 13)))
    return jnp.stack([*sums])


def _mixed(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(_FIRST)
    x = (x ^ (x >> 13)) * jnp.uint32(_SECOND)
    return x ^ (x >> 16)


def _words(x: jax.Array) -> list[jax.Array]:
    """Return the bits of every element as words of 32 bits, each of the shape of `x`."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*_words(x.real), *_words(x.imag)]
    if x.dtype == jnp.bool_:
        return [x.astype(jnp.uint32)]
    if jnp.issubdtype(x.dtype, jnp.floating):
        # Formats of less than a byte widen exactly, and have no bits to look at in XLA.
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
    """Return the digest of each array of a tree, such as an optimiser's state; keys too."""
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
    """Return `value_and_grad` of a loss with digests: ((loss, gradients), digests).

    Digests are named `parameter/...`, `input/...`, by intermediate, `loss`, `bar/<intermediate>`
    for cotangents and `grad/<parameter>`, in order of computation. Call the result inside
    `eqx.filter_jit`. XLA no longer fuses across intermediates, so results may differ in their last
    bits from those of the loss alone: compare only runs with the same options.

    Args:
        loss: called as `loss(model, *args)`, returns a scalar; `args` are pytrees of arrays.
        intermediates: also digest what `jax.ad_checkpoint.checkpoint_name` marks.
        cotangents: also digest the derivative by each mark.
        numbered: names of marks that occur more than once, as for
            `parity.engine.programs.instrument.capture`; by default the second `q` is `q#2`.
    """
    marked = partial(capture, numbered=numbered, once=False)
    step = reduced_loss(loss, digest, marked, intermediates=intermediates, cotangents=cotangents)

    def hashed(model: Any, *args: Any) -> tuple[tuple[jax.Array, Any], Digests]:
        start = _leaves(model, PARAMETER) | _leaves(args, INPUT)
        result, found = step(model, *args)
        return result, Digests.of(start | found)

    return hashed
