"""Products of two arrays in the compute dtype, with sums and results in the wider one."""

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
"""An operation of this module is named by the line that calls it."""


def contract(equation: str, a: Array, b: Array, config: MegalodonConfig) -> Array:
    """Return an einsum of two arrays, multiplied in `compute_dtype`, in `accum_dtype`.

    If `compute_dtype` is narrower, the gradients round the cotangent to it as well, are summed in
    `accum_dtype`, and are returned in the dtype of their operand. JAX's own transpose multiplies
    the wide cotangent with the narrow operand, which a GPU does without its matrix units, and
    rounds the sums to the narrow dtype (docs/speed.md "bfloat16"). Second derivatives are JAX's.

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
    # Inside `shard_map` an operand that is equal on all shards is marked as varying, as JAX's own
    # operations do: its gradient is then summed over the shards.
    axes = _varying(a) | _varying(b)
    a, b = (jax.lax.pcast(x, tuple(axes - _varying(x)), to="varying") for x in (a, b))
    return _narrow(equation, compute, accum, None, a, b)


def _product(equation: str, compute: Any, accum: Any, placed: Any, a: Array, b: Array) -> Array:
    """Compute `contract`; `placed` is the sharding of the result on a mesh of explicit axes."""
    operands = a.astype(compute), b.astype(compute)
    return jnp.einsum(equation, *operands, preferred_element_type=accum, out_sharding=placed)


_narrow = jax.custom_jvp(_product, nondiff_argnums=(0, 1, 2, 3))


def _narrow_jvp(
    equation: str, compute: Any, accum: Any, placed: Any, primals: Any, tangents: Any
) -> tuple[Array, Any]:
    left, right, result = equation.replace("->", ",").split(",")
    transposes = f"{result},{right}->{left}", f"{result},{left}->{right}"
    dtypes, places = [x.dtype for x in primals], _placements(primals)
    # Of a frozen weight no gradient is computed, and what multiplies it need not be kept.
    moving = [i for i, dot in enumerate(tangents) if type(dot) is not SymbolicZero]
    # A plain product: policies of rematerialisation do not look into a custom derivative.
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

    # Rounded before they are kept: half the memory, and the same products.
    others = tuple(operands[1 - i] for i in moving)
    return out, linear(forward, backward, others, tuple(tangents[i] for i in moving), out)


_narrow.defjvp(_narrow_jvp, symbolic_zeros=True)


def _varying(x: Array) -> frozenset[str]:
    """Return the mesh axes along which `shard_map` knows an array to vary."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def _placements(arrays: Sequence[Array]) -> list[Any]:
    """Return the shardings of arrays of a mesh with explicit axes, which their gradients need.

    An array that is on no mesh is whole on each device of that of the others; without such a mesh
    all are None.
    """
    shardings = [jax.typeof(x).sharding for x in arrays]
    explicit = [AxisType.Explicit in sharding.mesh.axis_types for sharding in shardings]
    if not any(explicit):
        return [None] * len(arrays)
    whole = NamedSharding(shardings[explicit.index(True)].mesh, PartitionSpec())
    return [own if e else whole for own, e in zip(shardings, explicit, strict=True)]
