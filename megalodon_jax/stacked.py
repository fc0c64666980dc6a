"""Stacks the layers of a model in memory, and unstacks them.

Without stacking, even with `scan_layers`, the compile time of a training step grows with the depth:
gradients are sliced from a stack layer by layer, and every slice and every update of a parameter is
a separate kernel (docs/speed.md "Compiling"). With stacked layers, each parameter is one array for
the loop, the gradient and the optimiser.
"""

from __future__ import annotations

from typing import Any, TypeVar

import equinox as eqx
import jax

from megalodon_jax.layers.stack import StackedBlocks, stack_blocks, unstack_blocks
from megalodon_jax.model import MegalodonModel

Tree = TypeVar("Tree")


def stack_layers(tree: Tree) -> Tree:
    """Return a pytree whose models hold their layers stacked, along a first axis of all arrays.

    The layers run as one loop, as with `scan_layers`, but their parameters are not stacked again at
    every call. Functions that look up parameters by layer names (checkpoints, meshes, audits) raise
    ValueError for a stacked model. Every parameter has one more axis, so an optimiser that depends
    on `ndim`, such as one that decays matrices only, must use names instead
    (`megalodon_jax.roles.role_of`).

    Args:
        tree: a model, its gradients, an optimiser state whose leaves have the shapes of their
            parameters (SGD, Adam), or several of these. A stacked model is returned unchanged.
            Stacking keeps the placement of arrays on a mesh, so shard the model before. For models
            made by `vmap`, call this under `vmap`, since their first axis is that of `vmap`.

    Raises:
        ValueError: layers differ in sizes, dtypes or GEMM backends, a leaf is not an array but, for
            example, a `jax.ShapeDtypeStruct`, or there is no model in `tree`.
    """
    return _with_layers(tree, "stack_layers", tuple, stack_blocks)


def unstack_layers(tree: Tree) -> Tree:
    """Return a pytree whose models hold their layers one by one: the inverse of `stack_layers`.

    Raises:
        ValueError: the size of a leaf's first axis is not the number of layers, or there is no
            model in `tree`.
    """
    return _with_layers(tree, "unstack_layers", StackedBlocks, unstack_blocks)


def _with_layers(tree: Tree, name: str, kind: type, change: Any) -> Tree:
    nodes, structure = jax.tree.flatten(tree, is_leaf=_is_model)
    if not any(map(_is_model, nodes)):
        raise ValueError(
            f"{name}: expected a pytree that contains a MegalodonModel (a model, its gradients or "
            f"an optimiser's state), got {type(tree).__name__} without one."
        )

    def changed(node: Any) -> Any:
        if not _is_model(node) or not isinstance(node.layers, kind):
            return node
        return eqx.tree_at(lambda m: m.layers, node, change(node.layers))

    return jax.tree.unflatten(structure, map(changed, nodes))


def _is_model(node: Any) -> bool:
    return isinstance(node, MegalodonModel)
