"""Replay of a step whose result is not finite, to find the first operation that failed.

The program is evaluated equation by equation, including calls, branches and loop iterations. Every
value that is not finite carries its origin: operation, source line, module and inputs. The root
cause of an output is the end of its chain of origins. Infinities of constants, such as those of a
mask that a softmax removes again, do not count. Source: docs/training.md "What made it so".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from megalodon_jax.weights import dotted
from parity.engine.programs.jaxprs import bind, interpret, loop_inputs, opened
from stability.core.findings import Finding, Severity
from stability.dtype_audit.jaxpr import is_library, source_of
from stability.dtype_audit.scopes import announced, module_of, phase_of
from stability.nonfinite.operands import Operand, all_finite, has_nan, operand

SOURCE = 'docs/training.md "What made it so"'
Kind = Literal["operation", "input", "constant"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a NaN or an infinity: an operation, an argument or a constant of the program."""

    kind: Kind
    name: str
    """Name of the primitive, path of the argument, or `constant`."""
    source: str = ""
    """File and line of the operation; empty if unknown."""
    module: str = ""
    """Path of the module that contains the operation; empty if there is none."""
    phase: str = "forward"
    """`forward`, `jvp` or `backward`."""
    where: str = ""
    """Enclosing branches and iterations, such as `scan[3]/cond[1]`; empty outside of any."""
    inputs: tuple[Operand, ...] = ()
    """Summaries of the operation's inputs."""
    outputs: tuple[Operand, ...] = ()
    """Summaries of the operation's outputs, or of the argument."""
    cause: Origin | None = None
    """Origin of the operation's input that was not finite; None if all inputs were."""

    @property
    def root(self) -> Origin:
        """Root cause: the last origin in the chain of causes that is no constant of the program."""
        at = self
        while at.cause is not None and at.cause.kind != "constant":
            at = at.cause
        return at

    def describe(self) -> str:
        """Return a sentence on the operation (location, inputs, outputs), or on the argument."""
        if self.kind == "input":
            return f"argument {self.name} was not finite: {self.outputs[0].describe()}"
        place = ", ".join(filter(None, (self.module, self.source, self.where)))
        reads = "; ".join(operand.describe() for operand in self.inputs)
        writes = "; ".join(operand.describe() for operand in self.outputs)
        phase = "backward" if self.phase == "backward" else "forward"
        return f"{phase} {self.name} ({place}) produced {writes} from {reads}"


def locate(function: Callable[..., Any], *args: Any) -> Origin | None:
    """Return the root cause of the first output that is not finite; None if all are finite.

    Outputs that are not finite because of a constant of the program are considered last.

    Args:
        function: the failing function, for instance `eqx.filter_grad(loss)`. It is traced here, and
            Equinox models in `args` give the module paths.
        args: its arguments; leaves that are not arrays are static.

    Returns:
        The root of the chain of causes. None can also mean that only the compiled program fails,
        not its single operations: compare with a run under `jax.disable_jit`.
    """
    named = tuple(announced(arg) for arg in args)
    dynamic, static = eqx.partition(named, eqx.is_array)

    def run(dynamic: Any) -> Any:
        return eqx.filter(function(*eqx.combine(dynamic, static)), eqx.is_array)

    closed = jax.make_jaxpr(run)(dynamic)
    leaves = jax.tree_util.tree_flatten_with_path(dynamic)[0]
    arguments = [_Value(leaf, _of_input(dotted(path), leaf)) for path, leaf in leaves]
    constants = [_constant(value) for value in closed.consts]
    values = _replay(closed.jaxpr, constants, arguments, _Place())
    origins = [value.origin for value in values if value.origin is not None]
    return min(origins, key=lambda origin: origin.kind == "constant").root if origins else None


def locate_findings(function: Callable[..., Any], *args: Any) -> list[Finding]:
    """Return the result of `locate` as one finding.

    Its value (metric `non_finite`) is the number of NaN and infinite elements in the output of the
    operation, or in the argument, that is the root cause; 0 if all outputs of the function are
    finite.
    """
    origin = locate(function, *args)
    if origin is None:
        message = "evaluated operation by operation, every output is finite"
        return [Finding("replay", Severity.OK, "step", "non_finite", 0.0, 0.0, SOURCE, message)]
    bad = float(sum(operand.nan + operand.inf for operand in origin.outputs))
    subject, error = f"{origin.module} {origin.name}".strip(), Severity.ERROR
    message, remedy = origin.describe(), _remedy(origin)
    return [Finding("replay", error, subject, "non_finite", bad, 0.0, SOURCE, message, remedy)]


def _remedy(origin: Origin) -> str:
    if origin.kind == "input":
        return "restore the last checkpoint without non-finite values, or correct the batch"
    if any(operand.inf for operand in origin.outputs):
        return "an overflow: widen the operands, clip them, or lower the learning rate"
    return "keep the operation's inputs inside its domain (floor, clip, or select before it)"


@dataclass(frozen=True, slots=True)
class _Value:
    """An array and, if it is not finite, the origin of its NaN or infinity."""

    array: Any
    origin: Origin | None = None


_Call = Callable[[Any, Sequence[_Value], str], list[_Value]]
"""Function (jaxpr, values, label) that evaluates a jaxpr; the label is the branch or iteration."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Location of a jaxpr's equations; all fields are empty for the outermost jaxpr."""

    stack: str = ""
    """Name stack of the caller, with `/` between calls."""
    source: str = ""
    """File and line that call a library's jaxpr, reported for all its equations; else empty."""
    where: str = ""
    """Enclosing branches and iterations."""


def _replay(
    jaxpr: Jaxpr, constants: Sequence[_Value], arguments: Sequence[_Value], place: _Place
) -> list[_Value]:
    """Evaluate a jaxpr on values with origins; return its outputs with origins."""

    def step(eqn: JaxprEqn, inputs: list[_Value]) -> list[_Value]:
        name, params = eqn.primitive.name, eqn.params
        stack = "/".join(filter(None, (place.stack, str(eqn.source_info.name_stack))))
        line = place.source or source_of(eqn)

        def call(closed: Any, args: Sequence[_Value], label: str) -> list[_Value]:
            inner, values = opened(closed)
            constants = [_constant(value) for value in values]
            below = "/".join(filter(None, (place.where, label)))
            source = line if is_library(inner) else place.source
            return _replay(inner, constants, args, _Place(stack, source, below))

        match name:
            case "scan":
                return _scan(call, eqn, inputs)
            case "while":
                return _while(call, params, inputs)
            case "cond":
                branch = int(np.asarray(inputs[0].array))
                return call(params["branches"][branch], inputs[1:], f"cond[{branch}]")
        inner = next((params[key] for key in ("jaxpr", "call_jaxpr") if key in params), None)
        if inner is not None and not name.startswith(("reduce", "scatter", "custom_lin")):
            return call(inner, inputs, "")
        return _bound(eqn, inputs, _Place(stack, line, place.where))

    return interpret(jaxpr, constants, arguments, step, _constant)


def _bound(eqn: JaxprEqn, inputs: Sequence[_Value], place: _Place) -> list[_Value]:
    """Return the outputs of one operation; those not finite have an origin (see `_origin`)."""
    if (moved := _moved(eqn, inputs)) is not None:
        return [moved]
    outputs = bind(eqn, [value.array for value in inputs])
    bad = [not all_finite(array) for array in outputs]
    if not any(bad):
        return [_Value(array) for array in outputs]
    origin = _origin(eqn.primitive.name, inputs, outputs, place)
    return [_Value(array, origin if b else None) for array, b in zip(outputs, bad, strict=True)]


def _moved(eqn: JaxprEqn, inputs: Sequence[_Value]) -> _Value | None:
    """Apply an operation that only rearranges elements; return None for any other operation.

    It is applied on the host, which needs no compilation. The output has the input's origin.
    """
    name, params = eqn.primitive.name, eqn.params
    to: Any = eqn.outvars[0].aval
    if name not in _MOVES or jax.dtypes.issubdtype(to.dtype, jax.dtypes.extended):
        return None
    value, *dynamic = inputs
    if dynamic or (name == "reshape" and params["dimensions"] is not None):
        return None
    # The input may be a literal, a Python number.
    array = np.asarray(value.array, to.dtype)
    if name == "transpose":
        array = array.transpose(params["permutation"])
    elif name == "broadcast_in_dim":
        at = dict(zip(params["broadcast_dimensions"], array.shape, strict=True))
        array = np.broadcast_to(array.reshape([at.get(i, 1) for i in range(to.ndim)]), to.shape)
    with jax.enable_x64(to.dtype.itemsize == 8):
        return _Value(jax.device_put(array.reshape(to.shape)), value.origin if to.size else None)


_MOVES = ("broadcast_in_dim", "reshape", "squeeze", "transpose")


def _origin(name: str, inputs: Sequence[_Value], outputs: Sequence[Any], place: _Place) -> Origin:
    """Return a new origin if an operation failed, else the origin of its input that was not finite.

    An operation failed if all inputs were finite, or if a NaN appears and no input had a NaN.
    """
    bad_inputs = [value for value in inputs if value.origin is not None]
    cause = min(bad_inputs, key=_blame).origin if bad_inputs else None
    made_nan = any(map(has_nan, outputs)) and not any(has_nan(v.array) for v in bad_inputs)
    if cause is not None and not made_nan:
        return cause
    return Origin(
        "operation",
        name,
        place.source,
        module_of(place.stack),
        phase_of(place.stack),
        place.where,
        tuple(operand(value.array) for value in inputs),
        tuple(operand(array) for array in outputs),
        cause,
    )


def _blame(value: _Value) -> tuple[bool, bool]:
    """Sort key of inputs that are not finite: NaN before infinity; constants last in each group."""
    origin = value.origin
    return not has_nan(value.array), origin is not None and origin.kind == "constant"


def _scan(call: _Call, eqn: JaxprEqn, inputs: list[_Value]) -> list[_Value]:
    params, length = eqn.params, eqn.params["length"]
    fixed, carry, sequences = loop_inputs(eqn, inputs)
    carried = len(carry)
    order = range(length - 1, -1, -1) if params["reverse"] else range(length)
    rows: dict[int, list[_Value]] = {}
    for i in order:
        slices = [_slice(value, i) for value in sequences]
        out = call(params["jaxpr"], [*fixed, *carry, *slices], f"scan[{i}]")
        carry, rows[i] = out[:carried], out[carried:]
    if not length:
        shapes = params["jaxpr"].out_avals[carried:]
        return [*carry, *(_Value(jnp.zeros((0, *a.shape), a.dtype)) for a in shapes)]
    return [*carry, *(_stack([rows[i][k] for i in range(length)]) for k in range(len(rows[0])))]


def _while(call: _Call, params: Mapping[str, Any], inputs: list[_Value]) -> list[_Value]:
    test_count, body_count = params["cond_nconsts"], params["body_nconsts"]
    condition, body = inputs[:test_count], inputs[test_count : test_count + body_count]
    carry, count = inputs[test_count + body_count :], 0
    while bool(np.asarray(call(params["cond_jaxpr"], [*condition, *carry], "while")[0].array)):
        carry = call(params["body_jaxpr"], [*body, *carry], f"while[{count}]")
        count += 1
    return carry


def _slice(value: _Value, index: int) -> _Value:
    with jax.enable_x64(value.array.dtype.itemsize == 8):
        array = value.array[index]
    return _Value(array, value.origin if value.origin and not all_finite(array) else None)


def _stack(values: Sequence[_Value]) -> _Value:
    bad = [value for value in values if value.origin is not None]
    with jax.enable_x64(values[0].array.dtype.itemsize == 8):
        array = jnp.stack([value.array for value in values])
    return _Value(array, min(bad, key=_blame).origin if bad else None)


def _constant(value: Any) -> _Value:
    origin = None if all_finite(value) else Origin("constant", "constant")
    return _Value(value, origin)


def _of_input(name: str, leaf: Any) -> Origin | None:
    # The first part of the name is the position of the argument in the call.
    return None if all_finite(leaf) else Origin("input", name, outputs=(operand(leaf),))
