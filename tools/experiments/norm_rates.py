"""AdamW with a separate learning rate for norms, and the bytes that a run allocates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import optax

from megalodon_jax.weights import dotted


def adamw(
    lr: float, norm_lr: float, is_norm: Callable[[str], bool]
) -> optax.GradientTransformation:
    """Return AdamW without weight decay, with another learning rate for norm weights.

    Args:
        lr: the learning rate.
        norm_lr: factor on the learning rate of norm weights.
        is_norm: function parameter name -> whether it is a norm weight.
    """

    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "norm" if is_norm(dotted(path)) else "other", params
        )

    rates = {"norm": lr * norm_lr, "other": lr}
    each: Any = {n: optax.adamw(rate, weight_decay=0.0) for n, rate in rates.items()}
    return each["other"] if norm_lr == 1.0 else optax.partition(each, labels)


def nbytes(tree: Any) -> int:
    """Return the bytes of all arrays in a pytree."""
    return sum(x.nbytes for x in jax.tree.leaves(tree) if eqx.is_array(x))
