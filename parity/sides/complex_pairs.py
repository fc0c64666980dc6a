"""Complex arrays as real arrays with a last axis of 2: the real and the imaginary part.

Sides exchange complex numbers only in this form, for three reasons. No comparison can drop an
imaginary part. A parameter that is complex on one side and stored as pairs on the other, as in
torch checkpoints, is the same array on both. Gradients with respect to the two parts agree between
torch and JAX; gradients with respect to the complex number are conjugates of each other.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def as_pairs(x: np.ndarray) -> np.ndarray:
    """Return a complex array (...,) as its real and imaginary parts (..., 2); return other arrays
    unchanged."""
    if not np.iscomplexobj(x):
        return x
    return np.ascontiguousarray(x)[..., None].view(np.finfo(x.dtype).dtype)


def from_pairs(pairs: np.ndarray, dtype: Any) -> np.ndarray:
    """Return parts (..., 2) as a complex array (...,) of `dtype`; if `dtype` is real, return the
    array cast to it, in its shape."""
    if not np.issubdtype(dtype, np.complexfloating):
        return np.asarray(pairs, dtype)
    # Not `a + 1j * b`: an infinite part would make the other NaN.
    return np.ascontiguousarray(pairs, np.finfo(dtype).dtype).view(dtype)[..., 0]


def traced_pairs(x: jax.Array) -> jax.Array:
    """Return a complex array (...,) as its parts (..., 2), in a traced program; return other arrays
    unchanged."""
    return jnp.stack([x.real, x.imag], axis=-1) if jnp.iscomplexobj(x) else x


def traced_complex(pairs: jax.Array) -> jax.Array:
    """Return parts (..., 2) as a complex array (...,) in a traced program."""
    return jax.lax.complex(pairs[..., 0], pairs[..., 1])
