"""One evaluation of a jaxpr: its marks read and replaced, in its own dtypes or widened to float64.

A mark is a value that `jax.ad_checkpoint.checkpoint_name` was put on. Calls, rematerialised
regions, branches and scans that hold marks are entered; everything else is bound as it is, so that
operation by operation the results are the same bits. Widened, an evaluation enters everything, does
in float64 what the program does in less, and can round every result as the program would, by random
signs: the response of a program to that is its noise floor (Monte Carlo arithmetic, Parker 1997).
Source: docs/your-own-port.md "What a tolerance is made of".
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from parity.engine.jaxprs import bind, equations, inner_jaxprs, interpret
from parity.engine.operations import Recorder
from parity.engine.rounding import Signs
from parity.engine.rounding_rules import rounded, wide

CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_lin")
CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
FLOW = (*CALLS, *CUSTOM, "scan", "while", "cond")


@dataclass
class Marks:
    """Values by mark, in the order in which they were passed."""

    values: dict[str, Any] = field(default_factory=dict)
    passed: dict[str, Any] = field(default_factory=dict)
    """Of marks inside a branch, whether it was taken: bool scalars."""

    def name_of(self, name: str) -> str:
        """Return the name of the next value of a mark; the second is called `name#2`."""
        count, unique = 2, name
        while unique in self.values:
            unique, count = f"{name}#{count}", count + 1
        return unique


Forced = Mapping[str, tuple[Any, Any]]
"""By mark: whether it is replaced (a bool, possibly traced) and by what."""


@dataclass(frozen=True)
class Evaluation:
    """How to evaluate."""

    widened: bool = False
    """Do everything in float64; call it with 64-bit types enabled."""
    signs: Signs | None = None
    """Round the result of every operation by these."""
    notices: dict[str, None] = field(default_factory=dict)
    """What could not be done as asked, in order and once each."""
    recorder: Recorder | None = None
    """Notes every operation outside of loops and branches."""

    def run(
        self,
        closed: ClosedJaxpr,
        arguments: Sequence[Any],
        marks: Marks,
        forced: Forced | None = None,
    ) -> list[Any]:
        """Return the outputs of a jaxpr; its marks are added to `marks`."""
        return self._inner(closed.jaxpr, closed.consts, arguments, marks, forced or {})

    def _inner(
        self,
        jaxpr: Jaxpr,
        constants: Sequence[Any],
        arguments: Sequence[Any],
        marks: Marks,
        forced: Forced,
    ) -> list[Any]:
        if self.widened:
            constants = [self._constant(c) for c in constants]
            arguments = [_widen(a) for a in arguments]

        def step(eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
            return self._step(eqn, inputs, marks, forced)

        return interpret(jaxpr, constants, arguments, step, self._literal)

    def _step(
        self, eqn: JaxprEqn, inputs: list[Any], marks: Marks, forced: Forced
    ) -> Sequence[Any]:
        primitive = eqn.primitive.name
        if primitive == "name":
            name = marks.name_of(eqn.params["name"])
            marks.values[name] = value = inputs[0]
            replaced = _replaced(value, forced.get(name))
            if self.recorder is not None:
                # Its own object: the value itself is known by the operation that computed it.
                replaced = replaced + 0
                self.recorder.note(eqn, inputs, [replaced], name)
            return [replaced]
        if primitive in FLOW and (self.widened or _has_marks(eqn)):
            if primitive in (*CALLS, *CUSTOM):
                keys = ("call_jaxpr", "fun_jaxpr", "jaxpr")
                inner = next(eqn.params[key] for key in keys if key in eqn.params)
                with self._inside(eqn):
                    return self._call(inner, inputs, marks, forced)
            return self._noted(eqn, inputs, self._loop_or_branch(eqn, inputs, marks, forced))
        if not self.widened:
            return self._noted(eqn, inputs, bind(eqn, inputs))
        return self._noted(eqn, inputs, rounded(eqn, inputs, self.signs, self.notices))

    def _loop_or_branch(
        self, eqn: JaxprEqn, inputs: list[Any], marks: Marks, forced: Forced
    ) -> Sequence[Any]:
        alone = dataclasses.replace(self, recorder=None)
        if eqn.primitive.name == "scan":
            return alone._scan(eqn, inputs, marks, forced)
        if eqn.primitive.name == "cond":
            return alone._cond(eqn, inputs, marks, forced)
        if _has_marks(eqn):
            self.notices["marks inside of a while loop have no one value: not seen"] = None
        return alone._while(eqn, inputs) if self.widened else bind(eqn, inputs)

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

    def _call(
        self, inner: ClosedJaxpr | Jaxpr, inputs: list[Any], marks: Marks, forced: Forced
    ) -> list[Any]:
        if isinstance(inner, Jaxpr):
            return self._inner(inner, (), inputs, marks, forced)
        return self._inner(inner.jaxpr, inner.consts, inputs, marks, forced)

    def _scan(
        self, eqn: JaxprEqn, inputs: list[Any], marks: Marks, forced: Forced
    ) -> Sequence[Any]:
        p = eqn.params
        body, length = p["jaxpr"], p["length"]
        constants = inputs[: p["num_consts"]]
        first = inputs[p["num_consts"] :][: p["num_carry"]]
        rest = inputs[p["num_consts"] + p["num_carry"] :]
        if self.widened:
            first = [_widen(x) for x in first]
        # A replaced mark is fed iteration by iteration, where every iteration has one.
        of_body = {f"{_in_iteration(name, 0)}": name for name in _names_in(self, eqn, inputs)}
        fed = {
            name: tuple(
                jnp.stack(
                    [jnp.asarray(forced[_in_iteration(name, i)][part]) for i in range(length)]
                )
                for part in (0, 1)
            )
            for key, name in of_body.items()
            if all(_in_iteration(name, i) in forced for i in range(length))
        }
        taken: dict[str, None] = {}

        def step(carry: Any, xs: Any) -> Any:
            (turn, carry), (turn_inputs, turn_fed) = carry, xs
            own = Marks()
            inner = self.at(turn)
            outputs = inner._inner(
                body.jaxpr, body.consts, [*constants, *carry, *turn_inputs], own, turn_fed
            )
            taken.update(dict.fromkeys(own.values))
            following = [
                jnp.asarray(x, before.dtype) if hasattr(before, "dtype") else x
                for x, before in zip(outputs, first, strict=False)
            ]
            return (turn + 1, following), (outputs[len(first) :], own.values, own.passed)

        (_, last), (outputs, values, passed) = jax.lax.scan(
            step,
            (jnp.int32(0), list(first)),
            (list(rest), fed),
            length=length,
            reverse=p["reverse"],
            unroll=p["unroll"],
        )
        for i in range(length):
            for name in taken:
                turn_name = marks.name_of(_in_iteration(name, i))
                marks.values[turn_name] = values[name][i]
                if name in passed:
                    marks.passed[turn_name] = passed[name][i]
        return [*last, *outputs]

    def _cond(
        self, eqn: JaxprEqn, inputs: list[Any], marks: Marks, forced: Forced
    ) -> Sequence[Any]:
        index, *operands = inputs
        branches = eqn.params["branches"]

        def shape_of(branch: ClosedJaxpr) -> Any:
            def values(*args: Any) -> Any:
                own = Marks()
                outputs = self._call(branch, list(args), own, {})
                return outputs, own.values

            return jax.eval_shape(values, *operands)

        shapes: dict[str, Any] = {}
        for branch in branches:
            shapes = shape_of(branch)[1] | shapes

        def run(branch: ClosedJaxpr) -> Any:
            def taken(*args: Any) -> Any:
                own = Marks()
                outputs = self._call(branch, list(args), own, forced)
                blank = {n: jnp.zeros(s.shape, s.dtype) for n, s in shapes.items()}
                passed = {name: jnp.asarray(name in own.values) for name in shapes}
                return outputs, blank | own.values, passed | own.passed

            return taken

        outputs, values, passed = jax.lax.switch(index, [run(b) for b in branches], *operands)
        for name in shapes:
            unique = marks.name_of(name)
            marks.values[unique], marks.passed[unique] = values[name], passed[name]
        return outputs

    def _while(self, eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        p = eqn.params
        condition = inputs[: p["cond_nconsts"]]
        constants = inputs[p["cond_nconsts"] :][: p["body_nconsts"]]
        first = [_widen(x) for x in inputs[p["cond_nconsts"] + p["body_nconsts"] :]]

        def goes_on(carry: Any) -> Any:
            return self._call(p["cond_jaxpr"], [*condition, *carry], Marks(), {})[0]

        def step(carry: Any) -> Any:
            outputs = self._call(p["body_jaxpr"], [*constants, *carry], Marks(), {})
            return [jnp.asarray(x, y.dtype) for x, y in zip(outputs, carry, strict=True)]

        return jax.lax.while_loop(goes_on, step, first)

    def at(self, turn: Any) -> Evaluation:
        """Return the evaluation of one turn of a loop, whose signs are its own."""
        if self.signs is None:
            return self
        return dataclasses.replace(self, signs=self.signs.at(turn))

    def _constant(self, value: Any) -> Any:
        return _widen(value if self.signs is None else self.signs.constant(value))

    def _literal(self, value: Any) -> Any:
        return self._constant(value) if self.widened else value


def _names_in(how: Evaluation, eqn: JaxprEqn, inputs: list[Any]) -> list[str]:
    """Return the marks of a scan's body as one iteration names them."""
    if not _has_marks(eqn):
        return []
    p, names = eqn.params, []
    count = p["num_consts"] + p["num_carry"]

    def once(*args: Any) -> Any:
        own = Marks()
        outputs = how._inner(p["jaxpr"].jaxpr, p["jaxpr"].consts, args, own, {})
        names.extend(own.values)
        return outputs

    jax.eval_shape(once, *inputs[:count], *(x[0] for x in inputs[count:]))
    return names


def _in_iteration(name: str, turn: int) -> str:
    """Name a mark by the turn of the loop it is in; the outermost loop comes first."""
    base, _, inner = name.partition("@")
    return f"{base}@{turn}" + (f"@{inner}" if inner else "")


def _replaced(value: Any, forced: tuple[Any, Any] | None) -> Any:
    if forced is None:
        return value
    on, other = forced
    return jnp.where(on, jnp.asarray(other, value.dtype).reshape(value.shape), value)


def _has_marks(eqn: JaxprEqn) -> bool:
    return any(
        inner_eqn.primitive.name == "name"
        for inner in inner_jaxprs(eqn)
        for inner_eqn in equations(inner)
    )


def _widen(value: Any) -> Any:
    if not hasattr(value, "dtype") and not isinstance(value, (float, complex, np.generic)):
        return value
    dtype = jnp.result_type(value)
    return value if wide(dtype) == dtype else jnp.asarray(value, wide(dtype))
