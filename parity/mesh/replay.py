"""Evaluates a jaxpr equation by equation, also inside calls, loops and `shard_map`.

Every mark (intermediate named with `jax.ad_checkpoint.checkpoint_name`) becomes an extra output. In
a scan the output gets a leading loop axis, in `shard_map` one block per device. A branch or `while`
is evaluated as one operation without its marks, which do not have a single value. Source:
docs/sharding.md "What is compared".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import PartitionSpec

from parity.engine.programs.jaxprs import bind, interpret, loop_inputs, opened

Taken = dict[str, Any]
"""Values of marks, by name."""
Operation = Callable[[JaxprEqn, list[Any]], list[Any]]
"""Evaluates one equation: returns its outputs, given its inputs. Calls, scans and `shard_map`s are
evaluated by `Replay` instead."""
INLINED = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat",
           "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")  # fmt: skip
"""Primitives whose body is evaluated in place. Custom derivatives are not needed any more, since a
program is differentiated before it is replayed."""
MARK = "name"
"""Name of the primitive that `checkpoint_name` adds to a jaxpr."""


@dataclass(frozen=True)
class Mark:
    """An intermediate named with `checkpoint_name`, and its location in the program."""

    name: str
    """Name in the program; the second mark called `q` is `q#1`."""
    axes: tuple[str, ...] = ()
    """Mesh axes along which devices hold one block each; empty outside `shard_map`."""
    varying: frozenset[str] = frozenset()
    """Mesh axes along which blocks may differ; empty if `shard_map` does not track them."""
    loops: int = 0
    """Number of scans around the `shard_map`. Each adds an axis to the value, before the axis along
    which the devices' blocks are stacked."""


@dataclass
class Replay:
    """One evaluation of a jaxpr, which collects marks and may replace values and operations."""

    forced: Mapping[str, Any] = field(default_factory=dict)
    """Global values, by name of a mark, with which the computation continues in place of the mark's
    own. The reported value of a mark is still the computed one."""
    placements: Mapping[str, PartitionSpec] = field(default_factory=dict)
    """Shardings of the values in `forced` whose marks are inside `shard_map`."""
    operation: Operation | None = None
    """Evaluates every equation instead of JAX; None: evaluate it unchanged."""
    marks: dict[str, Mark] = field(default_factory=dict)
    """Marks by name, in order of execution."""
    _passed: dict[str, int] = field(default_factory=dict)
    _axes: tuple[str, ...] = ()
    _loops: int = 0
    _around: int = 0

    def run(self, closed: ClosedJaxpr, arguments: Sequence[Any]) -> tuple[list[Any], Taken]:
        """Return the outputs of the program, and the values of its marks by name."""
        return self._body(closed.jaxpr, closed.consts, arguments, self.forced)

    def _body(
        self, jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any], forced: Taken | Any
    ) -> tuple[list[Any], Taken]:
        taken: Taken = {}

        def step(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
            kind = eqn.primitive.name
            if kind == MARK:
                return [self._mark(eqn, inputs[0], taken, forced)]
            if self._enters(eqn):
                inside = {n: forced[n] for n in self._ahead(eqn) if n in forced}
                enter = {"scan": self._scan, "shard_map": self._shard_map}.get(kind, self._call)
                outputs, more = enter(eqn, inputs, inside)
                taken.update(more)
                return outputs
            # The compiler's metadata should name the source lines of the user's program, not ours.
            info = eqn.source_info
            names = source_info_util.current_name_stack() + info.name_stack
            with source_info_util.user_context(info.traceback, name_stack=names):
                return self.operation(eqn, inputs) if self.operation else bind(eqn, inputs)

        return interpret(jaxpr, constants, arguments, step), taken

    def _enters(self, eqn: JaxprEqn) -> bool:
        if body_of(eqn) is None:
            return False
        return self.operation is not None or next(_names(eqn), None) is not None

    def _ahead(self, eqn: JaxprEqn) -> list[str]:
        """Return the numbered names of the marks inside an equation that is not evaluated yet."""
        passed = dict(self._passed)
        return [_numbered(name, passed) for name in _names(eqn)]

    def _mark(self, eqn: JaxprEqn, value: Any, taken: Taken, forced: Taken) -> Any:
        name = _numbered(eqn.params["name"], self._passed)
        varying = varying_axes(value)
        self.marks[name] = Mark(name, self._axes, varying, self._around)
        taken[name] = value
        if name not in forced:
            return value
        if _is_whole(value.dtype):
            other = forced[name].astype(value.dtype)
        else:
            other = _joined(forced[name], value)
        if missing := tuple(a for a in self._axes if a in varying - varying_axes(other)):
            other = jax.lax.pcast(other, missing, to="varying")
        return other

    def _call(self, eqn: JaxprEqn, inputs: list[Any], forced: Taken) -> tuple[list[Any], Taken]:
        jaxpr, constants = body_of(eqn) or _NOTHING
        return self._body(jaxpr, constants, inputs, forced)

    def _scan(self, eqn: JaxprEqn, inputs: list[Any], forced: Taken) -> tuple[list[Any], Taken]:
        jaxpr, constants = body_of(eqn) or _NOTHING
        p = eqn.params
        fixed, carry, rows = loop_inputs(eqn, inputs)
        passed = dict(self._passed)

        def body(carry: list[Any], row: tuple[list[Any], Taken]) -> tuple[list[Any], Any]:
            # JAX may trace a body several times; each trace must number marks from the same start.
            self._passed = dict(passed)
            outputs, taken = self._body(jaxpr, constants, [*fixed, *carry, *row[0]], row[1])
            return outputs[: len(carry)], (outputs[len(carry) :], taken)

        self._loops += 1
        last, (stacked, taken) = jax.lax.scan(
            body, carry, (rows, forced), p["length"], p["reverse"], p["unroll"]
        )
        self._loops -= 1
        return [*last, *stacked], taken

    def _shard_map(
        self, eqn: JaxprEqn, inputs: list[Any], forced: Taken
    ) -> tuple[list[Any], Taken]:
        jaxpr, constants = body_of(eqn) or _NOTHING
        p, outside = eqn.params, (self._axes, self._around)
        manual = p.get("newly_manual_axes", p.get("manual_axes"))
        axes = tuple(axis for axis in p["mesh"].axis_names if axis in manual)

        def body(inputs: list[Any], forced: Taken) -> tuple[list[Any], Taken]:
            outputs, taken = self._body(jaxpr, constants, inputs, forced)
            return outputs, {name: _block(value, axes) for name, value in taken.items()}

        ahead, around = self._ahead(eqn), self._loops
        self._axes, self._around = outside[0] + axes, around
        specs = {n: PartitionSpec(*tuple(self.placements[n])[around:]) for n in forced}
        outputs, taken = jax.shard_map(
            body,
            mesh=p["mesh"],
            in_specs=(list(p["in_specs"]), specs),
            out_specs=(list(p["out_specs"]), {n: PartitionSpec(axes) for n in ahead}),
            check_vma=p["check_vma"],
            axis_names=set(axes),
        )(inputs, forced)
        self._axes, self._around = outside
        return outputs, taken


def _is_whole(dtype: Any) -> bool:
    """Return whether `program.host` represents an element of this dtype by one number."""
    several = (jax.dtypes.prng_key, np.complexfloating)
    return not any(jax.dtypes.issubdtype(dtype, kind) for kind in several)


def _joined(parts: Any, like: Any) -> Any:
    """Return complex numbers or PRNG keys of the dtype of `like`: the inverse of `program.host`.

    `parts` has real and imaginary parts along the last axis, or the integers of the keys.
    """
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(parts, impl=jax.random.key_impl(like))
    return jax.lax.complex(parts[..., 0], parts[..., 1]).astype(like.dtype)


def marks_of(closed: ClosedJaxpr) -> list[str]:
    """Return the names of a program's marks, in order of execution."""
    passed: dict[str, int] = {}
    return [_numbered(name, passed) for name in _names_in(closed.jaxpr)]


def varying_axes(value: Any) -> frozenset[str]:
    """Return the mesh axes along which `shard_map` considers a value to differ between devices."""
    return frozenset(jax.typeof(value).manual_axis_type.varying)


def _block(value: Any, axes: tuple[str, ...]) -> Any:
    """Return one device's value with a new first axis, along which all devices are stacked."""
    missing = tuple(axis for axis in axes if axis not in varying_axes(value))
    # With `check_vma=False`, values have no varying axes and none may be added.
    if missing and varying_axes(jax.lax.axis_index(axes[0])):
        value = jax.lax.pcast(value, missing, to="varying")
    return value[None]


_NOTHING: Any = (None, ())


def body_of(eqn: JaxprEqn) -> tuple[Jaxpr, Sequence[Any]] | None:
    """Return the body of a call, scan or `shard_map`; None for other equations."""
    if eqn.primitive.name not in (*INLINED, "scan", "shard_map"):
        return None
    for field_name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = eqn.params.get(field_name)
        if isinstance(body, (ClosedJaxpr, Jaxpr)):
            return opened(body)
    return None


def _names(eqn: JaxprEqn) -> Iterator[str]:
    body = body_of(eqn)
    if body is not None:
        yield from _names_in(body[0])


def _names_in(jaxpr: Jaxpr) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == MARK:
            yield eqn.params["name"]
        else:
            yield from _names(eqn)


def _numbered(name: str, passed: dict[str, int]) -> str:
    count = passed[name] = passed.get(name, -1) + 1
    return f"{name}#{count}" if count else name
