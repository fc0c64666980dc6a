"""What a side is: a program with named parameters, inputs and stages, to be run in any precision.

The stages of a side are its intermediates in the order in which they are finished; they have names
nobody gave them: paths of submodules, and below them the fields of what a submodule returned. The
last ones are what the whole program returned. Source: docs/your-own-port.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np

from parity.engine.operations import Operation

Arrays = Mapping[str, np.ndarray]
OUTPUT = "output"
"""What the result of a program is called; a field of it is `output.logits`."""


class Precision(StrEnum):
    """What a side computes in."""

    FLOAT32 = "float32"
    """As it is: the program its users run, bit for bit."""
    FLOAT64 = "float64"
    """The same mathematics with every operation in float64, also those it casts to float32."""
    BFLOAT16 = "bfloat16"
    """Parameters and inputs in bfloat16, as its users would run it narrow."""


class Rounding(StrEnum):
    """What moves in a float64 run, by random signs of one unit roundoff of float32."""

    OPERATIONS = "operations"
    """The result of every operation, and the terms of every sum: what float32 does to the whole."""
    CONSTANTS = "constants"
    """Only what is float32 also in a float64 run: tables made beforehand, buffers, literals."""


class SideError(ValueError):
    """A side cannot run or cannot do what is asked; the message says what to do instead."""


@dataclass(frozen=True)
class Run:
    """How a side is to run."""

    precision: Precision = Precision.FLOAT32
    rounding: Rounding | None = None
    """What moves; in float64 only."""
    seed: int = 0
    """Of the signs that move it."""
    forced: Arrays = field(default_factory=dict)
    """What the program goes on with in place of a stage, by name, in this side's own layout. The
    stage itself is still reported as computed."""
    shared: frozenset[str] = frozenset()
    """Names of parameters that both sides hold bit for bit; `Rounding.CONSTANTS` leaves them."""
    cotangents: Arrays | None = None
    """By names of outputs: what their derivatives are contracted with. None: no gradients."""


AS_IS = Run()
"""As its users run it."""


@dataclass(frozen=True)
class Trace:
    """What one run of a side computed."""

    stages: dict[str, np.ndarray]
    """Floating arrays by stage in order of execution, outputs last."""
    outputs: tuple[str, ...]
    """Which of them are what the program returned."""
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    """By parameter, in the parameter's shape."""
    notices: tuple[str, ...] = ()
    """What a reader should know of this run, such as an operation that has no float64."""
    whole: dict[str, np.ndarray] = field(default_factory=dict)
    """The stages before what means nothing in them was left out, such as padding."""
    exact: dict[str, np.ndarray] = field(default_factory=dict)
    """Whole numbers and bools that the program returned, by name; they are compared exactly."""
    unread: dict[str, str] = field(default_factory=dict)
    """Results that are no arrays, by name, each with its kind; they cannot be compared."""


@runtime_checkable
class Side(Protocol):
    """One of the two programs of a port."""

    kind: str
    """What it is written in, such as `torch` or `flax`."""

    def parameters(self) -> Mapping[str, np.ndarray]:
        """Return every parameter and buffer by path, in the dtype it is held in."""
        ...

    def inputs(self) -> dict[str, np.ndarray]:
        """Return every array among the inputs, by position or keyword and path below it."""
        ...

    def run(self, how: Run = AS_IS) -> Trace:
        """Run once.

        Raises:
            SideError: this side cannot run so.
        """
        ...


@runtime_checkable
class TakesParameters(Protocol):
    """A side that can run with other values of its parameters."""

    def with_parameters(self, values: Arrays) -> Side:
        """Return this side with other values of some parameters; it is left unchanged itself.

        Args:
            values: By name, real, each in the shape that the parameter has.

        Raises:
            SideError: There is no such parameter, or it has another shape.
        """
        ...


@runtime_checkable
class TellsOperations(Protocol):
    """A side whose operations are known, with the lines they come from."""

    def operations_of(
        self, stage: str, forced: Arrays
    ) -> tuple[dict[int, Operation], dict[int, np.ndarray]]:
        """Return the operations between a stage and those before it, and their float64 results."""
        ...


@runtime_checkable
class TellsResults(Protocol):
    """A side that can say everything it computes."""

    def operation_results(self) -> list[np.ndarray]:
        """Return the results of every operation of a float64 run."""
        ...


def check_parameters(values: Arrays, known: Arrays) -> None:
    """Raise where values are not of parameters that there are, in their shapes.

    Raises:
        SideError: There is no such parameter, or it has another shape.
    """
    for name, value in values.items():
        if name not in known:
            raise SideError(f"no parameter {name}; there are {', '.join(known)}")
        if value.shape != known[name].shape:
            raise SideError(
                f"expected the shape {known[name].shape} of parameter {name}, got {value.shape}"
            )


def exact_number(x: Any) -> np.ndarray | None:
    """Return a whole number or bool of Python or NumPy as an array; None for anything else."""
    if isinstance(x, (bool, int, np.integer, np.bool_)):
        return np.asarray(x)
    is_exact = isinstance(x, np.ndarray) and x.dtype.kind in "biu"
    return x if is_exact else None


def float_number(x: Any, dtype: Any) -> np.ndarray | None:
    """Return a floating or complex number of Python or NumPy, or an array of NumPy, as an array.

    None for anything else. It has no derivative.

    Args:
        x: What a program returned.
        dtype: Floating dtype of the run, real; a complex number becomes a pair of it.
    """
    is_number = isinstance(x, (float, complex, np.inexact))
    if not is_number and not (isinstance(x, np.ndarray) and x.dtype.kind in "fc"):
        return None
    values = np.asarray(x)
    if values.dtype.kind == "c":
        values = np.stack([np.real(values), np.imag(values)], axis=-1)
    return values.astype(dtype)


def kind_of_result(x: Any) -> str:
    """Return in words what a result is that cannot be compared."""
    return f"a {type(x).__name__}, not an array"


def no_derivative(names: Iterable[str]) -> str:
    """Return why there are no derivatives of results that are numbers of Python."""
    return (
        f"{', '.join(names)} is a number of Python or NumPy, which has no derivative: return an "
        "array, or choose another loss"
    )


def fields_of(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of what a module returned, each with its name below `name`.

    Mappings and dataclasses are walked by key, sequences by index; None is left out.
    """
    if value is None:
        return
    if isinstance(value, Mapping):
        entries = [(f"{name}.{key}", member) for key, member in value.items()]
    elif isinstance(value, tuple) and (named := getattr(value, "_fields", None)):
        entries = [(f"{name}.{key}", getattr(value, key)) for key in named]
    elif isinstance(value, (tuple, list)):
        entries = [(f"{name}[{i}]", member) for i, member in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        entries = [(f"{name}.{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value)]
    else:
        yield name, value
        return
    for below, member in entries:
        yield from fields_of(member, below)
