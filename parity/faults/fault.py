"""Class of a planted bug, and helpers to write the patch that plants it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeVar, runtime_checkable
from unittest.mock import patch

import jax
import jax.numpy as jnp

from megalodon_jax.layers import attention
from parity.megalodon import runner

Plant = Callable[[Any], Any]
"""Function from the correct version of a function, method or property to its faulty version."""
Weights = dict[str, Any]
"""Arrays by torch name."""


class Family(StrEnum):
    """Part of the model or of training that a bug is in (docs/parity.md "Faults")."""

    CONVERSION = "conversion"
    NORMS = "norms"
    ACTIVATIONS = "activations"
    WIRING = "wiring"
    """Connections between the layers of a block."""
    ROPE = "RoPE"
    ATTENTION = "attention"
    CEMA = "CEMA"
    CACHES = "caches"
    LOSS = "loss"
    GRADIENTS = "gradients"
    OPTIMISER = "optimiser"
    RUNTIME = "runtime"


@dataclass(frozen=True, slots=True)
class Patch:
    """Replacement of one attribute of a class or module of the JAX model."""

    owner: Any
    """Class or module that has the attribute."""
    attribute: str
    plant: Plant
    """Function from the correct attribute to its faulty version."""

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Return a context manager inside which the attribute has its faulty version."""
        faulty = self.plant(getattr(self.owner, self.attribute))
        with patch.object(self.owner, self.attribute, faulty):
            yield


@dataclass(frozen=True, slots=True)
class Fault:
    """One bug: what is wrong, where it is planted, and where it must be found."""

    family: Family
    name: str
    how: str
    """The mistake, in a few words."""
    stage: str
    """Quantity that must be reported as the first wrong one; "load": loading must be rejected."""
    patch: Patch
    """Plants the bug."""
    witness: str = "length_c"
    """Name of the cheapest case that shows the bug."""

    @contextlib.contextmanager
    def planted(self, *, compiled: bool = True) -> Iterator[None]:
        """Return a context manager in which the JAX model has this bug.

        Args:
            compiled: discard JAX's compiled functions before and after, since they would ignore the
                patch. False keeps them, for runs under `jax.disable_jit`.
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
    """Return a fault that patches one attribute; arguments are the fields of `Fault` and `Patch`.

    Modules of the catalogue use it with `functools.partial`, to give the arguments that all faults
    of a family share.
    """
    return Fault(family, name, how, stage, Patch(owner, attribute, plant), witness)


def around(faulty: Callable[..., Any]) -> Plant:
    """Return a plant that replaces a function by `faulty`, which gets the correct one to call.

    A call `f(*arguments)` becomes `faulty(f, *arguments)`; keyword arguments are passed on.
    """

    def plant(healthy: Callable[..., Any]) -> Callable[..., Any]:
        # A function, not a `partial`, so that it becomes a method if the owner is a class.
        def call(*args: Any, **options: Any) -> Any:
            return faulty(healthy, *args, **options)

        return call

    return plant


def on_weights(change: Callable[[Any, Weights], Any]) -> Patch:
    """Return a patch after which the JAX model of a case is built from changed weights.

    `change` gets the configuration and the weights by torch name, and changes the weights in place.
    """

    @around
    def plant(build: Callable[..., Any], config: Any, tensors: Weights, **options: Any) -> Any:
        weights = dict(tensors)
        change(config, weights)
        return build(config, weights, **options)

    # Patched in the runner's namespace, so that only loading a case is affected.
    return Patch(runner, "build_model", plant)


def on_copy(**changes: Callable[[Any], Any]) -> Plant:
    """Return a plant for a method, which then runs on a copy of its module with changed fields.

    Each keyword names a field; its value is a function from the module to the changed field.
    """

    @around
    def plant(call: Callable[..., Any], self: Any, *args: Any, **options: Any) -> Any:
        values = {name: change(self) for name, change in changes.items()}
        return call(altered(self, **values), *args, **options)

    return plant


def shifted_gain(field: str, offset: float) -> Plant:
    """Return a plant that adds `offset` to the gain of a norm, if the norm has one.

    `field` is the name of the gain.
    """

    return _where_present(field, lambda gain: gain + offset)


def zeroed(field: str) -> Plant:
    """Return a plant that sets the parameter called `field` to 0, if the module has it."""

    return _where_present(field, jnp.zeros_like)


def _where_present(field: str, change: Callable[[Any], Any]) -> Plant:
    def value(self: Any) -> Any:
        parameter = getattr(self, field)
        return None if parameter is None else change(parameter)

    return on_copy(**{field: value})


def on_result(change: Callable[..., Any]) -> Plant:
    """Return a plant that replaces a function's result by `change(result, *arguments)`.

    `arguments` are the positional arguments of the function.
    """
    return around(lambda call, *args, **options: change(call(*args, **options), *args))


def marked(change: Callable[..., Any], at: str) -> Plant:
    """Return a plant for attention that replaces intermediate `at` by `change(value, self, x)`.

    `self` is the attention layer and `x` its input. The value is replaced just before it is named
    with `checkpoint_name`.
    """

    @around
    def plant(call, self, x, *args, **options):
        mark = attention.checkpoint_name

        def changed(value, name):
            return mark(change(value, self, x) if name == at else value, name)

        with patch.object(attention, "checkpoint_name", changed):
            return call(self, x, *args, **options)

    return plant


def altered(module: Any, **fields: Any) -> Any:
    """Return a shallow copy of a module with the given fields replaced, without any checks.

    Static fields can be replaced too.
    """
    copy = object.__new__(type(module))
    for field in dataclasses.fields(module):
        value = fields.get(field.name, getattr(module, field.name))
        object.__setattr__(copy, field.name, value)
    return copy


def rounded(x: Any, bits: int = 7) -> Any:
    """Round `x` to `bits` mantissa bits in its own dtype; 7 is bfloat16, 10 is TF32."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=bits)


@runtime_checkable
class Named(Protocol):
    """A planted bug in any program; only its name is needed."""

    @property
    def name(self) -> str:
        """Unique name in its catalogue."""
        ...


F = TypeVar("F", bound=Named)


def unique(faults: Sequence[F]) -> tuple[F, ...]:
    """Return the faults as a tuple, after checking that their names differ.

    Raises:
        ValueError: two faults have the same name.
    """
    names = [fault.name for fault in faults]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(
            f"several faults have the same name: {', '.join(sorted(twice))}; rename all but one."
        )
    return tuple(faults)
