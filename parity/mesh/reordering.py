"""Noise floor of a mesh: change of the results on one device if sums are taken in another order.

On a mesh, sums are split over devices and so taken in another order. This module imitates the other
order on one device. The terms of every matrix product, convolution, sum and scatter-add are
permuted (by a stride, from a start that depends on a seed) and added in two halves. Grouped
convolutions, cumulative sums such as `cumsum`, and everything inside a `while` or branch are
unchanged. The resulting change is the noise floor. Source: docs/sharding.md "The noise floor".
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from parity.engine.programs.jaxprs import bind

SEEDS = 4
"""Number of runs with reordered sums; the noise floor is the root mean square of the changes."""
STRIDE = 7
"""Largest distance of consecutive terms in the new order. A distance above 1 separates neighbours
in memory, which a SIMD register would hold together."""


def reordered(seed: Any) -> Any:
    """Return a function that evaluates an equation with reordered sums (`replay.Operation`).

    Equations without a sum are evaluated unchanged. `seed` is a traced integer.
    """

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
        if kind == "conv_general_dilated":
            p = eqn.params
            numbers = p["dimension_numbers"]
            # The summed axis: input features or, in the gradient of a kernel, the batch.
            features = numbers.lhs_spec[1], numbers.rhs_spec[1]
            whole = p["feature_group_count"] == p["batch_group_count"] == 1
            if whole and inputs[0].shape[features[0]] > 1:
                return _in_parts(eqn, inputs, features, seed)
        if kind == "scatter-add":
            numbers = eqn.params["dimension_numbers"]
            window = numbers.update_window_dims
            along = enumerate(a for a in range(inputs[2].ndim) if a not in window)
            axes = [(i, a) for i, a in along if inputs[2].shape[a] > 1]
            if axes and not numbers.operand_batching_dims:
                return _onto(eqn, inputs, axes[0], seed)
        return bind(eqn, inputs)

    return operation


def _in_parts(eqn: JaxprEqn, inputs: list[Any], axes: tuple[int, ...], seed: Any) -> list[Any]:
    """Evaluate a sum over one axis of every operand as two halves, with permuted terms.

    `axes` is the summed axis of each operand.
    """
    length = inputs[0].shape[axes[0]]
    order = _order(length, seed)
    turned = [jnp.take(x, order, axis=axis) for x, axis in zip(inputs, axes, strict=True)]
    half = length // 2

    def part(start: int, stop: int) -> Any:
        cut = [
            jax.lax.slice_in_dim(x, start, stop, axis=axis)
            for x, axis in zip(turned, axes, strict=True)
        ]
        return bind(eqn, cut)[0]

    return [part(0, half) + part(half, length)]


def _onto(eqn: JaxprEqn, inputs: list[Any], axes: tuple[int, int], seed: Any) -> list[Any]:
    """Evaluate a scatter-add as two halves, with permuted addends.

    The second half starts from zeros, like a second device. `axes` are an axis of the indices and
    the corresponding axis of the addends.
    """
    onto, *both = inputs
    length = both[0].shape[axes[0]]
    order = _order(length, seed)
    turned = [jnp.take(x, order, axis=axis) for x, axis in zip(both, axes, strict=True)]
    eqn = eqn.replace(params=eqn.params | {"indices_are_sorted": False})
    half = length // 2

    def part(onto: Any, start: int, stop: int) -> Any:
        cut = [
            jax.lax.slice_in_dim(x, start, stop, axis=axis)
            for x, axis in zip(turned, axes, strict=True)
        ]
        return bind(eqn, [onto, *cut])[0]

    return [part(onto, 0, half) + part(jnp.zeros_like(onto), half, length)]


def _order(length: int, seed: Any) -> Any:
    """Return a permutation of `length` indices: a stride, from a start that depends on `seed`."""
    stride = next(s for s in range(min(STRIDE, length - 1), 0, -1) if math.gcd(s, length) == 1)
    order = (jnp.arange(length, dtype=seed.dtype) * stride + seed + 1) % length
    return order
