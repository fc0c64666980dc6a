"""What a planted bug is, and the few tools its patches are written with."""

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
"""Takes a healthy attribute and returns the faulty one."""
Weights = dict[str, Any]


class Family(StrEnum):
    """Where in a port a bug is made (docs/parity.md "Faults")."""

    CONVERSION = "conversion"
    NORMS = "norms"
    ACTIVATIONS = "activations"
    ROPE = "RoPE"
    ATTENTION = "attention"
    CEMA = "CEMA"
    WIRING = "wiring"
    """How the layers of a block are connected."""
    CACHES = "caches"
    LOSS = "loss"
    GRADIENTS = "gradients"
    OPTIMISER = "optimiser"
    RUNTIME = "runtime"


@dataclass(frozen=True, slots=True)
class Patch:
    """One attribute of the JAX model, and what stands there instead."""

    owner: Any
    attribute: str
    plant: Plant

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the attribute is the faulty one."""
        faulty = self.plant(getattr(self.owner, self.attribute))
        with patch.object(self.owner, self.attribute, faulty):
            yield


@dataclass(frozen=True, slots=True)
class Fault:
    """One bug: how people make it, where it is planted, and where it must first show."""

    family: Family
    name: str
    how: str
    stage: str
    """The first quantity that must be reported; "load" where the model must be refused."""
    patch: Patch
    witness: str = "length_c"
    """The cheapest case of the matrix that shows it."""

    @contextlib.contextmanager
    def planted(self, *, compiled: bool = True) -> Iterator[None]:
        """Context in which the JAX model has this bug.

        Compiled functions would go on as if nothing had happened, so they are thrown away;
        `compiled=False` keeps them, for work that is done under `jax.disable_jit`.
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
    """Return the fault of one attribute of one owner; the catalogue fixes what a family shares."""
    return Fault(family, name, how, stage, Patch(owner, attribute, plant), witness)


def around(faulty: Callable[..., Any]) -> Plant:
    """Return the plant of what stands in a function's place: `faulty(healthy, *its arguments)`."""

    def plant(healthy: Callable[..., Any]) -> Callable[..., Any]:
        # A function, not a partial: in a class it must become a method.
        def call(*args: Any, **options: Any) -> Any:
            return faulty(healthy, *args, **options)

        return call

    return plant


def on_weights(change: Callable[[Any, Weights], Any]) -> Patch:
    """Return the patch of a faulty checkpoint conversion.

    `change` gets the configuration and the weights by torch name, and edits the weights.
    """

    @around
    def plant(build: Callable[..., Any], config: Any, tensors: Weights, **options: Any) -> Any:
        weights = dict(tensors)
        change(config, weights)
        return build(config, weights, **options)

    # The subject's name for it: what loads a case, and nothing else.
    return Patch(runner, "build_model", plant)


def on_copy(**changes: Callable[[Any], Any]) -> Plant:
    """Return a plant for a method that runs on a copy of its module with fields changed.

    Each change gets the module and returns the field's value.
    """

    @around
    def plant(call: Callable[..., Any], self: Any, *args: Any, **options: Any) -> Any:
        values = {name: change(self) for name, change in changes.items()}
        return call(altered(self, **values), *args, **options)

    return plant


def shifted_gain(field: str, offset: float) -> Plant:
    """Return a plant that adds a number to the gain of a norm, where it has one."""

    return _where_present(field, lambda gain: gain + offset)


def zeroed(field: str) -> Plant:
    """Return a plant that takes a parameter for 0, where there is one."""

    return _where_present(field, jnp.zeros_like)


def _where_present(field: str, change: Callable[[Any], Any]) -> Plant:
    def value(self: Any) -> Any:
        parameter = getattr(self, field)
        return None if parameter is None else change(parameter)

    return on_copy(**{field: value})


def on_result(change: Callable[..., Any]) -> Plant:
    """Return a plant that changes what a function returns: `change(result, *its arguments)`."""
    return around(lambda call, *args, **options: change(call(*args, **options), *args))


def marked(change: Callable[..., Any], at: str) -> Plant:
    """Change a value of the attention half before it gets its name: `change(value, self, x)`."""

    @around
    def plant(call, self, x, *args, **options):
        mark = attention.checkpoint_name

        def changed(value, name):
            return mark(change(value, self, x) if name == at else value, name)

        with patch.object(attention, "checkpoint_name", changed):
            return call(self, x, *args, **options)

    return plant


def altered(module: Any, **fields: Any) -> Any:
    """Return a shallow copy of a module with fields replaced, static ones too, unchecked."""
    copy = object.__new__(type(module))
    for field in dataclasses.fields(module):
        value = fields.get(field.name, getattr(module, field.name))
        object.__setattr__(copy, field.name, value)
    return copy


def rounded(x: Any, bits: int = 7) -> Any:
    """Return `x` with `bits` of mantissa in its own dtype; 7 is bfloat16 and 10 is TF32."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=bits)


def unique(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    """Return the faults as a tuple.

    Raises:
        ValueError: two have one name.
    """
    names = [fault.name for fault in faults]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"faults named twice: {', '.join(sorted(twice))}.")
    return tuple(faults)
