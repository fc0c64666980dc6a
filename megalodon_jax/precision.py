"""Precision-sensitive parameters: are they stored wide, and do they still hold wide values?

Source: docs/model.md "Precision".
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from megalodon_jax.config import checked_dtype
from megalodon_jax.roles import check_unstacked
from megalodon_jax.weights import SENSITIVE, named_leaves, replace_leaves, role_of

Tree = TypeVar("Tree")


def sensitive_leaves(model: Any) -> dict[str, Any]:
    """Return the leaves that must stay in at least float32, by name.

    Raises:
        ValueError: layers are stacked: one of them would hide what another holds.
    """
    check_unstacked("precision", model)
    return {n: leaf for n, leaf in named_leaves(model).items() if role_of(n) in SENSITIVE}


def audit_sensitive_param_dtypes(
    model: Any, *, expected_dtype: DTypeLike = jnp.float32
) -> dict[str, np.dtype]:
    """Return the sensitive parameters not stored in `expected_dtype`; empty means clean."""
    expected = jnp.dtype(expected_dtype)
    leaves = sensitive_leaves(model)
    return {n: np.dtype(leaf.dtype) for n, leaf in leaves.items() if leaf.dtype != expected}


def ensure_sensitive_param_dtype(model: Tree, *, dtype: DTypeLike = jnp.float32) -> Tree:
    """Return the model with its sensitive parameters cast to `dtype`.

    This mends the dtype only: digits a narrower cast took away are gone, and
    `audit_rounded_values` is how to see it.

    Raises:
        ValueError: `dtype` is none this project stores, such as float16.
    """
    dtype = checked_dtype("dtype", dtype, "ensure_sensitive_param_dtype")
    leaves = sensitive_leaves(model)
    return replace_leaves(model, {n: leaf.astype(dtype) for n, leaf in leaves.items()})


def audit_rounded_values(model: Any) -> dict[str, int]:
    """Return sensitive leaves whose every value is exactly a bfloat16 number, with their sizes.

    Such a leaf was rounded before it got its present dtype: chance would do this to a trained
    float32 tensor of n elements with probability 2^-16n. Leaves holding one repeated value (an
    initialisation such as 0 or 1) prove nothing and are not reported.
    """
    rounded = {}
    for name, leaf in sensitive_leaves(model).items():
        values = np.asarray(leaf)
        if values.size < 2 or np.all(values == values.flat[0]):
            continue
        if np.array_equal(values.astype(ml_dtypes.bfloat16).astype(values.dtype), values):
            rounded[name] = values.size
    return rounded
