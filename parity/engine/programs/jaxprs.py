"""Traversal and step-by-step evaluation of jaxprs, the programs that JAX traces.

A jaxpr is a list of equations, some of which contain jaxprs: calls, branches and loops. An open
jaxpr lacks the values of its constants; a closed one has them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

Value = TypeVar("Value")


def aval(variable: Any) -> Any:
    """Return the abstract value of a variable: for an array, its shape and dtype."""
    return variable.aval


def inner_jaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Yield the open jaxprs among an equation's parameters: callee, branches, body, combiner."""
    for value in eqn.params.values():
        for member in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(member, (ClosedJaxpr, Jaxpr)):
                yield opened(member)[0]


def opened(inner: ClosedJaxpr | Jaxpr) -> tuple[Jaxpr, Sequence[Any]]:
    """Return an open jaxpr and the values of its constants; () if `inner` is open already.

    Since JAX 0.11 open and closed jaxprs have one class; `consts` of an open jaxpr are empty.
    """
    jaxpr: Any = getattr(inner, "jaxpr", inner)
    return jaxpr, getattr(inner, "consts", ())


def loop_inputs(
    scan: JaxprEqn, inputs: Sequence[Value]
) -> tuple[list[Value], list[Value], list[Value]]:
    """Return the inputs of a scan in three groups: constants, carried values, sequences.

    JAX 0.10 stores the group sizes in the scan's parameters; JAX 0.11 stores pytrees instead.
    """
    if "num_consts" in scan.params:
        constants, carried = scan.params["num_consts"], scan.params["num_carry"]
    else:
        constants, carried, _ = map(len, scan.params["ft_in"].unpack())
    rest = constants + carried
    return list(inputs[:constants]), list(inputs[constants:rest]), list(inputs[rest:])


@cache
def is_hidden(file_name: str) -> bool:
    """Return whether the imported module of this file sets `__tracebackhide__ = True`.

    An operation in such a module is reported at the line that calls the module. This is useful for
    helper modules that most of a model calls. pytest hides frames by a local variable of the same
    name.
    """
    # `vars` rather than `getattr`, which may trigger a lazy import that fails.
    named = (vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__"))
    return any(
        names.get("__file__") == file_name and names.get("__tracebackhide__") is True
        for names in named
    )


def equations(
    jaxpr: Jaxpr, enter: Callable[[JaxprEqn], bool] = lambda eqn: True
) -> Iterator[JaxprEqn]:
    """Yield every equation; equations inside a call, branch or loop follow the equation that
    contains them.

    Args:
        jaxpr: an open jaxpr.
        enter: whether to look inside an equation.
    """
    for eqn in jaxpr.eqns:
        yield eqn
        if enter(eqn):
            for inner in inner_jaxprs(eqn):
                yield from equations(inner, enter)


def constants(program: ClosedJaxpr | Jaxpr) -> Iterator[Any]:
    """Yield the values of the constants of a program, and of the calls, branches and loops in it.

    The constants are the arrays that the function closes over, and numbers written in its code
    (literals).
    """
    jaxpr, values = opened(program)
    yield from values
    for eqn in jaxpr.eqns:
        yield from (v.val for v in eqn.invars if isinstance(v, Literal))
        for value in eqn.params.values():
            for member in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(member, (ClosedJaxpr, Jaxpr)):
                    yield from constants(member)


def counters(jaxpr: Jaxpr) -> frozenset[int]:
    """Return the `id`s of the equations that depend only on literals and counters (`iota`), not on
    arguments or constants of the jaxpr; such equations compute positions and masks."""
    found: set[int] = set()
    known: set[Any] = set()
    for eqn in jaxpr.eqns:
        if not eqn.effects and all(isinstance(v, Literal) or v in known for v in eqn.invars):
            found.add(id(eqn))
            known.update(eqn.outvars)
    return frozenset(found)


def interpret(
    jaxpr: Jaxpr,
    constants: Sequence[Value],
    arguments: Sequence[Value],
    step: Callable[[JaxprEqn, list[Value]], Sequence[Value]],
    lift: Callable[[Any], Value] = lambda constant: constant,
) -> list[Value]:
    """Evaluate a jaxpr one equation at a time and return its outputs.

    A value is released after the last equation that reads it, to limit memory use.

    Args:
        jaxpr: an open jaxpr.
        constants: one value for each of the jaxpr's `constvars`.
        arguments: one value for each of the jaxpr's `invars`.
        step: computes the outputs of an equation from its inputs.
        lift: converts a literal (a Python or NumPy number) to a value.
    """
    variables = [*jaxpr.constvars, *jaxpr.invars]
    values = dict(zip(variables, [*constants, *arguments], strict=True))
    last = _last_uses(jaxpr)

    def read(atom: Any) -> Value:
        return lift(atom.val) if isinstance(atom, Literal) else values[atom]

    for index, eqn in enumerate(jaxpr.eqns):
        outputs = step(eqn, [read(atom) for atom in eqn.invars])
        values.update(zip(eqn.outvars, outputs, strict=True))
        for atom in last.get(index, ()):
            values.pop(atom, None)
    return [read(atom) for atom in jaxpr.outvars]


def bind(eqn: JaxprEqn, arrays: Sequence[Any]) -> list[Any]:
    """Evaluate one equation on arrays and return its outputs."""
    # Some results depend on settings: which random numbers are drawn, for example.
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*arrays, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _last_uses(jaxpr: Jaxpr) -> dict[int, list[Var]]:
    """Return, by equation index, the variables that no later equation reads."""
    last: dict[Var, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        read = (atom for atom in eqn.invars if not isinstance(atom, Literal))
        last |= dict.fromkeys((*eqn.outvars, *read), index)
    for atom in jaxpr.outvars:
        if not isinstance(atom, Literal):
            last.pop(atom, None)
    uses: dict[int, list[Var]] = {}
    for atom, index in last.items():
        uses.setdefault(index, []).append(atom)
    return uses
