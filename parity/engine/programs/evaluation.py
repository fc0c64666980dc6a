"""Evaluation of a jaxpr that reads and replaces its marks (named intermediates).

In the program's own dtypes, calls, rematerialised regions, branches and scans that contain marks
are evaluated equation by equation; every other equation runs unchanged, so that each operation
gives the same bits. A widened evaluation computes everything in float64. It can perturb every
result by a random sign times the unit roundoff of the program's dtype; the change of the outputs is
the noise floor (Monte Carlo arithmetic, Parker 1997).
Source: docs/your-own-port.md "What a tolerance is made of".
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from parity.engine.programs.jaxprs import (
    aval,
    bind,
    counters,
    equations,
    interpret,
    loop_inputs,
    opened,
)
from parity.engine.programs.marks import (
    Branches,
    Changes,
    MarkChange,
    Marks,
    has_marks,
    in_turn,
    of_turns,
)
from parity.engine.programs.operations import Recorder
from parity.engine.programs.rounding import Signs
from parity.engine.programs.rounding_rules import rounded, wide

CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_lin")
CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
# 2,000 unrolled operations take some 10 s to compile.
UNROLLED = 2_000
"""Largest number of operations, over all iterations, of a loop that is unrolled so that each of its
operations can be recorded."""
FLOW = (*CALLS, *CUSTOM, "scan", "while", "cond")


@dataclass(frozen=True)
class Evaluation:
    """Settings for evaluating a jaxpr; `run` evaluates one."""

    widened: bool = False
    """Compute everything in float64; requires 64-bit types to be enabled."""
    signs: Signs | None = None
    """Random signs that perturb results (`Signs.operations`) or only constants (`Signs.constants`);
    None for no perturbation."""
    notices: dict[str, None] = field(default_factory=dict)
    """Remarks for the reader (the keys), such as an operation that has no float64 version; filled
    by `run`."""
    differentiable: bool = False
    """Keep custom derivatives of functions (`custom_jvp`, `custom_vjp`); marks (named
    intermediates) inside such functions are then not found."""
    recorder: Recorder | None = None
    """Records every operation, except in long loops, and in conditions and while loops of which the
    recorder does not know the branch or the number of iterations; None: nothing is recorded."""

    def run(
        self,
        closed: ClosedJaxpr,
        arguments: Sequence[Any],
        marks: Marks,
        changes: Changes | None = None,
    ) -> list[Any]:
        """Evaluate a jaxpr and return its outputs.

        Args:
            closed: the program.
            arguments: one array for each input of the program.
            marks: receives the values of the program's marks (named intermediates).
            changes: replacements and offsets of marks, by name.
        """
        return self._inner(closed.jaxpr, closed.consts, arguments, marks, changes or {})

    def _inner(
        self,
        jaxpr: Jaxpr,
        constants: Sequence[Any],
        arguments: Sequence[Any],
        marks: Marks,
        changes: Changes,
    ) -> list[Any]:
        if self.widened:
            constants = [self._constant(c) for c in constants]
            arguments = [_widen(a) for a in arguments]
        counted = counters(jaxpr) if self.signs is not None else frozenset()

        def step(eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
            return self._step(eqn, inputs, marks, changes, counted=id(eqn) in counted)

        return interpret(jaxpr, constants, arguments, step, self._literal)

    def _step(
        self, eqn: JaxprEqn, inputs: list[Any], marks: Marks, changes: Changes, *, counted: bool
    ) -> Sequence[Any]:
        primitive = eqn.primitive.name
        # JAX accepts None as the name: such a mark is no stage.
        if primitive == "name" and isinstance(eqn.params["name"], str):
            return [self._mark(eqn, inputs, marks, changes)]
        entered = primitive in FLOW and (self.widened or has_marks(eqn))
        if entered and not (self.differentiable and primitive in CUSTOM):
            if primitive in (*CALLS, *CUSTOM):
                keys = ("call_jaxpr", "fun_jaxpr", "jaxpr")
                inner = next(eqn.params[key] for key in keys if key in eqn.params)
                with self._inside(eqn):
                    return self._call(inner, inputs, marks, changes)
            if self.recorder is not None:
                return self._recorded(self.recorder, eqn, inputs, marks, changes)
            return self._loop_or_branch(eqn, inputs, marks, changes)
        if not self.widened:
            return self._noted(eqn, inputs, bind(eqn, inputs))
        results = rounded(eqn, inputs, self.signs, self.notices, counted=counted)
        return self._noted(eqn, inputs, results)

    def _recorded(
        self, recorder: Recorder, eqn: JaxprEqn, inputs: list[Any], marks: Marks, changes: Changes
    ) -> Sequence[Any]:
        """Evaluate a loop or condition; record its operations if its number of iterations or branch
        is known and the loop is short."""
        primitive, course = eqn.primitive.name, recorder.course_of(eqn)
        p, times = eqn.params, recorder.times
        one_row = primitive == "while" and not aval(p["cond_jaxpr"].jaxpr.outvars[0]).shape
        with self._inside(eqn):
            if primitive == "scan" and _are_few(p["jaxpr"], times * p["length"]):
                return self._unrolled(recorder, eqn, inputs, marks, changes)
            if primitive == "cond" and course is not None:
                return self._cond(eqn, inputs, marks, changes, course)
            if one_row and course and _are_few(p["body_jaxpr"], times * course):
                return self._repeated(recorder, eqn, inputs, course)
        alone = dataclasses.replace(self, recorder=None)
        if primitive == "while" and self.widened:
            turns, outputs = alone._while(eqn, inputs)
            recorder.ask(eqn, turns)
            return self._noted(eqn, inputs, outputs)
        if primitive == "cond":
            recorder.ask(eqn, inputs[0])
        return self._noted(eqn, inputs, alone._loop_or_branch(eqn, inputs, marks, changes))

    def _loop_or_branch(
        self, eqn: JaxprEqn, inputs: list[Any], marks: Marks, changes: Changes
    ) -> Sequence[Any]:
        if eqn.primitive.name == "scan":
            return self._scan(eqn, inputs, marks, changes)
        if eqn.primitive.name == "cond":
            return self._cond(eqn, inputs, marks, changes)
        if has_marks(eqn):
            self.notices["marks in a while loop are not captured: they have many values"] = None
        return self._while(eqn, inputs)[1] if self.widened else bind(eqn, inputs)

    def _noted(self, eqn: JaxprEqn, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        if self.recorder is not None:
            self.recorder.note(eqn, inputs, outputs)
        return outputs

    @contextlib.contextmanager
    def _inside(self, call: JaxprEqn) -> Iterator[None]:
        if self.recorder is None:
            yield
            return
        self.recorder.enter(call)
        yield
        self.recorder.leave()

    def _mark(self, eqn: JaxprEqn, inputs: list[Any], marks: Marks, changes: Changes) -> Any:
        name = marks.name_of(eqn.params["name"])
        value = inputs[0]
        if self.differentiable and isinstance(value, Tracer):
            # Keep the mark in the program: rematerialisation policies read it.
            value = bind(eqn, inputs)[0]
        change = changes.get(name, MarkChange())
        marks.values[name] = reported = change.reported(value)
        following = change.following(reported)
        if self.recorder is not None:
            # The recorder identifies a value by its Python object, so the mark needs a new one.
            following = jnp.array(following, copy=True)
            self.recorder.note(eqn, inputs, [following], name, change.replaces)
        return following

    def _call(
        self, inner: ClosedJaxpr | Jaxpr, inputs: Sequence[Any], marks: Marks, changes: Changes
    ) -> list[Any]:
        jaxpr, constants = opened(inner)
        return self._inner(jaxpr, constants, inputs, marks, changes)

    def _scan(
        self, eqn: JaxprEqn, inputs: list[Any], marks: Marks, changes: Changes
    ) -> Sequence[Any]:
        p = eqn.params
        body, length = p["jaxpr"], p["length"]
        constants, first, rest = loop_inputs(eqn, inputs)
        shapes = self._shapes(body, [*constants, *first, *map(_row, rest)], marks)
        turns = range(length)[:: -1 if p["reverse"] else 1]
        passed_as = [(name, i) for i in turns for name in shapes]
        names = marks.next_names(in_turn(*of_turn) for of_turn in passed_as)
        outside = dict(zip(passed_as, names, strict=True))
        # Changes of single iterations are passed in as inputs of the scan.
        fed = {
            name: of_turns([changes.get(outside[name, i]) for i in range(length)], shape)
            for name, shape in shapes.items()
            if any(outside[name, i] in changes for i in range(length))
        }

        def step(carry: Any, xs: Any) -> Any:
            (turn, carry), (turn_inputs, turn_changes) = carry, xs
            own = marks.within()
            outputs = self.at(turn)._call(
                body, [*constants, *carry, *turn_inputs], own, turn_changes
            )
            following, rows = outputs[: len(first)], outputs[len(first) :]
            return (turn + 1, following), (rows, own.values, own.passed)

        (_, last), (outputs, values, passed) = jax.lax.scan(
            step,
            (jnp.int32(0), list(first)),
            (list(rest), fed),
            length=length,
            reverse=p["reverse"],
            unroll=p["unroll"],
        )
        for name, i in passed_as:
            unique = marks.name_of(in_turn(name, i))
            marks.values[unique] = values[name][i]
            if name in passed:
                marks.passed[unique] = passed[name][i]
        return [*last, *outputs]

    def _unrolled(
        self,
        recorder: Recorder,
        eqn: JaxprEqn,
        inputs: list[Any],
        marks: Marks,
        changes: Changes,
    ) -> Sequence[Any]:
        """Evaluate a scan without a loop, one iteration after another, to record its operations."""
        p = eqn.params
        constants, carry, rest = loop_inputs(eqn, inputs)
        first = [*constants, *carry, *map(_row, rest)]
        shapes = dataclasses.replace(self, recorder=None)._shapes(p["jaxpr"], first, marks)
        stacked: dict[int, list[Any]] = {}
        for turn in range(p["length"])[:: -1 if p["reverse"] else 1]:
            rows = [x[turn] for x in rest]
            for x, row in zip(rest, rows, strict=True):
                recorder.note(eqn, [x], [row])
            own, outside = marks.within(), marks.next_names(in_turn(n, turn) for n in shapes)
            inner = {n: changes[u] for n, u in zip(shapes, outside, strict=True) if u in changes}
            with recorder.turn(turn, p["length"]):
                outputs = self._call(p["jaxpr"], [*constants, *carry, *rows], own, inner)
            carry, stacked[turn] = outputs[: len(carry)], outputs[len(carry) :]
            for name, value in own.values.items():
                unique = marks.name_of(in_turn(name, turn))
                marks.values[unique] = value
                if name in own.passed:
                    marks.passed[unique] = own.passed[name]
        results = []
        for each in zip(*(stacked[turn] for turn in sorted(stacked)), strict=True):
            results.append(jnp.stack(each))
            recorder.note(eqn, each, results[-1:])
        return [*carry, *results]

    def _cond(
        self,
        eqn: JaxprEqn,
        inputs: list[Any],
        marks: Marks,
        changes: Changes,
        course: int | None = None,
    ) -> Sequence[Any]:
        """Evaluate a condition; if `course`, the index of the branch taken, is known, only that
        branch."""
        index, *operands = inputs
        branches = eqn.params["branches"]
        alone = dataclasses.replace(self, recorder=None)
        joint = Branches.of([alone._shapes(branch, operands, marks) for branch in branches])
        outside = dict(zip(joint.shapes, marks.next_names(joint.shapes), strict=True))

        def run(branch: ClosedJaxpr, names: dict[str, str]) -> Any:
            known = {n: outside[name] for n, name in names.items() if outside[name] in changes}

            def taken(*args: Any) -> Any:
                own = marks.within()
                inner = {name: changes[theirs] for name, theirs in known.items()}
                outputs = self._call(branch, args, own, inner)
                values = {n: jnp.zeros(s.shape, s.dtype) for n, s in joint.shapes.items()}
                passed = {name: jnp.asarray(name in names.values()) for name in joint.shapes}
                values |= {names[name]: value for name, value in own.values.items()}
                passed |= {names[name]: value for name, value in own.passed.items()}
                return outputs, values, passed

            return taken

        runs = [run(b, n) for b, n in zip(branches, joint.own, strict=True)]
        if course is None:
            outputs, values, passed = jax.lax.switch(index, runs, *operands)
        else:
            outputs, values, passed = runs[course](*operands)
        for name in joint.shapes:
            unique = marks.name_of(name)
            marks.values[unique], marks.passed[unique] = values[name], passed[name]
        return outputs

    def _shapes(self, inner: ClosedJaxpr, inputs: Sequence[Any], marks: Marks) -> dict[str, Any]:
        """Return shape and dtype of each mark (named intermediate) in a loop body or branch, by
        name.

        Args:
            inner: the loop body or branch.
            inputs: its arguments, or their shapes and dtypes.
            marks: marks of the program around it.
        """
        shapes: dict[str, Any] = {}

        def once(*args: Any) -> None:
            own = marks.within()
            self._call(inner, args, own, {})
            shapes.update({n: jax.typeof(x) for n, x in own.values.items()})

        jax.eval_shape(once, *inputs)
        return shapes

    def _while(self, eqn: JaxprEqn, inputs: list[Any]) -> tuple[Any, Sequence[Any]]:
        """Evaluate a while loop; return the number of its iterations, and its final values."""
        p = eqn.params
        condition = inputs[: p["cond_nconsts"]]
        constants, first = _while_inputs(eqn, inputs)

        def on(turn: Any, values: Any) -> Any:
            return self.at(turn)._call(p["cond_jaxpr"], [*condition, *values], Marks(), {})[0]

        def goes_on(carry: Any) -> Any:
            return jnp.any(on(*carry))

        def step(carry: Any) -> Any:
            turn, values = carry
            body = self.at(turn)
            following = body._call(p["body_jaxpr"], [*constants, *values], Marks(), {})
            if aval(p["cond_jaxpr"].jaxpr.outvars[0]).shape:
                # The loop of a `vmap`: a row that has ended keeps its values.
                following = _where(on(turn, values), following, values)
            return turn + 1, following

        return jax.lax.while_loop(goes_on, step, (jnp.int32(0), first))

    def _repeated(
        self, recorder: Recorder, eqn: JaxprEqn, inputs: list[Any], turns: int
    ) -> Sequence[Any]:
        """Evaluate `turns` iterations of a while loop without a loop, to record its operations."""
        constants, carry = _while_inputs(eqn, inputs)
        for turn in range(turns):
            with recorder.turn(turn, turns):
                carry = self._call(eqn.params["body_jaxpr"], [*constants, *carry], Marks(), {})
        return carry

    def at(self, turn: Any) -> Evaluation:
        """Return the settings for iteration `turn` of a loop; each iteration reads another part of
        the pool of random signs."""
        if self.signs is None:
            return self
        return dataclasses.replace(self, signs=self.signs.at(turn))

    def _constant(self, value: Any) -> Any:
        return _widen(value if self.signs is None else self.signs.constant(value))

    def _literal(self, value: Any) -> Any:
        return self._constant(value) if self.widened else value


def _where(on: Any, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    """Return each array of `new` in the rows where `on` is True, and that of `old` elsewhere.

    `on` holds booleans over the leading axes of the arrays.
    """
    return [
        jnp.where(on.reshape(on.shape + (1,) * (x.ndim - on.ndim)), x, y)
        for x, y in zip(new, old, strict=True)
    ]


def _while_inputs(eqn: JaxprEqn, inputs: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the constants of a while loop's body, and its initial values."""
    before = eqn.params["cond_nconsts"]
    start = before + eqn.params["body_nconsts"]
    return inputs[before:start], inputs[start:]


def _are_few(body: ClosedJaxpr, turns: int) -> bool:
    """Return whether a loop has few enough operations, over all iterations, to be unrolled."""
    return 0 < turns * sum(1 for _ in equations(body.jaxpr)) <= UNROLLED


def _row(sequence: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of the element of a sequence that one iteration of a scan reads.

    Not `sequence[0]`: a scan over an empty sequence has no iteration.
    """
    return jax.ShapeDtypeStruct(sequence.shape[1:], sequence.dtype)


def _widen(value: Any) -> Any:
    if not hasattr(value, "dtype") and not isinstance(value, (float, complex, np.generic)):
        return value
    # Not `result_type`: it would call a weak float32 literal float64.
    dtype = getattr(value, "dtype", None) or jnp.result_type(value)
    return value if wide(dtype) == dtype else jnp.asarray(value, wide(dtype))
