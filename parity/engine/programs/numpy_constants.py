"""Conversion of a traced function's NumPy constants, separately in 32-bit and in 64-bit mode.

JAX 0.10.2 converts a constant to the dtypes of the active mode and caches the result without the
mode. If a function that indexes by an int64 array, or multiplies by a float64 array, is traced in
both modes, JAX refuses the second program: its dtypes do not agree. The conversion here replaces
that of JAX for the rest of the process; JAX has no function that restores its own.
"""

from __future__ import annotations

import functools
import math
import weakref

import jax
import numpy as np

_converted: dict[tuple[int, np.dtype], tuple[weakref.ref, weakref.ref]] = {}
"""Weak references to a constant and to the array it was converted to, by the constant's `id` and
the new dtype."""


@functools.cache
def convert_in_each_mode() -> bool:
    """Make JAX convert NumPy constants separately in 32-bit and 64-bit mode; return whether that
    was needed.

    False too if this version of JAX lacks the function that converts constants.
    """
    constant = np.zeros(1, np.int64)
    try:
        # Not public; JAX has no public way to convert a constant.
        from jax._src import dtypes, literals

        with jax.enable_x64(True):
            wide = dtypes.canonicalize_value(constant)
        with jax.enable_x64(False):
            narrow = dtypes.canonicalize_value(constant)
        if wide.dtype == narrow.dtype and literals.TypedNdArray:
            dtypes.register_canonicalize_value_handler(np.ndarray, _convert)
    except (ImportError, AttributeError):
        return False
    return wide.dtype == narrow.dtype


def _convert(x: np.ndarray) -> np.ndarray:
    """Convert a NumPy array to the dtype that JAX's active mode (32-bit or 64-bit) uses for it.

    If the array was converted to that dtype before, return the result of that conversion.
    """
    from jax._src import dtypes, literals

    wide = x.dtype.itemsize > {"f": 8, "c": 16}.get(x.dtype.kind, math.inf)
    if x.dtype.kind in "OSUMm" or not x.dtype.isnative or wide:
        raise TypeError(f"a NumPy array of dtype {x.dtype} is not a valid JAX type")
    key = id(x), dtypes.canonicalize_dtype(x.dtype)
    constant, result = _converted.get(key, (_dead, _dead))
    found = result()
    # Python may reuse the `id` of a deleted array for another one.
    if found is None or constant() is not x:
        found = literals.TypedNdArray(np.asarray(x, key[1]))
        _converted[key] = weakref.ref(x), weakref.ref(found, lambda _: _converted.pop(key, None))
    return found


def _dead() -> None:
    """Return None, as a weak reference to a deleted array does."""
