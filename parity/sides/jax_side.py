"""A side written in JAX: a function of parameters and inputs whose stages are its marks.

Other JAX sides are this one with marks put where their library lets them be put. The run as it is
is evaluated operation by operation, so that reading its stages changes no bit of it; the float64
run is compiled once and then moved, forced or left alone by its arguments.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr

from parity.engine.evaluation import Evaluation, Marks
from parity.engine.jaxprs import aval, equations
from parity.engine.rounding import Signs, pool
from parity.sides.side import AS_IS, OUTPUT, Precision, Rounding, Run, SideError, Trace

PARAMETER = "parameter"


def path_name(path: Sequence[Any]) -> str:
    """Return a path of a pytree as dotted text, such as `layers.0.weight`."""
    parts = []
    for key in path:
        for attribute in ("key", "name", "idx"):
            if hasattr(key, attribute):
                parts.append(str(getattr(key, attribute)))
                break
        else:
            parts.append(str(key))
    return ".".join(parts)


def field_name(name: str, path: Sequence[Any]) -> str:
    """Return the name of a leaf of what a module returned: fields by `.`, positions by `[]`."""
    for key in path:
        index = getattr(key, "idx", None)
        part = path_name((key,))
        name += f"[{part}]" if index is not None or part.isdigit() else f".{part}"
    return name


def mark(name: str, value: Any) -> Any:
    """Return a result with each of its floating arrays marked, under names below `name`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            checkpoint_name(leaf, field_name(name, path)) if floating(leaf) else leaf
        ),
        value,
    )


def floating(x: Any) -> bool:
    """Whether a leaf is an array of floating point numbers."""
    return hasattr(x, "dtype") and hasattr(x, "shape") and jnp.issubdtype(x.dtype, jnp.inexact)


def as_array(x: Any) -> Any:
    """Return a torch tensor as a NumPy array, and everything else as it is."""
    if not hasattr(x, "detach") or not hasattr(x, "numpy"):
        return x
    tensor = x.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        return tensor.float().numpy().astype(jnp.bfloat16)
    return tensor.numpy()


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


@dataclass(frozen=True)
class _Program:
    """A traced program, its arguments split from what is static in them."""

    closed: ClosedJaxpr
    outputs: tuple[str, ...]
    """Names of its floating results, in their order; gradients are named by parameter."""


class JaxSide:
    """A function of parameters and inputs; its stages are marks by `checkpoint_name`.

    Args:
        function: called with the parameters and then the inputs.
        params: any pytree; what is not an array in it stays as it is.
        inputs: arrays, random keys or pytrees of them, and whatever else the function takes.
        keywords: the same by name.
    """

    kind = "jax"

    def __init__(
        self, function: Callable[..., Any], params: Any, *inputs: Any, **keywords: Any
    ) -> None:
        self.function = function
        self.params = jax.tree.map(as_array, params)
        self.arguments = jax.tree.map(as_array, (inputs, keywords))
        self._programs: dict[Any, Any] = {}

    def parameters(self) -> dict[str, np.ndarray]:
        """Return every array among the parameters by its path."""
        leaves = jax.tree_util.tree_leaves_with_path(self.params)
        return {
            self.parameter_name(path_name(path)): np.asarray(leaf)
            for path, leaf in leaves
            if _is_array(leaf) and not _is_key(leaf)
        }

    def parameter_name(self, path: str) -> str:
        """Return what a parameter is called by its path in the pytree."""
        return path

    def inputs(self) -> dict[str, np.ndarray]:
        """Return every array among the inputs."""
        inputs, keywords = self.arguments
        named = {str(i): x for i, x in enumerate(inputs)} | keywords
        leaves = jax.tree_util.tree_leaves_with_path(named)
        return {
            path_name(path): np.asarray(jax.random.key_data(x) if _is_key(x) else x)
            for path, x in leaves
            if _is_array(x)
        }

    def run(self, how: Run = AS_IS) -> Trace:
        """Run once; see `Run`.

        Raises:
            SideError: the function refuses its inputs.
        """
        if how.precision is Precision.FLOAT64 or how.rounding is not None:
            return self._widened(how)
        trees = (self.params, self.arguments)
        if how.precision is Precision.BFLOAT16:
            trees = _cast(trees, jnp.bfloat16)
        program = self._traced(how.precision, trees, gradients=False)
        marks = Marks()
        with jax.default_matmul_precision("highest"):
            forced = {name: (True, value) for name, value in how.forced.items()}
            results = Evaluation().run(program.closed, _arrays(trees), marks, forced)
            gradients = {}
            if how.cotangents is not None:
                gradients = self._gradients(how, trees)
        return _trace(program, marks, results, gradients)

    def _gradients(self, how: Run, trees: Any) -> dict[str, np.ndarray]:
        program = self._traced(how.precision, trees, gradients=True)
        cotangents = _in_order(program.outputs, how.cotangents or {})
        results = Evaluation().run(program.closed, [*_arrays(trees), *cotangents], Marks())
        return self._by_parameter(results)

    def _by_parameter(self, results: Sequence[Any]) -> dict[str, np.ndarray]:
        return dict(zip(self._trained(), map(np.asarray, results), strict=True))

    def _trained(self) -> list[str]:
        leaves = jax.tree_util.tree_leaves_with_path(self.params)
        return [self.parameter_name(path_name(p)) for p, x in leaves if floating(x)]

    def narrow_function(self) -> Callable[..., Any]:
        """Return the function as its users run it in bfloat16."""
        return self.function

    def wide_function(self) -> Callable[..., Any]:
        """Return the function as it is to be traced in float64."""
        return self.function

    def _function(self, precision: Precision) -> Callable[..., Any]:
        if precision is Precision.BFLOAT16:
            return self.narrow_function()
        return self.wide_function() if precision is Precision.FLOAT64 else self.function

    def _traced(self, precision: Precision, trees: Any, *, gradients: bool) -> _Program:
        key = (precision, gradients)
        if key not in self._programs:
            self._programs[key] = self._trace(self._function(precision), trees, gradients)
        return self._programs[key]

    def _trace(self, function: Callable[..., Any], trees: Any, gradients: bool) -> _Program:
        leaves, structure = jax.tree.flatten(trees)
        arrays = [x for x in leaves if _is_array(x)]
        names: list[str] = []

        def call(values: Sequence[Any]) -> list[Any]:
            rest = iter(values)
            whole = [next(rest) if _is_array(x) else x for x in leaves]
            params, (inputs, keywords) = jax.tree.unflatten(structure, whole)
            result = function(params, *inputs, **keywords)
            paths = jax.tree_util.tree_leaves_with_path(result)
            results = {field_name(OUTPUT, path): x for path, x in paths if floating(x)}
            names[:] = results
            return list(results.values())

        def program(*values: Any) -> Any:
            if not gradients:
                return call(values)
            values, cotangents = values[: len(arrays)], values[len(arrays) :]
            trained = [i for i, x in enumerate(arrays[: _count(trees[0])]) if floating(x)]

            def contracted(some: Sequence[Any]) -> Any:
                every = list(values)
                for i, value in zip(trained, some, strict=True):
                    every[i] = value
                return sum(
                    jnp.sum(y * jnp.asarray(c, y.dtype))
                    for y, c in zip(call(every), cotangents, strict=True)
                )

            return jax.grad(contracted)([values[i] for i in trained])

        try:
            extra: tuple[Any, ...] = ()
            shapes = jax.eval_shape(lambda *v: call(v), *arrays)
            if gradients:
                extra = tuple(shapes)
            closed = jax.make_jaxpr(program)(*arrays, *extra)
        except SideError:
            raise
        except Exception as error:
            raise SideError(
                f"the {self.kind} side refuses its inputs ("
                + ", ".join(f"{n} {x.dtype}{list(x.shape)}" for n, x in self.inputs().items())
                + f"): {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            ) from error
        return _Program(closed, tuple(names))

    def _widened(self, how: Run) -> Trace:
        gradients = how.cotangents is not None
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            trees = self._trees(how.precision)
            program, compiled, notices = self._compiled(how, trees, gradients=False)
            constants, operations = (
                float(how.rounding is kind) for kind in (Rounding.CONSTANTS, Rounding.OPERATIONS)
            )
            shapes = self._programs["shapes", how.precision]
            forced = {
                name: (
                    name in how.forced,
                    np.asarray(how.forced.get(name, np.zeros(s.shape)), s.dtype),
                )
                for name, s in shapes.items()
            }
            values = _as_arguments(program, _arrays(trees))
            signs = pool(how.seed, _largest(program.closed))
            results, marked, passed = compiled(values, signs, operations, constants, forced)
            marks = Marks(marked, passed)
            found: dict[str, np.ndarray] = {}
            if gradients:
                inner, derivative, more = self._compiled(how, trees, gradients=True)
                notices = dict.fromkeys((*notices, *more))
                cotangents = _in_order(inner.outputs, how.cotangents or {})
                values = [*values, *(np.asarray(c, np.float64) for c in cotangents)]
                signs = pool(how.seed, _largest(inner.closed))
                results_by, *_ = derivative(values, signs, operations, constants, {})
                found = self._by_parameter(results_by)
            order = self._programs["order", how.precision]
            marks.values = {name: marks.values[name] for name in order}
            return _trace(program, marks, results, found, tuple(notices))

    def _trees(self, precision: Precision) -> Any:
        trees = (self.params, self.arguments)
        return _cast(trees, jnp.bfloat16) if precision is Precision.BFLOAT16 else trees

    def _compiled(self, how: Run, trees: Any, *, gradients: bool) -> Any:
        key = ("compiled", how.precision, gradients)
        if key in self._programs:
            return self._programs[key]
        notices: dict[str, None] = {}
        if how.precision is Precision.FLOAT64:
            try:
                program = self._traced(
                    Precision.FLOAT64, _cast(trees, jnp.float64), gradients=gradients
                )
            except SideError as error:
                with jax.enable_x64(False):
                    program = self._traced(Precision.FLOAT32, trees, gradients=gradients)
                cause = type(error.__cause__).__name__
                notices[
                    f"traced in float32 and then widened: float64 inputs are refused ({cause})"
                ] = None
        else:
            with jax.enable_x64(False):
                program = self._traced(how.precision, trees, gradients=gradients)
        order: list[str] = []

        def evaluate(values, signs, operations, constants, forced):
            marks = Marks()
            narrow = how.precision is Precision.BFLOAT16
            moving = Signs(signs, operations, constants, narrow)
            results = Evaluation(True, moving, notices).run(program.closed, values, marks, forced)
            order[:] = marks.values
            return results, marks.values, marks.passed

        values = _as_arguments(program, _arrays(trees))
        if gradients:
            values = [*values, *(np.zeros(s.shape) for s in self._output_shapes(program, values))]
        else:
            signs = pool(0, _largest(program.closed))
            shapes = jax.eval_shape(evaluate, values, signs, 0.0, 0.0, {})[1]
            self._programs["shapes", how.precision] = shapes
            self._programs["order", how.precision] = tuple(order)
        self._programs[key] = program, jax.jit(evaluate), notices
        return self._programs[key]

    def _output_shapes(self, program: _Program, values: Sequence[Any]) -> list[Any]:
        return [aval(v) for v in program.closed.jaxpr.invars[len(values) :]]


def _trace(
    program: _Program,
    marks: Marks,
    results: Sequence[Any],
    gradients: dict[str, np.ndarray],
    notices: tuple[str, ...] = (),
) -> Trace:
    stages = {
        name: np.asarray(value)
        for name, value in marks.values.items()
        if floating(value) and bool(marks.passed.get(name, True))
    }
    stages |= dict(zip(program.outputs, map(np.asarray, results), strict=True))
    return Trace(stages, program.outputs, gradients, notices)


def _in_order(names: Sequence[str], cotangents: Mapping[str, Any]) -> list[Any]:
    if lost := sorted(set(cotangents) - set(names)):
        raise SideError(f"no output {', '.join(lost)}; there are {', '.join(names)}")
    missing = [name for name in names if name not in cotangents]
    if missing:
        raise SideError(f"expected a cotangent for every output; {', '.join(missing)} has none")
    return [cotangents[name] for name in names]


def _arrays(trees: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(trees) if _is_array(x)]


def _count(tree: Any) -> int:
    return len(_arrays(tree))


def _cast(trees: Any, dtype: Any) -> Any:
    def cast(x: Any) -> Any:
        return np.asarray(x).astype(dtype) if _is_array(x) and floating(x) else x

    return jax.tree.map(cast, trees)


def _as_arguments(program: _Program, arrays: Sequence[Any]) -> list[Any]:
    """Return floats in float64, everything else as the program was traced."""
    variables = program.closed.jaxpr.invars
    return [
        np.asarray(x, np.float64)
        if floating(x)
        else x
        if _is_key(x)
        else np.asarray(x, aval(v).dtype)
        for x, v in zip(arrays, variables, strict=False)
    ]


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


@functools.cache
def _largest_cached(jaxpr: Any) -> int:
    sizes = (
        math.prod(aval(v).shape)
        for eqn in equations(jaxpr)
        for v in (*eqn.outvars, *eqn.invars)
        if hasattr(aval(v), "shape")
    )
    return max(sizes, default=1)


def _largest(closed: ClosedJaxpr) -> int:
    """Return how many elements the largest array of a program has."""
    constants = max((np.size(c) for c in closed.consts if _is_array(c)), default=1)
    inputs = max((math.prod(aval(v).shape) for v in closed.jaxpr.invars), default=1)
    return max(_largest_cached(closed.jaxpr), constants, inputs)
