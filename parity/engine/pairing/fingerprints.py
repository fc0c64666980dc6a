"""Fingerprints: one integer per array that depends on its values but not on order, dtype or shape.

A fingerprint is the sum, modulo 2^64, of a hash of each element. A permuted or reshaped array has
the same fingerprint. The fingerprint of a concatenation is the sum of the parts' fingerprints. So
transposed and concatenated arrays are recognised by one number per array, without copies.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

MODULUS = 1 << 64
# 256 KiB of float64 fit into a core's L2 cache.
CHUNK = 1 << 15
"""Number of elements hashed at once."""
# Odd 64-bit constants: 2^64 over the golden ratio, and a prime of a published hash function.
# Multiplying by an odd number is invertible, so different values have different products.
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_HALF, _THIRD = np.uint64(32), np.uint64(29)


def chunks(x: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the elements of `x` in memory order, converted to float64, `CHUNK` at a time.

    float64 represents the values of all dtypes of up to 32 bits exactly.
    """
    flags = ("external_loop", "buffered", "zerosize_ok")
    for chunk in np.nditer(
        x, flags, ("readonly",), np.float64, order="K", casting="unsafe", buffersize=CHUNK
    ):
        yield np.asarray(chunk)


def fingerprint(x: np.ndarray) -> int:
    """Return a hash of an array's real values that does not depend on their order, dtype or shape.

    The hash of a concatenation is the sum of the hashes of its parts, modulo `MODULUS`.
    0 and -0 count as one value.
    """
    total = 0
    for chunk in chunks(x):
        # -0.0 + 0.0 is 0.0. The sum also makes the copy that is hashed in place below.
        bits = (chunk + 0.0).view(np.uint64)
        bits *= _FIRST
        bits ^= bits >> _HALF
        bits *= _SECOND
        bits ^= bits >> _THIRD
        total += int(bits.sum(dtype=np.uint64))
    return total % MODULUS


def sample_positions(size: int, count: int) -> np.ndarray:
    """Return up to `count` flat positions in an array of `size` elements, spread out and sorted.

    Positions are `size` times the fractional parts of multiples of the golden ratio, rounded down.
    They are not periodic, so they do not fall into the same few columns or heads, whatever the
    strides of the array.
    """
    if size <= count:
        return np.arange(size)
    steps = (np.arange(1, count + 1) * 0.6180339887498949) % 1.0
    return np.unique((steps * size).astype(np.int64))
