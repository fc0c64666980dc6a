"""Marks of a program: what the values it names are called, and what becomes of them.

A mark is a value that `jax.ad_checkpoint.checkpoint_name` was put on. One that is passed in every
turn of a loop is called `name@turn`, with the outermost loop first, and the second of a name is
called `name#2`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from parity.engine.jaxprs import equations, inner_jaxprs


class Change(NamedTuple):
    """What a program goes on with in place of a mark."""

    on: Any = False
    """Whether it is replaced: a bool, which may be traced."""
    value: Any = None
    """What by."""
    offset: Any = None
    """What is added to it, and seen in what is reported of it."""

    def reported(self, value: Any) -> Any:
        """Return the value of the mark itself."""
        return value if self.offset is None else value + self.offset

    def following(self, value: Any) -> Any:
        """Return what the program goes on with, of what is reported."""
        if self.on is False or self.value is None:
            return value
        other = jnp.asarray(self.value, value.dtype)
        return other if self.on is True else jnp.where(self.on, other, value)


Changes = Mapping[str, Change]


@dataclass
class Marks:
    """Values by mark, in the order in which they were passed."""

    values: dict[str, Any] = field(default_factory=dict)
    passed: dict[str, Any] = field(default_factory=dict)
    """Of marks inside a branch, whether it was taken: bool scalars."""
    numbered: Mapping[str, str] = field(default_factory=dict)
    """By mark: what its values are called, with "{}" for how often it was passed before."""
    once: bool = False
    """Whether to refuse a mark that is passed twice and is not numbered."""
    names: set[str] = field(default_factory=set)
    """Of all values so far."""
    counts: dict[str, int] = field(default_factory=dict)
    """By numbered mark, how often it was passed."""

    def name_of(self, name: str) -> str:
        """Return the name of the next value of a mark.

        Raises:
            ValueError: it had one, and `once` allows no second.
        """
        mark = name.partition("@")[0].partition("#")[0]
        if mark in self.numbered:
            before = self.counts.get(mark, 0)
            self.counts[mark] = before + 1
            name = self.numbered[mark].format(before)
        unique, count = name, 2
        while unique in self.names:
            if self.once:
                raise ValueError(
                    f"capture: the mark {unique!r} is passed twice. Give each value a name of its "
                    f"own, or say how to count them: numbered={{{mark!r}: 'layers.{{}}.{mark}'}}."
                )
            unique, count = f"{name}#{count}", count + 1
        self.names.add(unique)
        return unique

    def within(self) -> Marks:
        """Return marks of a loop's body or a branch, which are named anew outside of it."""
        return Marks(once=self.once, numbered={n: f"{n}#{{}}" for n in self.numbered})

    def next_names(self, names: Iterable[str]) -> list[str]:
        """Return what values would be called, and give no name away."""
        ahead = dataclasses.replace(self, names=set(self.names), counts=dict(self.counts))
        return [ahead.name_of(name) for name in names]


def has_marks(eqn: Any) -> bool:
    """Whether there is a mark inside of what an equation calls."""
    return any(
        inner_eqn.primitive.name == "name"
        for inner in inner_jaxprs(eqn)
        for inner_eqn in equations(inner)
    )


def in_turn(name: str, turn: int) -> str:
    """Name a mark by the turn of the loop it is in; the outermost loop comes first."""
    base, _, inner = name.partition("@")
    return f"{base}@{turn}" + (f"@{inner}" if inner else "")


def of_turns(changes: Sequence[Change | None], shape: Any) -> Change:
    """Return the changes of one mark in all turns of a loop, stacked for a scan.

    Args:
        changes: by turn; None where there is none.
        shape: of the mark in one turn, and its dtype.
    """
    blank, each = jnp.zeros(shape.shape, shape.dtype), [c or Change() for c in changes]

    def stacked(values: list[Any]) -> Any:
        if all(value is None for value in values):
            return None
        arrays = (blank if x is None else jnp.asarray(x, shape.dtype) for x in values)
        return jnp.stack([x.reshape(blank.shape) for x in arrays])

    on = jnp.stack([jnp.asarray(c.on) for c in each])
    return Change(on, stacked([c.value for c in each]), stacked([c.offset for c in each]))


@dataclass(frozen=True)
class Branches:
    """Marks of all branches of a condition as one set of names, since one of them is taken."""

    shapes: dict[str, jax.ShapeDtypeStruct]
    own: tuple[dict[str, str], ...]
    """By branch: the name in this set of each of its own."""

    @classmethod
    def of(cls, branches: Sequence[Mapping[str, Any]]) -> Branches:
        """Join the marks of branches; two of one name and one shape are the same mark."""
        shapes: dict[str, Any] = {}
        own: list[dict[str, str]] = []
        for branch in branches:
            names = {}
            for name, value in branch.items():
                shape, count, unique = jax.ShapeDtypeStruct(value.shape, value.dtype), 2, name
                while unique in names.values() or shapes.setdefault(unique, shape) != shape:
                    unique, count = f"{name}#{count}", count + 1
                names[name] = unique
            own.append(names)
        return cls(shapes, tuple(own))
