"""A side written in JAX: a function of parameters and inputs with marked intermediates.

The side's stages are the values marked by `checkpoint_name`. Sides for JAX libraries are subclasses
that insert the marks by the library's hooks. The unmodified run is evaluated operation by
operation, so that reading its stages changes no bit. The float64 run is compiled once, with
perturbations and replaced stages as arguments of the compiled program.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parity.engine.programs.jaxprs import aval
from parity.engine.programs.operations import Operation
from parity.engine.programs.rounding import digest
from parity.sides.complex_pairs import as_pairs, from_pairs
from parity.sides.jax_leaves import (
    arrays_of,
    as_array,
    cast,
    floating,
    is_array,
    is_complex,
    is_key,
    path_name,
)
from parity.sides.side import (
    AS_IS,
    Precision,
    Run,
    SideError,
    Trace,
    check_parameters,
    float_number,
    named_once,
    no_derivative,
    stopped,
)
from parity.sides.traced import Traced, trace

DTYPES = {
    Precision.FLOAT32: jnp.float32,
    Precision.FLOAT64: jnp.float64,
    Precision.BFLOAT16: jnp.bfloat16,
}


class JaxSide:
    """A JAX function of parameters and inputs; its stages are the values marked by
    `checkpoint_name`.

    Base class of all JAX sides; use `FunctionSide` to compare a function.

    Args:
        function: called with the parameters, then the inputs.
        params: any pytree; leaves that are not arrays are passed unchanged.
        inputs: arrays, random keys, pytrees of them, or any other arguments.
        keywords: keyword arguments, of the same types as `inputs`.
    """

    kind = "jax"

    def __init__(
        self, function: Callable[..., Any], params: Any, *inputs: Any, **keywords: Any
    ) -> None:
        self.function = function
        self.params = jax.tree.map(as_array, params)
        self.arguments = jax.tree.map(as_array, (inputs, keywords))
        self._exact: dict[str, np.ndarray] = {}
        """Values that some parameters have in float64 runs only, by parameter name."""
        self._shared: frozenset[bytes] = frozenset()
        """Digests of the tables that the other side holds too (`sharing`)."""
        self._programs: dict[tuple[Precision, bool], Traced] = {}

    def parameters(self) -> dict[str, np.ndarray]:
        """Return every parameter array by path; complex arrays as real pairs (..., 2).

        Raises:
            SideError: two parameters have the same path as text.
        """
        leaves = jax.tree_util.tree_leaves_with_path(self.params)
        named = (
            (self.parameter_name(path_name(path)), as_pairs(np.asarray(leaf)))
            for path, leaf in leaves
            if is_array(leaf) and not is_key(leaf)
        )
        return named_once(named, "parameters")

    def with_parameters(self, values: Mapping[str, np.ndarray]) -> JaxSide:
        """Return a copy of this side with other values of some parameters, cast to their dtypes.

        The copy shares compiled programs, which are functions of the parameters, with this side.

        Raises:
            SideError: a name in `values` is unknown, or a value has another shape.
        """
        check_parameters(values, self.parameters())

        def other(path: Any, leaf: Any) -> Any:
            value = values.get(self.parameter_name(path_name(path)))
            return leaf if value is None else from_pairs(value, leaf.dtype)

        side = copy.copy(self)
        side.params = jax.tree_util.tree_map_with_path(other, self.params)
        side._exact = {name: x for name, x in self._exact.items() if name not in values}
        return side

    def with_exact(self, values: Mapping[str, np.ndarray]) -> JaxSide:
        """Return a copy of this side with other values of some parameters in float64 runs.

        The copy shares compiled programs with this side. See `TakesExactParameters`.

        Raises:
            SideError: a name in `values` is unknown, or a value has another shape.
        """
        check_parameters(values, self.parameters())
        side = copy.copy(self)
        side._exact = {**self._exact, **values}
        return side

    def with_inputs(self, change: Callable[[np.ndarray], np.ndarray]) -> JaxSide:
        """Return a copy of this side with `change` applied to each input array except random keys;
        see `TakesInputs`."""
        side = copy.copy(self)
        side.arguments = jax.tree.map(
            lambda x: change(np.asarray(x)) if is_array(x) and not is_key(x) else x, self.arguments
        )
        return side

    def tables(self) -> list[np.ndarray]:
        """Return the floating-point arrays of several elements that the function closes over; see
        `HoldsTables`."""
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            return self._program(Precision.FLOAT64, derivative=False).tables

    def sharing(self, tables: Collection[np.ndarray]) -> JaxSide:
        """Return a copy of this side that does not perturb these tables (constant arrays); see
        `HoldsTables`."""
        side = copy.copy(self)
        side._shared = frozenset(map(digest, tables))
        side._programs = {
            key: dataclasses.replace(program, shared=side._shared)
            for key, program in self._programs.items()
        }
        return side

    def parameter_name(self, path: str) -> str:
        """Return the name of the parameter at a dotted path of the pytree; here the path itself."""
        return path

    def inputs(self) -> dict[str, np.ndarray]:
        """Return every input array by name.

        Complex arrays become real pairs (..., 2), and random keys their integer data.
        """
        inputs, keywords = self.arguments
        named = {str(i): x for i, x in enumerate(inputs)} | keywords
        leaves = jax.tree_util.tree_leaves_with_path(named)
        return {
            path_name(path): as_pairs(np.asarray(jax.random.key_data(x) if is_key(x) else x))
            for path, x in leaves
            if is_array(x)
        }

    def function_in(self, precision: Precision) -> Callable[..., Any]:
        """Return the function to trace for a precision: here `function`; subclasses set the dtype
        of their module."""
        return self.function

    def run(self, how: Run = AS_IS) -> Trace:
        """Run the function once with these settings.

        Raises:
            SideError: the function raises an error, or a stage or output that `how` names does not
                exist.
        """
        wide = how.precision is Precision.FLOAT64 or how.rounding is not None or how.still
        with jax.enable_x64(wide), jax.default_matmul_precision("highest"):
            program = self._program(how.precision, derivative=False)
            arrays = arrays_of(self._trees(Precision.FLOAT64 if how.still else how.precision))
            if wide:
                marks, results = program.evaluate_in_float64(arrays, how)
            else:
                marks, results = program.evaluate(arrays, how.forced)
            stages = {name: as_pairs(np.asarray(x)) for name, x in marks.items() if floating(x)}
            _check_names(how.forced, stages, "stage")
            arrived = dict(
                zip((*program.outputs, *program.exact), map(np.asarray, results), strict=True)
            )
            stages |= {name: arrived[name] for name in program.outputs}
            dtype = DTYPES[Precision.FLOAT64 if wide else how.precision]
            floats = {n: float_number(x, dtype) for n, x in program.floats.items()}
            stages |= {n: x for n, x in floats.items() if x is not None}
            exact = {name: arrived[name] for name in program.exact} | program.numbers
            gradients = {} if how.cotangents is None else self._gradients(how, arrays, wide)
        notices = tuple(program.notices or ())
        return Trace(
            stages,
            (*program.outputs, *program.floats),
            gradients,
            notices,
            exact=exact,
            unread=dict(program.unread),
        )

    def operations_of(
        self, stage: str, forced: Mapping[str, np.ndarray]
    ) -> tuple[dict[int, Operation], dict[int, np.ndarray]]:
        """Return the operations that compute a stage from the replaced ones, and their results.

        See `TellsOperations`. Empty for a stage inside a loop that is too long to be unrolled.
        """
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            program = self._program(Precision.FLOAT64, derivative=False)
            return program.operations_of(arrays_of(self._trees(Precision.FLOAT64)), stage, forced)

    def _gradients(self, how: Run, arrays: list[Any], wide: bool) -> dict[str, np.ndarray]:
        program = self._program(how.precision, derivative=True)
        # A Python number does not depend on the parameters.
        cotangents = {n: c for n, c in (how.cotangents or {}).items() if n not in program.floats}
        if how.cotangents and not cotangents:
            raise SideError(no_derivative(how.cotangents))
        _check_names(cotangents, program.outputs, "output")
        shapes = [aval(v).shape for v in program.closed.jaxpr.invars[len(arrays) :]]
        arrays = arrays + [
            np.asarray(cotangents.get(name, np.zeros(shape)), np.float32)
            for name, shape in zip(program.outputs, shapes, strict=True)
        ]
        if wide:
            _, results = program.evaluate_in_float64(arrays, how)
        else:
            results = program.compute(arrays)
        leaves = jax.tree_util.tree_leaves_with_path(self.params)
        names = [self.parameter_name(path_name(p)) for p, x in leaves if floating(x)]
        return dict(zip(names, map(np.asarray, results), strict=True))

    def _trees(self, precision: Precision) -> Any:
        params = self.params
        if self._exact and precision is Precision.FLOAT64:
            params = jax.tree_util.tree_map_with_path(self._exactly, params)
        return cast((params, self.arguments), DTYPES[precision])

    def _exactly(self, path: Any, leaf: Any) -> Any:
        """Return a parameter's value in float64 runs.

        Args:
            path: pytree path of the parameter.
            leaf: value of the parameter in other runs.
        """
        value = self._exact.get(self.parameter_name(path_name(path)))
        if value is None:
            return leaf
        return from_pairs(value, np.complex128 if is_complex(leaf) else np.float64)

    def _program(self, precision: Precision, *, derivative: bool) -> Traced:
        """Return the program traced in a precision, or, if `derivative`, its gradient; cached.

        A program that rejects float64, or draws random numbers, is traced in float32 instead.
        """
        key = precision, derivative
        if key not in self._programs:
            program = None
            notices: dict[str, None] = {}
            if precision is Precision.FLOAT64:
                try:
                    program = self._trace(precision, derivative)
                    if program.draws:
                        # 64-bit random draws would differ from those of the users' program.
                        notices[
                            "it draws random numbers, so its float32 program is run in float64"
                        ] = None
                        program, precision = None, Precision.FLOAT32
                except SideError as error:
                    cause = type(error.__cause__).__name__
                    notices[
                        f"it rejects float64 ({cause}), so its float32 program is run in float64"
                    ] = None
                    precision = Precision.FLOAT32
            if program is None:
                with jax.enable_x64(False):
                    program = self._trace(precision, derivative)
            program.notices = notices | (program.notices or {})
            program.narrow = precision is Precision.BFLOAT16
            program.shared = self._shared
            self._programs[key] = program
        return self._programs[key]

    def _trace(self, precision: Precision, derivative: bool) -> Traced:
        with self._stopping(precision):
            return trace(self.function_in(precision), self._trees(precision), derivative=derivative)

    @contextlib.contextmanager
    def _stopping(self, precision: Precision) -> Iterator[None]:
        try:
            yield
        except SideError:
            raise
        except Exception as error:
            raise stopped(self.kind, precision, self.inputs(), error) from error


class FunctionSide(JaxSide):
    """A plain JAX function of parameters and inputs; its stages are the values marked by
    `checkpoint_name`, if any."""

    kind = "function"


def _check_names(names: Mapping[str, Any], known: Any, what: str) -> None:
    if lost := sorted(set(names) - set(known)):
        raise SideError(f"no {what} {', '.join(lost)}; there are {', '.join(known)}")
