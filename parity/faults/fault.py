"""Planted bugs, and tools for writing their patches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp

from megalodon_jax.layers import attention
from parity.megalodon import runner

Plant = Callable[[Any], Any]
"""Maps a healthy attribute to the faulty one."""
Weights = dict[str, Any]


class Family(StrEnum):
    """Part of a port in which a bug is made (docs/parity.md "Faults")."""

    CONVERSION = "conversion"
    NORMS = "norms"
    ACTIVATIONS = "activations"
    ROPE = "RoPE"
    ATTENTION = "attention"
    CEMA = "CEMA"
    WIRING = "wiring"
    """Connections between the layers of a block."""
    CACHES = "caches"
    LOSS = "loss"
    GRADIENTS = "gradients"
    OPTIMISER = "optimiser"
    RUNTIME = "runtime"


@dataclass(frozen=True, slots=True)
class Patch:
    """Replacement of one attribute of the JAX model."""

    owner: Any
    attribute: str
    plant: Plant

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the attribute by the faulty one within a context."""
        faulty = self.plant(getattr(self.owner, self.attribute))
        with patch.object(self.owner, self.attribute, faulty):
            yield


@dataclass(frozen=True, slots=True)
class Fault:
    """One bug: how it is made, where it is planted, and where it must be found."""

    family: Family
    name: str
    how: str
    stage: str
    """First quantity that must be reported; "load" if the model must be rejected."""
    patch: Patch
    witness: str = "length_c"
    """Cheapest case of the matrix that shows it."""

    @contextlib.contextmanager
    def planted(self, *, compiled: bool = True) -> Iterator[None]:
        """Plant this bug in the JAX model within a context.

        Compiled functions would ignore the patch, so they are discarded. `compiled=False` keeps
        them, for work under `jax.disable_jit`.
        """
        with contextlib.ExitStack() as stack:
            if compiled:
                jax.clear_caches()
                stack.callback(jax.clear_caches)
            stack.enter_context(self.patch.applied())
            yield


def fault(
    family: Family,
    name: str,
    how: str,
    plant: Plant,
    *,
    stage: str,
    owner: Any,
    attribute: str = "__call__",
    witness: str = "length_c",
) -> Fault:
    """Build the fault of one attribute of one owner; catalogues fix what a family shares."""
    return Fault(family, name, how, stage, Patch(owner, attribute, plant), witness)


def around(faulty: Callable[..., Any]) -> Plant:
    """Return the plant that replaces a function: `faulty(healthy, *its arguments)`."""

    def plant(healthy: Callable[..., Any]) -> Callable[..., Any]:
        # A function, not a partial, so that it becomes a method in a class.
        def call(*args: Any, **options: Any) -> Any:
            return faulty(healthy, *args, **options)

        return call

    return plant


def on_weights(change: Callable[[Any, Weights], Any]) -> Patch:
    """Return the patch of a faulty checkpoint conversion.

    `change` receives the configuration and the weights by torch name, and edits the weights.
    """

    @around
    def plant(build: Callable[..., Any], config: Any, tensors: Weights, **options: Any) -> Any:
        weights = dict(tensors)
        change(config, weights)
        return build(config, weights, **options)

    # Patched under the runner's name, which only the loading of a case uses.
    return Patch(runner, "build_model", plant)


def on_copy(**changes: Callable[[Any], Any]) -> Plant:
    """Return a plant for a method that runs on a copy of its module with changed fields.

    Each change maps the module to the field's value.
    """

    @around
    def plant(call: Callable[..., Any], self: Any, *args: Any, **options: Any) -> Any:
        values = {name: change(self) for name, change in changes.items()}
        return call(altered(self, **values), *args, **options)

    return plant


def shifted_gain(field: str, offset: float) -> Plant:
    """Return a plant that adds a number to the gain of a norm, if it has one."""

    return _where_present(field, lambda gain: gain + offset)


def zeroed(field: str) -> Plant:
    """Return a plant that sets a parameter to 0, if there is one."""

    return _where_present(field, jnp.zeros_like)


def _where_present(field: str, change: Callable[[Any], Any]) -> Plant:
    def value(self: Any) -> Any:
        parameter = getattr(self, field)
        return None if parameter is None else change(parameter)

    return on_copy(**{field: value})


def on_result(change: Callable[..., Any]) -> Plant:
    """Return a plant that changes a function's result: `change(result, *its arguments)`."""
    return around(lambda call, *args, **options: change(call(*args, **options), *args))


def marked(change: Callable[..., Any], at: str) -> Plant:
    """Change a value in attention before it is marked: `change(value, self, x)`."""

    @around
    def plant(call, self, x, *args, **options):
        mark = attention.checkpoint_name

        def changed(value, name):
            return mark(change(value, self, x) if name == at else value, name)

        with patch.object(attention, "checkpoint_name", changed):
            return call(self, x, *args, **options)

    return plant


def altered(module: Any, **fields: Any) -> Any:
    """Return a shallow copy of a module with replaced fields, including static ones, unchecked."""
    copy = object.__new__(type(module))
    for field in dataclasses.fields(module):
        value = fields.get(field.name, getattr(module, field.name))
        object.__setattr__(copy, field.name, value)
    return copy


def rounded(x: Any, bits: int = 7) -> Any:
    """Round `x` to `bits` mantissa bits in its own dtype; 7 is bfloat16, 10 is TF32."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=bits)


def unique(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    """Return the faults as a tuple.

    Raises:
        ValueError: two have the same name.
    """
    names = [fault.name for fault in faults]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"faults named twice: {', '.join(sorted(twice))}.")
    return tuple(faults)
