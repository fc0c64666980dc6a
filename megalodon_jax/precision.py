"""Audits of precision-sensitive parameters: their storage dtype, and whether they were rounded.

Source: docs/model.md "Precision".
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from typing import Any, TypeVar

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from megalodon_jax.config import checked_dtype
from megalodon_jax.roles import check_unstacked
from megalodon_jax.weights import SENSITIVE, Role, named_leaves, replace_leaves, role_of

Tree = TypeVar("Tree")


def sensitive_leaves(model: Any, also: Collection[str] = ()) -> dict[str, Any]:
    """Return the leaves that must be stored in at least float32, by name.

    Args:
        model: a pytree whose leaves have the names of parameters.
        also: names, or patterns such as `*.lora_scale`, of further sensitive leaves. For parameters
            that a user added to the model (`other_leaves`), only the user can decide this.

    Raises:
        ValueError: layers are stacked, so that one layer could hide the values of another; or no
            leaf matches a name in `also`.
    """
    check_unstacked("precision", model)
    leaves = named_leaves(model)
    if unused := [pattern for pattern in also if not fnmatch.filter(leaves, pattern)]:
        raise ValueError(
            f"precision: also={', '.join(unused)} matches no parameter; the parameters that are "
            f"not Megalodon's own are {sorted(other_leaves(model)) or 'none'}."
        )
    return {
        name: leaf
        for name, leaf in leaves.items()
        if role_of(name) in SENSITIVE or any(fnmatch.fnmatchcase(name, p) for p in also)
    }


def other_leaves(model: Any) -> dict[str, Any]:
    """Return the leaves with `Role.OTHER`, by name: parameters that a user added to the model.

    Audits treat these as sensitive only if the argument `also` names them.
    """
    return {n: leaf for n, leaf in named_leaves(model).items() if role_of(n) is Role.OTHER}


def audit_sensitive_param_dtypes(
    model: Any, *, expected_dtype: DTypeLike = jnp.float32, also: Collection[str] = ()
) -> dict[str, np.dtype]:
    """Return the dtypes, by name, of sensitive parameters that are not in `expected_dtype`.

    The result is empty if all are in `expected_dtype`. Other arguments and errors: see
    `sensitive_leaves`.
    """
    expected = jnp.dtype(expected_dtype)
    leaves = sensitive_leaves(model, also)
    return {n: np.dtype(leaf.dtype) for n, leaf in leaves.items() if leaf.dtype != expected}


def ensure_sensitive_param_dtype(
    model: Tree, *, dtype: DTypeLike = jnp.float32, also: Collection[str] = ()
) -> Tree:
    """Return the model with its sensitive parameters cast to `dtype`.

    This restores the dtype only. Digits lost in an earlier narrower cast stay lost;
    `audit_rounded_values` detects that.

    Raises:
        ValueError: `dtype` is not supported, for example float16; or see `sensitive_leaves`.
    """
    dtype = checked_dtype("dtype", dtype, "ensure_sensitive_param_dtype")
    leaves = sensitive_leaves(model, also)
    return replace_leaves(model, {n: leaf.astype(dtype) for n, leaf in leaves.items()})


def audit_rounded_values(model: Any, *, also: Collection[str] = ()) -> dict[str, int]:
    """Return the sensitive leaves in which every value is exactly representable in bfloat16.

    The result maps the name of such a leaf to its number of elements. Errors are those of
    `sensitive_leaves`.

    Such a leaf was rounded before it got its present dtype: a trained float32 tensor of n
    elements has only such values by chance with probability 2^-16n. Leaves with one repeated value
    (such as an initialisation of 0 or 1) are left out, because they prove nothing.
    """
    rounded = {}
    for name, leaf in sensitive_leaves(model, also).items():
        values = np.asarray(leaf)
        if values.size < 2 or np.all(values == values.flat[0]):
            continue
        if np.array_equal(values.astype(ml_dtypes.bfloat16).astype(values.dtype), values):
            rounded[name] = values.size
    return rounded
