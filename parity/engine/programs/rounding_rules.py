"""Evaluation of each JAX operation in float64, perturbed by the error that its own dtype causes.

Source: docs/your-own-port.md "What a tolerance is made of".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from parity.engine.measure.rounding_noise import UNIT_ROUNDOFF
from parity.engine.programs.jaxprs import aval, bind, interpret, opened
from parity.engine.programs.rounding import Signs

UNITS = {
    "float64": UNIT_ROUNDOFF,
    "float32": UNIT_ROUNDOFF,
    "complex64": UNIT_ROUNDOFF,
    "complex128": UNIT_ROUNDOFF,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
}
"""Unit roundoff by the dtype of an operation's result. float64 and complex128 get float32's unit
roundoff: a program has them only because 64-bit types are enabled for the float64 run."""
_EXACT = """
abs and argmax argmin bitcast_convert_type broadcast_in_dim ceil clamp concatenate copy copy_p
dynamic_slice dynamic_update_slice eq expand_dims floor gather ge gt imag iota is_finite le lt max
min ne neg not optimization_barrier or pad real reduce_and reduce_max reduce_min reduce_or
reduce_precision reshape rev round scatter select_and_gather_add select_n sign slice sort split
squeeze stop_gradient top_k transpose xor conj cummax cummin convert_element_type random_bits
random_wrap random_unwrap random_seed random_fold_in
"""
EXACT = frozenset(_EXACT.split())
"""Operations that do not round."""
_ELEMENTARY = """
exp exp2 expm1 log log1p tanh erf erfc erf_inv logistic sin cos tan pow rsqrt atan2 cbrt lgamma
digamma sinh cosh asinh acosh atanh asin acos atan
"""
ELEMENTARY = frozenset(_ELEMENTARY.split())
# Vectorised exp, sin and the like are not correctly rounded: XLA's and SLEEF's are within 4 units.
ELEMENTARY_UNITS = 4.0
"""Error of elementary functions, in unit roundoffs."""
CALLBACKS = frozenset(("pure_callback", "io_callback", "ffi_call"))
"""Calls of code outside of JAX, which works only in the dtypes it was written for."""
UNOPENED = CALLBACKS | {"shard_map"}
"""Operations that run unchanged, in their own dtypes. The body of a `shard_map` has axes of a mesh,
without which it cannot be traced again in float64."""
SUMS = frozenset(("reduce_sum", "cumsum", "reduce_window_sum", "cumlogsumexp", "cumprod"))
"""Operations whose operand is perturbed as by the rounding of partial sums (`_summands`)."""


def wide(dtype: Any) -> Any:
    """Return the dtype that a float64 run uses for `dtype`: float64, complex128, or `dtype` itself
    if it is not floating-point."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.dtype("complex128")
    return jnp.dtype("float64") if jnp.issubdtype(dtype, jnp.floating) else dtype


def rounded(
    eqn: JaxprEqn,
    inputs: Sequence[Any],
    signs: Signs | None,
    notices: dict[str, None],
    *,
    counted: bool = False,
) -> list[Any]:
    """Evaluate one operation in float64, perturbed by the rounding error of the program's dtype.

    Args:
        eqn: equation of the program, in the program's dtypes.
        inputs: operands; floating-point ones are float64.
        signs: signs of the perturbation; None to perturb nothing.
        notices: receives a sentence for each operation that has no float64 version; such operations
            run in their own dtypes.
        counted: whether the operation reads only numbers written in the code and counters, so that
            a result with few digits, such as a position, is exact.
    """
    unit = max(
        (UNITS.get(aval(v).dtype.name, 0.0) for v in eqn.outvars if hasattr(aval(v), "dtype")),
        default=0.0,
    )
    name = eqn.primitive.name
    if signs is not None and unit and not signs.narrow:
        unit = UNIT_ROUNDOFF
    if signs is not None and unit:
        inputs = _summands(eqn, signs.inside(name, list(inputs)), signs, unit)
    try:
        if name in UNOPENED:
            raise NotImplementedError
        outputs = _bound(eqn, inputs)
    except (TypeError, ValueError, NotImplementedError) as error:
        notices[f"{name} ran in its own dtype instead of float64: {type(error).__name__}"] = None
        outputs = _bound_as_is(eqn, inputs)
    if signs is None or not unit:
        return outputs
    narrower = name == "convert_element_type" and unit > UNITS.get(
        aval(eqn.invars[0]).dtype.name, 0.0
    )
    if name in EXACT and not narrower:
        return outputs
    if narrower and not _is_real(eqn.invars[0]):
        # An integer below 1 / unit is a number of the narrower dtype, such as the 1 of a mask.
        exact = jnp.abs(outputs[0]) <= 1 / unit
        return [jnp.where(exact, outputs[0], signs.moved(outputs[0], unit))]
    units = ELEMENTARY_UNITS if name in ELEMENTARY or _is_power(eqn) else 1.0
    return [
        signs.moved(x, unit * units, counted=counted) if jnp.issubdtype(x.dtype, jnp.inexact) else x
        for x in outputs
    ]


def _summands(eqn: JaxprEqn, inputs: list[Any], signs: Signs, unit: float) -> list[Any]:
    """Return the operands of a summing operation, perturbed as by the rounding of partial sums.

    One factor of each term is perturbed, so that the error is relative to the terms rather than to
    their sum, in which they may cancel. The operands of other operations are returned unchanged.
    """
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        terms = math.prod(inputs[0].shape[axis] for axis in contracted)
        # Integers, such as a mask of heads, are exact: a perturbed 1 would be cut to 0.
        real = [i for i in (0, 1) if _is_real(eqn.invars[i])]
        if real:
            smaller = min(real, key=lambda i: math.prod(inputs[i].shape))
            inputs[smaller] = signs.moved(inputs[smaller], _sum_units(terms) * unit)
    elif name == "conv_general_dilated":
        features = eqn.params["dimension_numbers"].rhs_spec[0]
        terms = math.prod(inputs[1].shape) // max(1, inputs[1].shape[features])
        inputs[1] = signs.moved(inputs[1], _sum_units(terms) * unit)
    elif name in SUMS or name in ("scatter-add", "scatter_add"):
        # A scatter adds few terms per element. A sum adds input size / output size terms.
        size = math.prod(np.shape(inputs[0]))
        terms = max(1, size // max(1, math.prod(aval(eqn.outvars[0]).shape)))
        if name.startswith("cum"):
            terms = inputs[0].shape[eqn.params["axis"]]
        elif name == "reduce_window_sum":
            # Windows may overlap, so sizes do not show how many terms each window has.
            terms = math.prod(eqn.params["window_dimensions"])
        which = 2 if name.startswith("scatter") else 0
        inputs[which] = signs.moved(inputs[which], _sum_units(terms) * unit)
    elif name == "fft":
        terms = math.prod(eqn.params["fft_lengths"])
        inputs[0] = signs.moved(inputs[0], _sum_units(terms) * unit)
    return inputs


def _is_real(operand: Any) -> bool:
    """Return whether an operand of an equation, a variable or literal, is floating-point or
    complex."""
    return jnp.issubdtype(aval(operand).dtype, jnp.inexact)


def _sum_units(terms: int) -> float:
    """Return the root mean square error of a sum of `terms` numbers, in unit roundoffs, relative to
    their L2 norm (`rounding_noise.summed`)."""
    return math.sqrt(1 + terms / 11)


def _is_power(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "integer_pow" and abs(eqn.params["y"]) > 2


def _bound(eqn: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    params = {key: _widened(key, value, eqn) for key, value in eqn.params.items()}
    if eqn.primitive.name == "bitcast_convert_type":
        return _bound_as_is(eqn, inputs)
    if eqn.primitive.name == "reduce_precision":
        return [inputs[0]]
    if eqn.primitive.name == "random_bits":
        # Whole numbers, which depend on settings of the program.
        return bind(eqn, inputs)
    outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(params))
    outputs = list(outputs) if eqn.primitive.multiple_results else [outputs]
    return [_as(x, v) for x, v in zip(outputs, eqn.outvars, strict=True)]


def _bound_as_is(eqn: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    narrow = [
        x.astype(aval(v).dtype)
        if hasattr(x, "astype") and wide(aval(v).dtype) != aval(v).dtype
        else x
        for x, v in zip(inputs, eqn.invars, strict=True)
    ]
    outputs = eqn.primitive.bind(*narrow, **eqn.primitive.get_bind_params(eqn.params))
    outputs = list(outputs) if eqn.primitive.multiple_results else [outputs]
    return [_as(x, v) for x, v in zip(outputs, eqn.outvars, strict=True)]


def _as(value: Any, variable: Any) -> Any:
    dtype = aval(variable).dtype
    return value if wide(dtype) == dtype else value.astype(wide(dtype))


def _widened(key: str, value: Any, eqn: JaxprEqn) -> Any:
    if key in ("new_dtype", "dtype", "preferred_element_type") and value is not None:
        return wide(value)
    if isinstance(value, (ClosedJaxpr, Jaxpr)):
        return _widened_combiner(value)
    return value


def _widened_combiner(inner: ClosedJaxpr | Jaxpr) -> Any:
    """Return a float64 version of the jaxpr that combines two numbers in a scatter or reduction."""
    jaxpr, constants = opened(inner)
    shapes = [jax.ShapeDtypeStruct(aval(v).shape, wide(aval(v).dtype)) for v in jaxpr.invars]

    def combine(*args: Any) -> Any:
        return interpret(jaxpr, constants, args, lambda eqn, xs: _bound(eqn, xs))

    closed = jax.make_jaxpr(combine)(*shapes)
    return closed if isinstance(inner, ClosedJaxpr) else closed.jaxpr
