"""Interface of a side: a program with named parameters, inputs and stages, run in any precision.

The stages of a side are its intermediates, in the order in which they are computed. A stage is
named automatically: the path of a submodule, followed by the field of the submodule's result. The
last stages are the outputs of the whole program. Source: docs/your-own-port.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np

from parity.engine.measure.arrays import Arrays
from parity.engine.programs.operations import Operation, source_of_error

OUTPUT = "output"
"""Stage name of a program's result; a field `logits` of the result is named `output.logits`."""


class Precision(StrEnum):
    """Dtype that a side computes in."""

    FLOAT32 = "float32"
    """Unmodified: bit-identical to the program that users run."""
    FLOAT64 = "float64"
    """The same program with every operation in float64, even where the program casts to float32."""
    BFLOAT16 = "bfloat16"
    """Parameters and inputs cast to bfloat16, as users run the program in low precision."""


class Rounding(StrEnum):
    """Which values of a float64 run are perturbed: multiplied by 1 + u or 1 - u at random, with u
    about float32's unit roundoff.

    The change of a stage estimates its noise floor: the error that rounding explains.
    """

    OPERATIONS = "operations"
    """The result of every operation and the terms of every sum: simulates float32 rounding."""
    CONSTANTS = "constants"
    """Only values that stay float32 in a float64 run: precomputed tables, buffers, literals."""


class SideError(ValueError):
    """A side cannot run, or does not support the requested run; the message says why."""


def stopped(
    kind: str, precision: Precision, inputs: Mapping[str, Any], error: Exception
) -> SideError:
    """Return a SideError for a program that raised `error`, with its source line and the inputs.

    Args:
        kind: library of the side, such as `torch`.
        precision: precision of the run.
        inputs: input arrays by name.
        error: the exception.
    """
    where = source_of_error(error)
    shapes = ", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in inputs.items())
    message = str(error).strip().splitlines()
    return SideError(
        f"the {kind} side stops in {precision}{where and f' at {where}'}, with inputs {shapes}: "
        f"{type(error).__name__}: {message[0] if message else ''}"
    )


@dataclass(frozen=True)
class Run:
    """Settings of one run of a side."""

    precision: Precision = Precision.FLOAT32
    rounding: Rounding | None = None
    """Which values are perturbed to measure the noise floor; None: none. A perturbed program is
    always evaluated in float64. Perturbations have the size of float32's unit roundoff, or, on JAX
    sides with `Precision.BFLOAT16`, that of bfloat16 for bfloat16 operations. torch and ONNX sides
    can be perturbed with `Precision.FLOAT64` only."""
    seed: int = 0
    """Seed of the perturbation's signs."""
    still: bool = False
    """Whether the program of `precision` is evaluated in float64 without perturbations, with
    parameters and inputs that are not rounded to this precision; on JAX sides only. Its difference
    to a perturbed run is rounding; its difference to the float64 program is not, such as a branch
    on the dtype."""
    forced: Arrays = field(default_factory=dict)
    """Values from which the rest of the computation continues in place of a stage's own, by stage
    name, in the stage's shape. `Trace.stages` still has the value that the program computed."""
    shared: frozenset[str] | None = None
    """Names of parameters that both sides hold bit for bit. On torch and ONNX sides,
    `Rounding.CONSTANTS` perturbs all other parameters and the tables. None: the names are unknown;
    only tables are perturbed. JAX sides never perturb parameters in this way."""
    cotangents: Arrays | None = None
    """Cotangents of the vector-Jacobian product, by output name and in the output's shape; None: no
    gradients are computed."""


AS_IS = Run()
"""Settings of the unmodified program, as users run it."""


@dataclass(frozen=True)
class Trace:
    """Results of one run of a side."""

    stages: dict[str, np.ndarray]
    """Values of all stages by name, in order of execution, as floating-point arrays; the outputs
    come last."""
    outputs: tuple[str, ...]
    """Names of the stages that are outputs of the program."""
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    """Gradient by parameter name, in the parameter's shape."""
    notices: tuple[str, ...] = ()
    """Remarks for the reader, such as an operation without a float64 implementation."""
    whole: dict[str, np.ndarray] = field(default_factory=dict)
    """Stages as the program computed them, for a caller that sets invalid positions, such as
    padding, to zero and replaces masks in `stages` (`parity.port.side_runs`); empty in the result
    of `Side.run`."""
    exact: dict[str, np.ndarray] = field(default_factory=dict)
    """Integer and bool outputs, by name; they are compared exactly."""
    unread: dict[str, str] = field(default_factory=dict)
    """Descriptions of results that cannot be compared because they are not arrays, such as "a str,
    not an array", by the result's name."""
    frozen: tuple[str, ...] = ()
    """Names of the parameters that the program does not train, which have no gradient."""
    updated: tuple[str, ...] = ()
    """Names of the parameters and buffers that the run changed in place, such as running
    statistics."""


@runtime_checkable
class Side(Protocol):
    """One of the two programs that are compared."""

    kind: str
    """Library the side is written in, such as `torch` or `flax`."""

    def parameters(self) -> Mapping[str, np.ndarray]:
        """Return every parameter and buffer by path, such as `layers.0.weight`, in its stored
        dtype.

        Integer buffers may be left out.
        """
        ...

    def inputs(self) -> dict[str, np.ndarray]:
        """Return every input array by name: the argument's position or keyword, followed by the
        array's path in the argument."""
        ...

    def run(self, how: Run = AS_IS) -> Trace:
        """Run the program once with these settings.

        Raises:
            SideError: this side does not support these settings.
        """
        ...


@runtime_checkable
class TakesParameters(Protocol):
    """A side that can run with other values of its parameters."""

    def with_parameters(self, values: Arrays) -> Side:
        """Return a copy of this side with other values of some parameters.

        Args:
            values: new values by parameter name, in the shapes that `parameters` returns.

        Raises:
            SideError: a name in `values` is unknown, or a value has another shape.
        """
        ...


@runtime_checkable
class TakesExactParameters(Protocol):
    """A side whose float64 runs can have more precise parameters than its other runs."""

    def with_exact(self, values: Arrays) -> Side:
        """Return a copy of this side with other values of some parameters in float64 runs.

        Args:
            values: float64 arrays by parameter name, in the shapes that `parameters` returns.

        Raises:
            SideError: a name in `values` is unknown, or a value has another shape.
        """
        ...


@runtime_checkable
class TakesInputs(Protocol):
    """A side that can run on other inputs."""

    def with_inputs(self, change: Callable[[np.ndarray], np.ndarray]) -> Side:
        """Return a copy of this side with `change` applied to each input array.

        Args:
            change: function of an input array that returns one of the same shape and dtype.
        """
        ...


@runtime_checkable
class HoldsTables(Protocol):
    """A side that can list its tables: arrays that are neither parameters nor inputs.

    A table that was made in float32 keeps those values in float64 runs.
    """

    def tables(self) -> list[np.ndarray]:
        """Return the tables of float64 runs, such as buffers and closed-over constants."""
        ...

    def sharing(self, tables: Collection[np.ndarray]) -> Side:
        """Return a copy of this side that leaves the given tables unperturbed.

        Args:
            tables: tables that the other side holds bit for bit. Their values are equal in the
                float64 runs of both sides, so `Rounding.CONSTANTS` leaves them unperturbed.
        """
        ...


@runtime_checkable
class TellsOperations(Protocol):
    """A side that can list its operations with the source lines they come from."""

    def operations_of(
        self, stage: str, forced: Arrays
    ) -> tuple[dict[int, Operation], dict[int, np.ndarray]]:
        """Return the operations that compute a stage from the replaced stages, and their results.

        They are all operations that the stage depends on, back to the stages in `forced`.

        Args:
            stage: Name of the stage.
            forced: Values that replace stages, by name.

        Returns:
            The operations and their float64 results, both by index in order of execution.
        """
        ...


@runtime_checkable
class TellsResults(Protocol):
    """A side that can return the result of every operation."""

    def operation_results(self) -> list[np.ndarray]:
        """Return the results of all operations of a float64 run, as a list of arrays."""
        ...


@runtime_checkable
class LowPrecision(Protocol):
    """A side that computes in a low precision on purpose; no notice warns of its large
    noise floor."""

    autocast: Any
    """The low precision, a dtype of the side's library."""
    used: Collection[Any]
    """Dtypes of the floating-point results of all operations in the perturbed runs so far."""


@runtime_checkable
class HoldsMade(Protocol):
    """A side whose parameters an exporter may have computed from the trained ones, such as the
    weights of a convolution into which a norm was folded."""

    def made(self, names: Collection[str]) -> list[str]:
        """Return the names in `names` of those parameters of which every element affects the result
        of an operation.

        Such a parameter need not equal one of the other side: a wrong element changes the result of
        the operation, which a stage shows unless a later operation hides it.
        """
        ...


def check_parameters(values: Arrays, known: Arrays) -> None:
    """Check that each array in `values` has the name and shape of a parameter in `known`.

    Raises:
        SideError: a name in `values` is unknown, or a value has another shape.
    """
    for name, value in values.items():
        if name not in known:
            raise SideError(f"no parameter {name}; there are {', '.join(known)}")
        if value.shape != known[name].shape:
            raise SideError(
                f"expected the shape {known[name].shape} of parameter {name}, got {value.shape}"
            )


def exact_number(x: Any) -> np.ndarray | None:
    """Return a Python or NumPy integer or bool, or a NumPy array of them, as an array.

    None for any other value.
    """
    if isinstance(x, (bool, int, np.integer, np.bool_)):
        return np.asarray(x)
    is_exact = isinstance(x, np.ndarray) and x.dtype.kind in "biu"
    return x if is_exact else None


def float_number(x: Any, dtype: Any) -> np.ndarray | None:
    """Return a floating or complex Python or NumPy number, or a NumPy array of them, as an array.

    None for any other value.

    Args:
        x: A result of a program.
        dtype: Real floating-point dtype of the array. Complex numbers become pairs (real,
            imaginary) on a last axis of 2.
    """
    is_number = isinstance(x, (float, complex, np.inexact))
    if not is_number and not (isinstance(x, np.ndarray) and x.dtype.kind in "fc"):
        return None
    values = np.asarray(x)
    if values.dtype.kind == "c":
        values = np.stack([np.real(values), np.imag(values)], axis=-1)
    return values.astype(dtype)


def kind_of_result(x: Any) -> str:
    """Describe a result that cannot be compared because it is not an array."""
    return f"a {type(x).__name__}, not an array"


def no_derivative(names: Iterable[str]) -> str:
    """Return the error message for a gradient of outputs, given by name, that are Python or NumPy
    numbers."""
    return (
        f"output {', '.join(names)} is a Python or NumPy number, which has no derivative: return "
        "an array of the library instead, or choose another loss"
    )


def named_once(named: Iterable[tuple[str, Any]], what: str) -> dict[str, Any]:
    """Return pairs of a name and a value as a dictionary.

    Args:
        named: names and values.
        what: plural noun for the values in the error message, such as "results".

    Raises:
        SideError: two values have the same name, so that one of them would never be compared.
    """
    found: dict[str, Any] = {}
    for name, value in named:
        if name in found:
            raise SideError(
                f"two {what} are both named {name}, and only one could be compared: rename a key, "
                "for example one that contains a dot"
            )
        found[name] = value
    return found


def entry_name(name: str, key: object) -> str:
    """Return the name of the entry `key` of a mapping called `name`."""
    # JAX's paths do not distinguish a number from a string of digits: neither do these names.
    return f"{name}[{key}]" if str(key).isdigit() else f"{name}.{key}"


def fields_of(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of every leaf of a module's result, in order.

    Names extend `name`, as in `output.logits` or `output[0]`: by key for mappings, named tuples and
    dataclasses, by index for other sequences. None is skipped.
    """
    if value is None:
        return
    if isinstance(value, Mapping):
        entries = [(entry_name(name, key), member) for key, member in value.items()]
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
