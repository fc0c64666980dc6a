"""Which parameter is stored in which dtype: the rules of `megalodon_jax.policy`, of dtypes.

Generic: it knows no architecture. Source: docs/mla-moe.md "The
stability guide" (critical parameters stay wide while the rest is float8).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from megalodon_jax.policy import Policy as Rules
from megalodon_jax.policy import as_policy
from megalodon_jax.weights import named_leaves, replace_leaves

Tree = TypeVar("Tree")
DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Policy:
    """Dtypes by pattern of a parameter's name.

    Raises:
        ValueError: a rule is no pair of strings, or names another dtype than `DTYPES`.
    """

    name: str
    rules: Rules
    """(shell pattern over the dotted name, dtype), the first that matches decides."""

    def __post_init__(self) -> None:
        as_policy(self.rules, DTYPES, f"policy {self.name}")

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype a parameter is stored in.

        Raises:
            ValueError: no rule fits; what nobody decided must not be narrowed by accident.
        """
        for pattern, dtype in self.rules:
            if fnmatchcase(name, pattern):
                return jnp.dtype(dtype)
        raise ValueError(f"policy {self.name}: no rule for parameter {name!r}; end with '*'.")

    def apply(self, tree: Tree) -> Tree:
        """Return the tree with every floating-point leaf in its dtype, clamped to its range."""
        return replace_leaves(tree, {n: _cast(x, self.dtype(n)) for n, x in _floating(tree)})

    def bytes(self, tree: Any) -> int:
        """Return what the floating-point leaves would take."""
        return sum(x.size * self.dtype(n).itemsize for n, x in _floating(tree))


def _floating(tree: Any) -> list[tuple[str, Any]]:
    leaves: Mapping[str, Any] = named_leaves(tree)
    return [(n, x) for n, x in leaves.items() if jnp.issubdtype(x.dtype, jnp.floating)]


def _cast(x: Any, dtype: np.dtype) -> Any:
    top = float(jnp.finfo(dtype).max)
    # A cast to e4m3 makes NaN of what is beyond its range.
    return (
        jnp.clip(x, -top, top).astype(dtype)
        if dtype.itemsize < x.dtype.itemsize
        else x.astype(dtype)
    )
