"""Products of two arrays rounded to the compute dtype, with sums and results in `accum_dtype`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from megalodon_jax.config import MegalodonConfig
from megalodon_jax.layers.written_transpose import linear

__tracebackhide__ = True
"""Precision reports attribute operations of this module to the line that calls the module."""


def contract(equation: str, a: Array, b: Array, config: MegalodonConfig) -> Array:
    """Return an einsum of two arrays, which are rounded to `compute_dtype`; sums in `accum_dtype`.

    If `compute_dtype` is narrower than `accum_dtype`, the products of the gradients round the
    cotangent to `compute_dtype` too and sum in `accum_dtype`; each gradient gets the dtype of its
    operand. JAX's own transpose multiplies the wide cotangent with the narrow operand, for which a
    GPU does not use its matrix units, and rounds the sums to the narrow dtype (docs/speed.md
    "bfloat16"). Higher derivatives follow the same rule.

    Args:
        equation: two operands and the result; each index occurs in at least two of the three.
        a: first operand.
        b: second operand.
        config: gives the dtypes.
    """
    compute, accum = jnp.dtype(config.compute_dtype), jnp.dtype(config.accum_dtype)
    if compute.itemsize == accum.itemsize:
        operands = a.astype(compute), b.astype(compute)
        return jnp.einsum(equation, *operands, preferred_element_type=accum)
    # Inside `shard_map`, mark an operand that is equal on all shards as varying, as JAX's own
    # operations do, so that its gradient is summed over the shards.
    axes = _varying(a) | _varying(b)
    a, b = (jax.lax.pcast(x, tuple(axes - _varying(x)), to="varying") for x in (a, b))
    return _narrow(equation, compute, accum, None, a, b)


def _product(equation: str, compute: Any, accum: Any, placed: Any, a: Array, b: Array) -> Array:
    """Compute `contract`; `placed` is the result's sharding on Explicit mesh axes, else None."""
    operands = a.astype(compute), b.astype(compute)
    return jnp.einsum(equation, *operands, preferred_element_type=accum, out_sharding=placed)


_narrow = jax.custom_jvp(_product, nondiff_argnums=(0, 1, 2, 3))


def _narrow_jvp(
    equation: str, compute: Any, accum: Any, placed: Any, primals: Any, tangents: Any
) -> tuple[Array, Any]:
    left, right, result = equation.replace("->", ",").split(",")
    transposes = f"{result},{right}->{left}", f"{result},{left}->{right}"
    dtypes, places = [x.dtype for x in primals], _placements(primals)
    # A frozen weight gets no gradient, so the other operand need not be kept for one.
    moving = [i for i, dot in enumerate(tangents) if type(dot) is not SymbolicZero]
    # Not `_narrow`: rematerialisation policies do not see the product in a custom derivative.
    operands = [x.astype(compute) for x in primals]
    out = _product(equation, compute, accum, placed, *operands)
    if not moving:
        return out, jnp.zeros_like(out)

    def forward(others: tuple[Array, ...], dots: tuple[Array, ...]) -> Array:
        pairs = [
            (dot, other) if i == 0 else (other, dot)
            for i, other, dot in zip(moving, others, dots, strict=True)
        ]
        first, *more = (_narrow(equation, compute, accum, placed, *pair) for pair in pairs)
        return sum(more, first)

    def backward(others: tuple[Array, ...], bar: Array) -> tuple[Array, ...]:
        gradients = []
        for i, other in zip(moving, others, strict=True):
            gradient = _narrow(transposes[i], compute, accum, places[i], bar, other)
            gradients.append(gradient.astype(dtypes[i]))
        return tuple(gradients)

    # The rounded operands are kept for the gradients: half the memory, and the same products.
    others = tuple(operands[1 - i] for i in moving)
    return out, linear(forward, backward, others, tuple(tangents[i] for i in moving), out)


_narrow.defjvp(_narrow_jvp, symbolic_zeros=True)


def _varying(x: Array) -> frozenset[str]:
    """Return the mesh axes over which an array is marked as varying inside `shard_map`."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def _placements(arrays: Sequence[Array]) -> list[Any]:
    """Return the shardings of arrays on a mesh with Explicit axes, which their gradients must have.

    An array that is not on such a mesh counts as replicated on the mesh of the other arrays. If no
    array is on such a mesh, all results are None.
    """
    shardings = [jax.typeof(x).sharding for x in arrays]
    explicit = [AxisType.Explicit in sharding.mesh.axis_types for sharding in shardings]
    if not any(explicit):
        return [None] * len(arrays)
    whole = NamedSharding(shardings[explicit.index(True)].mesh, PartitionSpec())
    return [own if e else whole for own, e in zip(shardings, explicit, strict=True)]
