"""Fingerprints: a number per array that knows its values and not their order, dtype or place.

A fingerprint is the sum, modulo 2^64, of a hash of each element. A permuted or reshaped array has
the same one, and that of a concatenation is the sum of those of its parts: what finds out, from one
number per array and without a copy, what may be a transposition or a fusion of what.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

MODULUS = 1 << 64
CHUNK = 1 << 15
"""Elements hashed at once: 256 KiB of float64 stay in a core's second cache."""
# Odd constants of 64 bits (the golden ratio's, and a prime of a published mixer): multiplying by
# them is invertible, so two values never start out with one hash.
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_HALF, _THIRD = np.uint64(32), np.uint64(29)


def chunks(x: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the elements of `x` in the order of memory, widened to float64, a chunk at a time.

    Every dtype of up to 32 bits, and float64, widens exactly: equal values have equal bits.
    """
    flags = ("external_loop", "buffered", "zerosize_ok")
    for chunk in np.nditer(
        x, flags, ("readonly",), np.float64, order="K", casting="unsafe", buffersize=CHUNK
    ):
        yield np.asarray(chunk)


def fingerprint(x: np.ndarray) -> int:
    """Return the fingerprint of an array of real numbers; 0 and -0 count as one value."""
    total = 0
    for chunk in chunks(x):
        # -0.0 + 0.0 is 0.0; the sum is also what makes the copy that is hashed in place.
        bits = (chunk + 0.0).view(np.uint64)
        bits *= _FIRST
        bits ^= bits >> _HALF
        bits *= _SECOND
        bits ^= bits >> _THIRD
        total += int(bits.sum(dtype=np.uint64))
    return total % MODULUS


def sample_positions(size: int, count: int) -> np.ndarray:
    """Return up to `count` flat positions in an array of `size` elements, spread and sorted.

    Steps of the golden ratio: no stride of an array divides them, so that rows, columns and heads
    are all met.
    """
    if size <= count:
        return np.arange(size)
    steps = (np.arange(1, count + 1) * 0.6180339887498949) % 1.0
    return np.unique((steps * size).astype(np.int64))
