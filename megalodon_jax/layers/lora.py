"""A linear map with a frozen matrix and a low-rank adapter.

Source: docs/guide.md "LoRA".
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any, TypeGuard, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from megalodon_jax.config import widened
from megalodon_jax.layers.dropout import dropout
from megalodon_jax.layers.entry import check_inputs, check_sizes
from megalodon_jax.layers.linear import Linear, linear_maps, matmul

Tree = TypeVar("Tree")
_FIRST_KEY = 1 << 16
"""First index of `fold_in` for adapters. `fold_in(key, i)` is the i-th key of `split(key)`, so the
indices of adapters begin after all keys that a block splits off for its own dropout."""


class LoRALinear(Linear):
    """`x W^T + b + scale (x A^T) B^T`, with the weight and bias of the `Linear` it replaces.

    As a subclass of `Linear` it keeps the name of the weight. So code that uses names (checkpoints,
    meshes, audits) finds the frozen matrix in its usual place, and the adapter beside it.
    """

    # PEFT's names, which its files use.
    lora_A: Float[Array, "rank in"]  # noqa: N815
    lora_B: Float[Array, "out rank"]  # noqa: N815
    alpha: float = eqx.field(static=True)
    rslora: bool = eqx.field(static=True)
    """Whether alpha is divided by the square root of the rank instead of the rank."""
    dropout: float = eqx.field(static=True)
    """Dropout rate of the adapter's inputs (not the matrix's) in training."""
    key: jax.Array | None
    """Dropout key of one training step; None, as in a stored model, means no dropout."""

    def __init__(
        self,
        base: Linear,
        lora_A: Float[Array, "rank in"],
        lora_B: Float[Array, "out rank"],
        *,
        alpha: float,
        rslora: bool = False,
        dropout: float = 0.0,
    ):
        for field in dataclasses.fields(Linear):
            setattr(self, field.name, getattr(base, field.name))
        self.lora_A, self.lora_B = lora_A, lora_B
        self.alpha, self.rslora, self.dropout = float(alpha), bool(rslora), float(dropout)
        self.key = None

    @property
    def rank(self) -> int:
        """Rank of the adapter: the number of rows of A and of columns of B."""
        return self.lora_A.shape[-2]

    @property
    def scale(self) -> float:
        """Factor by which B A is multiplied before it is added to W."""
        return scale_of(self.alpha, self.rank, self.rslora)

    def __call__(self, x: Float[Array, "... in"]) -> Float[Array, "... out"]:
        """Map (..., in) to (..., out) in `config.accum_dtype`; errors as for `Linear`."""
        y = super().__call__(x)
        out_features, in_features = self.weight.shape
        check_inputs(
            "LoRALinear",
            lora_A=(self.lora_A, ("rank", in_features)),
            lora_B=(self.lora_B, (out_features, "rank")),
        )
        inside = matmul(dropout(x, self.dropout, self.key), self.lora_A, self.config)
        change = matmul(inside, self.lora_B, self.config)
        # Scaled in at least float32: alpha / rank need not be a bfloat16 number.
        return y + (change.astype(widened(change.dtype)) * self.scale).astype(y.dtype)

    def merged(self) -> Linear:
        """Return the plain `Linear` with weight W + scale B A, also for stacked layers.

        The sum is computed in the widest of the three dtypes, at least float32, and rounded once.
        """
        dtypes = (self.weight.dtype, self.lora_A.dtype, self.lora_B.dtype)
        wide = widened(max(dtypes, key=lambda dtype: dtype.itemsize))
        A, B = self.lora_A.astype(wide), self.lora_B.astype(wide)
        # Without `precision` a GPU would multiply in TF32, and a TPU in bfloat16.
        change = jnp.matmul(B, A, precision=jax.lax.Precision.HIGHEST) * self.scale
        plain = object.__new__(Linear)
        for field in dataclasses.fields(Linear):
            object.__setattr__(plain, field.name, getattr(self, field.name))
        weight = (self.weight.astype(wide) + change).astype(self.weight.dtype)
        object.__setattr__(plain, "weight", weight)
        return plain


def scale_of(alpha: float, rank: int, rslora: bool) -> float:
    """Return the factor of B A: alpha / rank, or alpha / sqrt(rank) with `rslora`."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def init_adapter(
    base: Linear, rank: int, *, key: jax.Array, dtype: Any = None
) -> tuple[Float[Array, "rank in"], Float[Array, "out rank"]]:
    """Return A, drawn uniformly in +-1/sqrt(in), and B, zeros, so `base` is unchanged at first.

    Args:
        base: the map that gets the adapter.
        rank: rank of the adapter.
        key: PRNG key.
        dtype: dtype of both; None is the model's parameter dtype, at least float32. Adapters are
            small, and in bfloat16 much of an update to A is lost to rounding.

    Raises:
        ValueError: the rank is not a positive integer.
    """
    check_sizes("LoRA", rank=rank)
    out_features, in_features = base.weight.shape
    stored = base.config.sensitive_dtype if dtype is None else jnp.dtype(dtype)
    # Features of x A^T are then about as large as those of x for any width, as for torch's initial
    # linear maps.
    bound = in_features**-0.5
    A = jax.random.uniform(key, (rank, in_features), widened(stored), -bound, bound)
    return A.astype(stored), jnp.zeros((out_features, rank), stored)


def lora_maps(tree: Any) -> dict[str, LoRALinear]:
    """Return the linear maps that have an adapter, by dotted path, in pytree order."""
    return {name: node for name, node in linear_maps(tree).items() if is_lora(node)}


def is_lora(node: Any) -> TypeGuard[LoRALinear]:
    """Return whether a node of a pytree is a linear map with an adapter."""
    return isinstance(node, LoRALinear)


def with_dropout_keys(tree: Tree, key: jax.Array | None) -> Tree:
    """Return `tree` with a dropout key for each adapter, derived from `key`; unchanged for None."""
    if key is None or not any(node.dropout for node in lora_maps(tree).values()):
        return tree
    count = iter(range(_FIRST_KEY, 2 * _FIRST_KEY))

    def keyed(node: Any) -> Any:
        if not is_lora(node):
            return node
        node = copy.copy(node)
        object.__setattr__(node, "key", jax.random.fold_in(key, next(count)))
        return node

    return jax.tree.map(keyed, tree, is_leaf=is_lora)
