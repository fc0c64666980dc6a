"""Linear functions with an explicit transpose, for derivatives in forward and reverse mode.

`jax.custom_vjp` has no forward mode. A `jax.custom_jvp` whose tangent is `linear(...)` has both:
forward mode runs the function, reverse mode the given transpose. `linear_call` of
`jax.custom_derivatives` supports neither second derivatives nor `vmap`; here JAX derives both from
the two functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

Function = Callable[[Any, Any], Any]
"""Function of (residuals, arguments), linear in the arguments."""


def linear(
    function: Function, transpose: Function, residuals: Any, arguments: Any, like: Array
) -> Array:
    """Return `function(residuals, arguments)`, an array that is linear in `arguments`.

    Args:
        function: takes `residuals` and `arguments`, returns an array of the type of `like`.
        transpose: takes `residuals` and the result's cotangent, returns the cotangents
            of `arguments`.
        residuals: a pytree of arrays; None in it stays None.
        arguments: arrays.
        like: an array with the shape and dtype of the result.
    """
    held, structure = jax.tree.flatten(residuals)
    # `run` and `pull` outlive the trace that they are made in, so they hold none of its arrays.
    number = len(held)

    def run(flat: Sequence[Array]) -> list[Array]:
        residuals = jax.tree.unflatten(structure, flat[:number])
        return [function(residuals, tuple(flat[number:]))]

    def pull(flat: Sequence[Array], bar: Array) -> list[Array]:
        return list(transpose(jax.tree.unflatten(structure, flat), bar))

    (out,) = _linear.bind(
        *held, *arguments, run=run, pull=pull, number=number, out=jax.typeof(like)
    )
    return out


_linear = Primitive("linear_with_transpose")
_linear.multiple_results = True


def _run(*flat: Array, run: Any, **_: Any) -> list[Array]:
    return run(flat)


def _jvp(primals: Any, tangents: Any, *, run: Any, **_: Any) -> Any:
    # For derivatives of higher order, differentiate the function itself, also in the residuals.
    moving = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def moved(*some: Array) -> list[Array]:
        flat = list(primals)
        for i, value in zip(moving, some, strict=True):
            flat[i] = value
        return run(flat)

    return jax.jvp(moved, [primals[i] for i in moving], [tangents[i] for i in moving])


def _transpose(cotangents: Any, *flat: Any, pull: Any, number: int, **_: Any) -> list[Any]:
    (bar,) = cotangents
    if type(bar) is ad.Zero:
        return [None] * len(flat)
    # `pull` does not bind this primitive, so second derivatives are those of the transpose.
    return [None] * number + pull(flat[:number], bar)


def _batch(flat: Any, axes: Any, *, run: Any, **_: Any) -> Any:
    return jax.vmap(lambda *flat: run(flat), in_axes=tuple(axes))(*flat), [0]


_linear.def_impl(_run)
_linear.def_abstract_eval(lambda *_, out, **__: [out])
mlir.register_lowering(_linear, mlir.lower_fun(_run, multiple_results=True))
ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.primitive_batchers[_linear] = _batch
