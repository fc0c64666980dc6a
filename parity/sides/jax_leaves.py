"""Functions that name, classify and cast pytree leaves, shared by the sides written in JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from parity.sides.complex_pairs import as_pairs


def path_name(path: Sequence[Any]) -> str:
    """Return the path of a pytree leaf as dotted text, such as `layers.0.weight`."""
    return ".".join(map(_key_name, path))


def field_name(name: str, path: Sequence[Any]) -> str:
    """Return `name` followed by the path of a pytree leaf, as in `output.logits` or `output[0]`.

    Args:
        name: name of the result that contains the leaf.
        path: pytree path of the leaf.
    """
    for key in path:
        part = _key_name(key)
        name += f"[{part}]" if part.isdigit() else f".{part}"
    return name


def mark(name: str, value: Any) -> Any:
    """Return a pytree with each floating-point array in it marked by `checkpoint_name`.

    Args:
        name: name of the pytree; the mark of a leaf is named `field_name(name, path)`.
        value: any pytree, such as the result of a module.
    """

    def marked(path: Sequence[Any], leaf: Any) -> Any:
        return checkpoint_name(leaf, field_name(name, path)) if floating(leaf) else leaf

    return jax.tree_util.tree_map_with_path(marked, value)


def floating(x: Any) -> bool:
    """Return whether a leaf is an array of real or complex floating-point numbers."""
    return hasattr(x, "dtype") and hasattr(x, "shape") and jnp.issubdtype(x.dtype, jnp.inexact)


def is_complex(x: Any) -> bool:
    """Return whether a leaf is a complex array."""
    return floating(x) and jnp.issubdtype(x.dtype, jnp.complexfloating)


def is_array(x: Any) -> bool:
    """Return whether a leaf is a NumPy or JAX array, or a NumPy scalar."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def is_key(x: Any) -> bool:
    """Return whether a leaf is a typed JAX random key, whose dtype is not numeric."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def arrays_of(tree: Any) -> list[Any]:
    """Return the array leaves of a pytree in order; complex arrays as real pairs (..., 2)."""
    leaves = (x for x in jax.tree.leaves(tree) if is_array(x))
    return [as_pairs(np.asarray(x)) if is_complex(x) else x for x in leaves]


def cast(tree: Any, dtype: Any) -> Any:
    """Return a pytree with its floating-point arrays cast to `dtype`.

    A complex array becomes complex128 for float64, and complex64 for narrower dtypes.
    """
    paired = jnp.complex128 if jnp.dtype(dtype) == jnp.float64 else jnp.complex64

    def in_dtype(x: Any) -> Any:
        if not is_array(x) or not floating(x):
            return x
        return np.asarray(x).astype(paired if is_complex(x) else dtype, copy=False)

    return jax.tree.map(in_dtype, tree)


def as_array(x: Any) -> Any:
    """Return a torch tensor as a NumPy array, and any other value unchanged."""
    if not hasattr(x, "detach") or not hasattr(x, "numpy"):
        return x
    tensor = x.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        return tensor.float().numpy().astype(jnp.bfloat16)
    return tensor.numpy()


def _key_name(key: Any) -> str:
    attributes = (getattr(key, attribute, None) for attribute in ("key", "name", "idx"))
    return str(next((a for a in attributes if a is not None), key))
