"""What the order of sums alone does: the program on one device with every sum taken otherwise.

A mesh adds what its devices have in another order than one device does, and in parts. So does this:
every product and every sum walks its terms from another one on, in strides, and in two parts. How
far results move is the noise floor of a mesh. Source: docs/meshes.md "The noise floor".
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from parity.engine.jaxprs import bind

SEEDS = 4
"""Orders of every sum: the floor is the root mean square over them, and a mesh is one more."""
STRIDE = 7
"""A term and the next one are about this far apart, so that neighbours meet in no one register."""


def reordered(seed: Any) -> Any:
    """Return the operation that takes sums in the order of a traced seed, and all else as it is."""

    def operation(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
        kind = eqn.primitive.name
        if kind == "dot_general":
            (left, right), _ = eqn.params["dimension_numbers"]
            if left and inputs[0].shape[left[0]] > 1:
                return _in_parts(eqn, inputs, (left[0], right[0]), seed)
        if kind == "reduce_sum":
            axes = [a for a in eqn.params["axes"] if inputs[0].shape[a] > 1]
            if axes:
                return _in_parts(eqn, inputs, (axes[0],), seed)
        return bind(eqn, inputs)

    return operation


def _in_parts(eqn: JaxprEqn, inputs: list[Any], axes: tuple[int, ...], seed: Any) -> list[Any]:
    """Return the sum over one axis of every operand as that of two halves in another order."""
    length = inputs[0].shape[axes[0]]
    stride = next(s for s in range(min(STRIDE, length - 1), 0, -1) if math.gcd(s, length) == 1)
    order = (jnp.arange(length, dtype=seed.dtype) * stride + seed + 1) % length
    turned = [jnp.take(x, order, axis=axis) for x, axis in zip(inputs, axes, strict=True)]
    half = length // 2

    def part(start: int, stop: int) -> Any:
        cut = [
            jax.lax.slice_in_dim(x, start, stop, axis=axis)
            for x, axis in zip(turned, axes, strict=True)
        ]
        return bind(eqn, cut)[0]

    return [part(0, half) + part(half, length)]
