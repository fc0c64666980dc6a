"""A model whose layers lie side by side in memory, and back.

What XLA compiles for a training step otherwise grows with the depth: gradients are cut out of a
stack layer by layer, and every cut and every update of a parameter is a kernel of its own
(docs/speed.md "Compiling"). Held stacked, all layers of a parameter are one array to the loop, to
the gradient and to the optimiser.
"""

from __future__ import annotations

from typing import Any, TypeVar

import equinox as eqx
import jax

from megalodon_jax.layers.stack import StackedBlocks, stack_blocks, unstack_blocks
from megalodon_jax.model import MegalodonModel

Tree = TypeVar("Tree")


def stack_layers(tree: Tree) -> Tree:
    """Return a pytree whose models hold their layers stacked: arrays with a first axis of layers.

    The layers run as one loop, as with `scan_layers`, but their parameters are not stacked anew at
    every call. What asks for parameters by the names of layers (checkpoints, meshes, audits) says
    that it takes a model that is unstacked. Every parameter has one axis more: an optimiser that
    goes by `ndim`, such as one that decays matrices alone, must go by names
    (`megalodon_jax.roles.role_of`).

    Args:
        tree: a model, its gradients, the state of an optimiser whose leaves have the shapes of
            their parameters (SGD, Adam), or several of them. On a mesh stack what is placed
            already; where parts lie stays as it is. A stacked model stays as it is. Of models that
            `vmap` made it is taken under `vmap`, since the first axis is theirs.

    Raises:
        ValueError: layers differ in sizes, dtypes or backends, leaves are shapes and no arrays, or
            there is no model in `tree`.
    """
    return _with_layers(tree, "stack_layers", tuple, stack_blocks)


def unstack_layers(tree: Tree) -> Tree:
    """Return a pytree whose models hold their layers one by one: the inverse of `stack_layers`.

    Raises:
        ValueError: the first axis of a leaf is not that of the layers, or there is no model in
            `tree`.
    """
    return _with_layers(tree, "unstack_layers", StackedBlocks, unstack_blocks)


def _with_layers(tree: Tree, name: str, kind: type, change: Any) -> Tree:
    nodes, structure = jax.tree.flatten(tree, is_leaf=_is_model)
    if not any(map(_is_model, nodes)):
        raise ValueError(
            f"{name}: expected a Megalodon, its gradients or an optimiser's state, with a "
            f"MegalodonModel in it; got {type(tree).__name__} without one."
        )

    def changed(node: Any) -> Any:
        if not _is_model(node) or not isinstance(node.layers, kind):
            return node
        return eqx.tree_at(lambda m: m.layers, node, change(node.layers))

    return jax.tree.unflatten(structure, map(changed, nodes))


def _is_model(node: Any) -> bool:
    return isinstance(node, MegalodonModel)
