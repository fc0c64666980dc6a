"""Marks: the named intermediate values of a program, and how to replace or offset them.

A mark is a value that `jax.ad_checkpoint.checkpoint_name` was applied to. Inside a loop, each
iteration gets its own name, `name@iteration`, the outermost loop first; the second occurrence of a
name is called `name#2`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from parity.engine.programs.jaxprs import equations, inner_jaxprs


class MarkChange(NamedTuple):
    """A replacement and an offset for one mark."""

    on: Any = False
    """Whether to replace the value: a bool, which may be traced."""
    value: Any = None
    """The replacement."""
    offset: Any = None
    """Added to the reported value, and to what the program continues with unless it is replaced."""

    def reported(self, value: Any) -> Any:
        """Return the value to report for the mark."""
        return value if self.offset is None else value + self.offset

    def following(self, value: Any) -> Any:
        """Return the value the program continues with, given the reported one."""
        if self.on is False or self.value is None:
            return value
        other = jnp.asarray(self.value, value.dtype)
        return other if self.on is True else jnp.where(self.on, other, value)


Changes = Mapping[str, MarkChange]


@dataclass
class Marks:
    """Values by mark, in order of execution."""

    values: dict[str, Any] = field(default_factory=dict)
    passed: dict[str, Any] = field(default_factory=dict)
    """For marks inside a branch, whether the branch was taken: bool scalars."""
    numbered: Mapping[str, str] = field(default_factory=dict)
    """Name template of each mark's values; "{}" is the number of earlier occurrences."""
    once: bool = False
    """Whether to reject a mark that occurs twice and is not in `numbered`."""
    names: set[str] = field(default_factory=set)
    """Names used so far."""
    counts: dict[str, int] = field(default_factory=dict)
    """Number of occurrences of each mark in `numbered`."""

    def name_of(self, name: str) -> str:
        """Reserve and return the name of a mark's next value.

        Raises:
            ValueError: the mark already has a value and `once` is set.
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
        """Return empty marks for the body of a loop or a branch; the caller renames them."""
        return Marks(once=self.once, numbered={n: f"{n}#{{}}" for n in self.numbered})

    def next_names(self, names: Iterable[str]) -> list[str]:
        """Return the names that values would get, without reserving them."""
        ahead = dataclasses.replace(self, names=set(self.names), counts=dict(self.counts))
        return [ahead.name_of(name) for name in names]


def has_marks(eqn: Any) -> bool:
    """Return whether an equation calls a jaxpr that contains a mark."""
    return any(
        inner_eqn.primitive.name == "name"
        for inner in inner_jaxprs(eqn)
        for inner_eqn in equations(inner)
    )


def in_turn(name: str, turn: int) -> str:
    """Return the name of a mark in one iteration of a loop; the outermost loop comes first."""
    base, _, inner = name.partition("@")
    return f"{base}@{turn}" + (f"@{inner}" if inner else "")


def of_turns(changes: Sequence[MarkChange | None], shape: Any) -> MarkChange:
    """Stack the changes of one mark in all iterations of a loop, for use as input of a scan.

    Args:
        changes: one entry per iteration; None for no change.
        shape: shape and dtype of the mark in one iteration.
    """
    blank, each = jnp.zeros(shape.shape, shape.dtype), [c or MarkChange() for c in changes]

    def stacked(values: list[Any]) -> Any:
        if all(value is None for value in values):
            return None
        arrays = (blank if x is None else jnp.asarray(x, shape.dtype) for x in values)
        return jnp.stack([x.reshape(blank.shape) for x in arrays])

    on = jnp.stack([jnp.asarray(c.on) for c in each])
    return MarkChange(on, stacked([c.value for c in each]), stacked([c.offset for c in each]))


@dataclass(frozen=True)
class Branches:
    """Union of the marks of all branches of a condition, of which only one is taken."""

    shapes: dict[str, jax.ShapeDtypeStruct]
    own: tuple[dict[str, str], ...]
    """For each branch, the name in this union by the name inside the branch."""

    @classmethod
    def of(cls, branches: Sequence[Mapping[str, Any]]) -> Branches:
        """Merge the marks of branches; the same name with the same shape is the same mark."""
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
