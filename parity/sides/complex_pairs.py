"""Complex arrays as real ones with a last axis of 2, the real and the imaginary part.

A side gives and takes nothing else: what matches, compares and forces arrays then never drops an
imaginary part, and a parameter that one side holds as complex and the other as such pairs, as
torch's checkpoints do, is the same array. Derivatives by the two parts are the same in torch and
JAX; by the complex number they are each other's conjugates.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def as_pairs(x: np.ndarray) -> np.ndarray:
    """Return a complex array (...,) as its parts (..., 2), and any other as it is."""
    if not np.iscomplexobj(x):
        return x
    return np.ascontiguousarray(x)[..., None].view(np.finfo(x.dtype).dtype)


def from_pairs(pairs: np.ndarray, dtype: Any) -> np.ndarray:
    """Return parts (..., 2) as a complex array (...,) of a dtype; other dtypes have no parts."""
    if not np.issubdtype(dtype, np.complexfloating):
        return np.asarray(pairs, dtype)
    # Not `a + 1j * b`: where a part is infinite, the other would be NaN.
    return np.ascontiguousarray(pairs, np.finfo(dtype).dtype).view(dtype)[..., 0]


def traced_pairs(x: jax.Array) -> jax.Array:
    """`as_pairs` in a traced program."""
    return jnp.stack([x.real, x.imag], axis=-1) if jnp.iscomplexobj(x) else x


def traced_complex(pairs: jax.Array) -> jax.Array:
    """Return parts (..., 2) as a complex array (...,) in a traced program."""
    return jax.lax.complex(pairs[..., 0], pairs[..., 1])
