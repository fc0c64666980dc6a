"""A model's leaves as tensors for export; values are copied only when a tensor is read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from megalodon_jax.roles import named_leaves
from megalodon_jax.stacked import unstack_layers

_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class LeafTensor:
    """A leaf of a model, or one layer of a stacked leaf, as a tensor to export.

    It has the interface of `megalodon_jax.tensor_files.Tensor`.
    """

    leaf: Any
    dtype: str
    """Name of the dtype that `read` returns."""
    layer: int | None = None
    """Layer to take from a leaf of stacked layers; None: the whole leaf is the tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor, without the axis of stacked layers."""
        shape = tuple(self.leaf.shape)
        return shape if self.layer is None else shape[1:]

    def read(self, rows: slice | None = None) -> np.ndarray:
        """Return the tensor, or `rows` of its first axis; possibly a view of the model's memory."""
        leaf = self.leaf if self.layer is None else self.leaf[self.layer]
        leaf = leaf if rows is None else leaf[rows]
        if leaf.dtype != self.dtype:
            leaf = leaf.astype(self.dtype)
        elif leaf is self.leaf and isinstance(leaf, jax.Array) and not _on_host(leaf):
            # A JAX array caches its NumPy value. The cache of a copy is freed with the copy, while
            # each of the model's own leaves would keep its cache.
            leaf = jnp.copy(leaf)
        return np.asarray(leaf, order="C")

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows of the tensor whose indices are in `rows`, in that order."""
        return self.read()[rows]


def leaf_tensors(model: Any) -> dict[str, LeafTensor]:
    """Return the leaves of a model by torch name, in their dtypes; stacked layers are split.

    Nothing is copied yet: a layer is taken from the stack when its tensor is read.
    """
    leaves = named_leaves(model)
    abstract = named_leaves(eqx.filter_eval_shape(unstack_layers, eqx.filter(model, _is_leaf)))
    return {name: _tensor(name, leaves) for name in abstract}


def _tensor(name: str, leaves: dict[str, Any]) -> LeafTensor:
    found, layer = leaves.get(name), None
    if found is None:
        match = _LAYER.search(name)
        assert match is not None
        found = leaves[_LAYER.sub(r"\1layers.block.", name, count=1)]
        layer = int(match[2])
    if jax.dtypes.issubdtype(found.dtype, jax.dtypes.prng_key):
        # NumPy has no key arrays, so store their numbers.
        found = jax.random.key_data(found)
    return LeafTensor(found, np.dtype(found.dtype).name, layer)


def _is_leaf(leaf: Any) -> bool:
    return hasattr(leaf, "dtype")


def _on_host(array: jax.Array) -> bool:
    """Return whether NumPy can read an array in place, without a copy."""
    devices = array.sharding.device_set
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"
