"""Storage dtype of each parameter, chosen by rules on its name, for any architecture.

Rules have the form of those in `megalodon_jax.policy`, with dtypes as values. Source:
docs/mla-moe.md "The stability guide" (critical parameters stay wide while the rest is float8).
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
    """Rules that give the storage dtype of a parameter by its name.

    Raises:
        ValueError: a rule is not a pair of strings, or its dtype is not one of `DTYPES`.
    """

    name: str
    rules: Rules
    """Pairs (shell pattern for the dotted name, dtype); the first match applies."""

    def __post_init__(self) -> None:
        as_policy(self.rules, DTYPES, f"policy {self.name}")

    def dtype(self, name: str) -> np.dtype:
        """Return the storage dtype of a parameter, an `np.dtype`.

        Raises:
            ValueError: no rule matches. There is no default: a forgotten parameter must not be
                stored in few bits by accident.
        """
        for pattern, dtype in self.rules:
            if fnmatchcase(name, pattern):
                return jnp.dtype(dtype)
        raise ValueError(
            f"policy {self.name}: no rule for parameter {name!r}; add one, or a last rule for '*'."
        )

    def apply(self, tree: Tree) -> Tree:
        """Return the tree with each floating-point leaf cast to its storage dtype.

        A cast to a narrower dtype clamps values to the dtype's range.

        Raises:
            ValueError: no rule matches a leaf.
        """
        return replace_leaves(tree, {n: _cast(x, self.dtype(n)) for n, x in _floating(tree)})

    def bytes(self, tree: Any) -> int:
        """Return the total bytes of all floating-point leaves if stored in the policy's dtypes."""
        return sum(x.size * self.dtype(n).itemsize for n, x in _floating(tree))


def _floating(tree: Any) -> list[tuple[str, Any]]:
    leaves: Mapping[str, Any] = named_leaves(tree)
    return [(n, x) for n, x in leaves.items() if jnp.issubdtype(x.dtype, jnp.floating)]


def _cast(x: Any, dtype: np.dtype) -> Any:
    top = float(jnp.finfo(dtype).max)
    # A cast to e4m3 turns values beyond its range into NaN.
    return (
        jnp.clip(x, -top, top).astype(dtype)
        if dtype.itemsize < x.dtype.itemsize
        else x.astype(dtype)
    )
