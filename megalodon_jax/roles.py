"""Names and roles of parameters.

The torch name of a parameter is the path of its leaf in the pytree. Source: docs/model.md "State
dict".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

import jax

Tree = TypeVar("Tree")


class Role(StrEnum):
    """Purpose of a parameter; decides its storage dtype, mesh placement, probes and remedies."""

    EMBEDDING = "embedding"
    HEAD = "head"
    LINEAR = "linear"
    BIAS = "bias"
    NORM = "norm"
    CEMA = "cema"
    QK_AFFINE = "q/k affine"
    LORA = "lora"
    """Matrix of an adapter (`megalodon_jax.lora`); never in a plain model."""
    OTHER = "other"
    """Parameter that no rule in `_ROLES` names, such as one added by a user; this project's own
    models have none."""


SENSITIVE = frozenset({Role.NORM, Role.CEMA, Role.QK_AFFINE})
"""Roles stored in at least float32, whatever dtype the model computes in (docs/model.md
"Precision")."""

_ROLES = (
    (r"(^|\.)lora_[AB](\.weight)?$", Role.LORA),
    (r"(^|\.)embed\.weight$", Role.EMBEDDING),
    (r"(^|\.)lm_head\.weight$", Role.HEAD),
    (r"(^|\.)cema\.\w+$", Role.CEMA),
    (r"(^|\.)(timenorm|rmsnorm|norm)\.\w+$", Role.NORM),
    (r"(^|\.)attn\.(gamma|beta)$", Role.QK_AFFINE),
    (r"\.bias$", Role.BIAS),
    (r"\.weight$", Role.LINEAR),
)

_STACKED = re.compile(r"(^|\.)layers\.block\.")


def role_of(name: str) -> Role:
    """Return the role of a parameter by its torch name; `Role.OTHER` if no rule names it.

    Parameters that a user added to a model are saved like any other. Every parameter of this
    project's own models must have a rule, which a test checks.
    """
    return next((role for pattern, role in _ROLES if re.search(pattern, name)), Role.OTHER)


def named_leaves(tree: Any) -> dict[str, Any]:
    """Return the array leaves of a pytree by dotted path, in pytree order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {dotted(path): leaf for path, leaf in leaves if hasattr(leaf, "dtype")}


def check_unstacked(caller: str, tree: Any) -> None:
    """Check that no layers are stacked, for code that looks up parameters by layer.

    Raises:
        ValueError: layers are stacked (`megalodon_jax.stack_layers`); the message begins with
            `caller`, the name of the calling function.
    """
    if stacked := next((name for name in named_leaves(tree) if _STACKED.search(name)), None):
        raise ValueError(
            f"{caller}: expected layers one by one, but {stacked} holds all layers; call "
            "unstack_layers first, on the model and on its optimiser's state."
        )


def dotted(path: tuple[Any, ...]) -> str:
    """Return a pytree path in torch's notation: `model.layers.0.attn.wz.weight`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def replace_leaves(tree: Tree, values: Mapping[str, Any]) -> Tree:
    """Return `tree` with the array leaves named in `values` replaced; shapes are not checked."""

    def pick(path: tuple[Any, ...], leaf: Any) -> Any:
        return values.get(dotted(path), leaf)

    return jax.tree_util.tree_map_with_path(pick, tree)
