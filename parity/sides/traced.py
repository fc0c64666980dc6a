"""A side's JAX program, traced once and evaluated unmodified or in float64.

In float64, values may be perturbed and marks (named intermediates) replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from parity.engine.programs.evaluation import Evaluation
from parity.engine.programs.jaxprs import aval, constants, equations
from parity.engine.programs.marks import MarkChange, Marks
from parity.engine.programs.numpy_constants import convert_in_each_mode
from parity.engine.programs.operations import Operation, Place, Recorder
from parity.engine.programs.rounding import Signs, pool
from parity.engine.programs.yardstick import LARGE, RUN_OFTEN, RUN_ONCE, known_options
from parity.sides.complex_pairs import as_pairs, from_pairs, traced_complex, traced_pairs
from parity.sides.jax_leaves import arrays_of, field_name, floating, is_array, is_complex, is_key
from parity.sides.side import (
    OUTPUT,
    Rounding,
    Run,
    SideError,
    exact_number,
    fields_of,
    float_number,
    kind_of_result,
    named_once,
)

# Without optimisations, compilation takes half the time and the roughly thirty runs a third longer,
# which is less than the time saved.
SMALL = 1 << 20
"""Programs whose largest array has fewer elements than this are compiled without XLA's
optimisations."""
TINY = 1 << 15
"""Programs whose largest array has fewer elements than this are compiled also without XLA's
emitters of fused operations, which takes less time again; thirty runs take milliseconds."""

RANDOM = frozenset(("random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"))

"""Names of the JAX primitives that draw random numbers."""


@dataclass
class Traced:
    """A traced program whose arguments are the array leaves of the parameters, then those of the
    inputs."""

    closed: ClosedJaxpr
    outputs: tuple[str, ...]
    """Names of the function's floating-point results, also if the traced program is the function's
    gradient."""
    narrow: bool = False
    """Whether the program computes in bfloat16."""
    notices: dict[str, None] | None = None
    """Remarks for the reader (the keys), such as an operation that has no float64 version."""
    exact: tuple[str, ...] = ()
    """Names of the integer and bool array results, which come after the floating-point ones."""
    numbers: dict[str, np.ndarray] = field(default_factory=dict)
    """Results that are Python or NumPy integers or bools, by name; fixed when tracing."""
    floats: dict[str, Any] = field(default_factory=dict)
    """Results that are Python or NumPy floats or complex numbers, by name, unchanged."""
    unread: dict[str, str] = field(default_factory=dict)
    """Descriptions of the results that cannot be compared because they are not arrays, by name."""
    shared: frozenset[bytes] = frozenset()
    """Digests of constants that are not perturbed (`rounding.digest`)."""
    recorded: Recorder | None = None
    """All operations recorded by the last call of `operations_of`; None before the first."""

    def evaluate(
        self, arrays: Sequence[Any], forced: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[Any]]:
        """Return marks (named intermediates) by name, and the list of results, evaluated operation
        by operation in the program's dtypes.

        Args:
            arrays: the program's arguments.
            forced: values that replace marks, by name.
        """
        marks = Marks()
        changes = self._changes(forced)
        results = Evaluation().run(self.closed, self._arguments(arrays), marks, changes)
        return _taken(marks), results

    def compute(self, arrays: Sequence[Any]) -> list[Any]:
        """Compile the program as a whole, run it, and return its results."""
        return self._plain(self._arguments(arrays))

    def evaluate_in_float64(
        self, arrays: Sequence[Any], how: Run
    ) -> tuple[dict[str, Any], list[Any]]:
        """Return marks (named intermediates) by name, and the list of results, in float64.

        Args:
            arrays: the program's arguments.
            how: settings; `rounding`, `seed` and `forced` are used.
        """
        forced = {
            name: MarkChange(
                np.asarray(name in how.forced),
                from_pairs(how.forced[name], shape.dtype)
                if name in how.forced
                else np.zeros(shape.shape, shape.dtype),
            )
            for name, shape in self._marks.items()
            # A random key has no zero, and no value that could replace it.
            if not jnp.issubdtype(shape.dtype, jax.dtypes.prng_key)
        }
        signs = pool(how.seed, self._largest)
        scales = [float(how.rounding is kind) for kind in (Rounding.OPERATIONS, Rounding.CONSTANTS)]
        results, values, passed = self._wide(self._arguments(arrays, True), signs, *scales, forced)
        ordered = {name: values[name] for name in self._marks}
        return _taken(Marks(ordered, passed)), results

    def operations_of(
        self, arrays: Sequence[Any], stage: str, forced: Mapping[str, Any]
    ) -> tuple[dict[int, Operation], dict[int, np.ndarray]]:
        """Return the operations that compute a stage from the replaced ones, and their results.

        Both are dictionaries by index in order of execution; they are empty for a stage in a loop
        that is too long to be unrolled. A first run shows which branches are taken and how often
        while loops are repeated; further runs record the operations inside.

        Args:
            arrays: the program's arguments.
            stage: name of the stage.
            forced: values that replace stages, by name.
        """
        values = self._arguments(arrays, True)
        courses: dict[Place, int] = {}
        while True:
            recorder, computed, asked = self._recorded(values, stage, forced, courses)
            if not asked:
                break
            courses |= asked
        self.recorded = recorder
        results = {i: as_pairs(np.asarray(x)) for i, x in computed.items()}
        return {i: recorder.operations[i] for i in results}, results

    def _recorded(
        self, values: Any, stage: str, forced: Mapping[str, Any], courses: Mapping[Place, int]
    ) -> tuple[Recorder, dict[int, Any], dict[Place, int]]:
        """Evaluate once, given the branches taken by conditions and the iteration counts of while
        loops that are known (`courses`).

        Return all operations; the results, by index, of those that compute `stage` from the stages
        in `forced`; and the branches and counts, not in `courses`, of conditions and while loops
        among these.
        """
        recorder = Recorder()

        def evaluate(values: Any) -> Any:
            nonlocal recorder
            recorder = Recorder(courses)
            marks = Marks()
            changes = self._changes(forced)
            how = Evaluation(True, notices={}, recorder=recorder)
            results = how.run(self.closed, values, marks, changes)
            ends = marks.values | dict(zip(self.outputs, results, strict=False))
            last = recorder.producer(ends[stage]) if stage in ends else None
            window = [] if last is None else recorder.window(last)
            found = {i: recorder.values[i] for i in window}
            # A stage inside a branch has no operations before the branch is known.
            asked = {p: x for p, (i, x) in recorder.asked.items() if last is None or i in window}
            # Random keys are left out: they are not numbers, unlike the values drawn with them.
            return {i: x for i, x in found.items() if is_array(x) and not is_key(x)}, asked

        computed, asked = jax.jit(evaluate, compiler_options=self._options)(values)
        return recorder, computed, {place: int(x) for place, x in asked.items()}

    @property
    def tables(self) -> list[np.ndarray]:
        """The program's floating-point constants of more than one element."""
        return [np.asarray(x) for x in constants(self.closed) if floating(x) and x.size > 1]

    @property
    def draws(self) -> bool:
        """Whether the program draws random numbers."""
        return any(eqn.primitive.name in RANDOM for eqn in equations(self.closed.jaxpr))

    @cached_property
    def _plain(self) -> Callable[..., Any]:
        return jax.jit(lambda arrays: Evaluation().run(self.closed, arrays, Marks()))

    @cached_property
    def _wide(self) -> Callable[..., Any]:
        return jax.jit(self._evaluation, compiler_options=self._options)

    @property
    def _options(self) -> dict[str, Any]:
        if self._largest < TINY:
            return known_options(RUN_ONCE)
        return known_options(RUN_OFTEN if self._largest < SMALL else LARGE)

    def _evaluation(self, arrays: Any, signs: Any, operations: Any, constants: Any, forced: Any):
        marks = Marks()
        notices = self.notices if self.notices is not None else {}
        moving = Signs(signs, operations, constants, self.narrow, self.shared)
        results = Evaluation(True, moving, notices).run(self.closed, arrays, marks, forced)
        return results, marks.values, marks.passed

    @cached_property
    def _marks(self) -> dict[str, Any]:
        """Shapes and dtypes of the marks (named intermediates) in a float64 run, by name, in order
        of execution."""
        order: dict[str, Any] = {}

        def note(arrays: Any) -> None:
            # Without perturbations, whose tracing takes most of the time; shapes are the same.
            marks = Marks()
            Evaluation(True, notices={}).run(self.closed, arrays, marks)
            order.update(marks.values)

        variables = [aval(v) for v in self.closed.jaxpr.invars]
        with jax.enable_x64(True):
            jax.eval_shape(note, [_wide_shape(v) for v in variables])
        return {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in order.items()}

    @cached_property
    def _largest(self) -> int:
        """Number of elements of the program's largest array."""
        variables = [*self.closed.jaxpr.invars, *self.closed.jaxpr.constvars]
        for eqn in equations(self.closed.jaxpr):
            variables += (*eqn.outvars, *eqn.invars)
        shapes = (getattr(aval(v), "shape", ()) for v in variables)
        return max(map(math.prod, shapes), default=1)

    def _changes(self, forced: Mapping[str, Any]) -> dict[str, MarkChange]:
        """Return, by name, the changes (`MarkChange`) that replace marks (named intermediates) by
        the values in `forced`; names without a mark have no effect."""
        known = self._marks if forced else {}
        dtypes = {name: known[name].dtype for name in forced if name in known}
        complex_ = {n for n, dtype in dtypes.items() if jnp.issubdtype(dtype, jnp.complexfloating)}
        return {
            name: MarkChange(True, from_pairs(x, dtypes[name]) if name in complex_ else x)
            for name, x in forced.items()
        }

    def _arguments(self, arrays: Sequence[Any], wide: bool = False) -> list[Any]:
        """Cast arguments to the program's dtypes, or floating-point ones to float64 if `wide`."""
        dtypes = (aval(v).dtype for v in self.closed.jaxpr.invars)
        return [
            x if is_key(x) else np.asarray(x, np.float64 if wide and floating(x) else dtype)
            for x, dtype in zip(arrays, dtypes, strict=True)
        ]


def trace(function: Callable[..., Any], trees: Any, *, derivative: bool = False) -> Traced:
    """Trace `function(params, *inputs, **keywords)`, or its gradient with respect to `params`.

    Args:
        function: the function to trace.
        trees: `(params, (inputs, keywords))`.
        derivative: whether to trace the gradient, a vector-Jacobian product. The cotangents of the
            floating-point results are then appended to the program's arguments.

    Raises:
        SideError: the function returns no floating-point array, or two results with the same name.
    """
    leaves, structure = jax.tree.flatten(trees)
    arrays = arrays_of(trees)
    trained = [i for i, x in enumerate(arrays_of(trees[0])) if floating(x)]
    names: list[str] = []
    exact: list[str] = []
    numbers: dict[str, np.ndarray] = {}
    constants: dict[str, Any] = {}
    unread: dict[str, str] = {}

    def call(values: Sequence[Any], exact_too: bool = False) -> list[Any]:
        rest = iter(values)
        whole = [
            (traced_complex(next(rest)) if is_complex(x) else next(rest)) if is_array(x) else x
            for x in leaves
        ]
        params, (inputs, keywords) = jax.tree.unflatten(structure, whole)
        result = function(params, *inputs, **keywords)
        paths = jax.tree_util.tree_leaves_with_path(result)
        # A dataclass that is not registered with JAX is a leaf.
        each = (f for path, x in paths for f in fields_of(x, field_name(OUTPUT, path)))
        fields = named_once(each, "results")
        results = {name: x for name, x in fields.items() if floating(x)}
        if not results:
            kinds = {n: getattr(x, "dtype", type(x).__name__) for n, x in fields.items()}
            raise SideError(f"expected the function to return floating arrays, got {kinds}")
        whole = {n: x for n, x in fields.items() if is_array(x) and not (n in results or is_key(x))}
        names[:], exact[:] = results, whole
        for name, x in fields.items():
            if name in results or name in whole:
                continue
            _sort(name, x, numbers, constants, unread)
        floats = list(map(traced_pairs, results.values()))
        return [*floats, *whole.values()] if exact_too else floats

    def gradients(*values: Any) -> Any:
        constant, cotangents = list(values[: len(arrays)]), values[len(arrays) :]

        def contracted(parameters: Sequence[Any]) -> Any:
            every = list(constant)
            for i, value in zip(trained, parameters, strict=True):
                every[i] = value
            pairs = zip(call(every), cotangents, strict=True)
            return sum(jnp.sum(y * jnp.asarray(c, y.dtype)) for y, c in pairs)

        return jax.grad(contracted)([constant[i] for i in trained])

    convert_in_each_mode()
    if not derivative:
        closed = jax.make_jaxpr(lambda *values: call(values, True))(*arrays)
    else:
        shapes = jax.eval_shape(lambda *values: call(values), *arrays)
        closed = jax.make_jaxpr(gradients)(*arrays, *shapes)
    return Traced(
        closed,
        tuple(names),
        notices={},
        exact=tuple(exact),
        numbers=numbers,
        floats=constants,
        unread=unread,
    )


def _sort(
    name: str,
    x: Any,
    numbers: dict[str, np.ndarray],
    floats: dict[str, Any],
    unread: dict[str, str],
) -> None:
    """Add a result that is no array to `numbers`, `floats` or `unread`, depending on its type."""
    if (number := exact_number(x)) is not None:
        numbers[name] = number
    elif float_number(x, np.float64) is not None:
        floats[name] = x
    else:
        unread[name] = "a random key" if is_key(x) else kind_of_result(x)


def _taken(marks: Marks) -> dict[str, Any]:
    """Return the values of the marks (named intermediates) by name, without those in branches not
    taken."""
    return {n: x for n, x in marks.values.items() if bool(marks.passed.get(n, True))}


def _wide_shape(variable: Any) -> Any:
    if not floating(variable):
        return jax.ShapeDtypeStruct(variable.shape, variable.dtype)
    return jax.ShapeDtypeStruct(variable.shape, jnp.float64)
