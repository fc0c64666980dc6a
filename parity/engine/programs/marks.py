"""Marks: the named intermediate values of a JAX program, and changes that replace or offset them.

A mark is a value that `jax.ad_checkpoint.checkpoint_name` was applied to. In a scan, the value of
each iteration is named `name@iteration`; in nested scans, the outermost iteration comes first.
Marks in a while loop are not found. The second occurrence of a name is called `name#2`.
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
    """A replacement and an offset for one mark (named intermediate)."""

    on: Any = False
    """Whether to replace the value: a bool, which may be traced."""
    value: Any = None
    """The replacement; None: the value is kept."""
    offset: Any = None
    """Number or array added to the computed value; None: nothing. If the value is also replaced,
    the offset changes the reported value only."""

    @property
    def replaces(self) -> bool:
        """Whether there is a replacement, which `on` may still turn off if it is traced."""
        return self.on is not False and self.value is not None

    def reported(self, value: Any) -> Any:
        """Return the value to report for the intermediate: the computed one plus the offset."""
        return value if self.offset is None else value + self.offset

    def following(self, value: Any) -> Any:
        """Return the value the program continues with, given the reported one."""
        if not self.replaces:
            return value
        other = jnp.asarray(self.value, value.dtype)
        return other if self.on is True else jnp.where(self.on, other, value)


Changes = Mapping[str, MarkChange]


@dataclass
class Marks:
    """Values of the marks (named intermediates) that an evaluation has reached, in order of
    execution."""

    values: dict[str, Any] = field(default_factory=dict)
    """Reported values by unique name."""
    passed: dict[str, Any] = field(default_factory=dict)
    """For marks inside a branch, whether the branch was taken: bool scalars by unique name."""
    numbered: Mapping[str, str] = field(default_factory=dict)
    """Name templates for marks that occur repeatedly, by mark; "{}" is the number of earlier
    occurrences."""
    once: bool = False
    """Whether a mark that occurs twice and is not in `numbered` is an error."""
    names: set[str] = field(default_factory=set)
    """Names used so far."""
    counts: dict[str, int] = field(default_factory=dict)
    """Number of occurrences of each mark in `numbered`."""

    def name_of(self, name: str) -> str:
        """Reserve and return the unique name of the next value of mark `name`.

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
                    f"capture: the mark {unique!r} is passed twice: two values have this name. "
                    f"Give each a different name, or number them with "
                    f"numbered={{{mark!r}: 'layers.{{}}.{mark}'}}."
                )
            unique, count = f"{name}#{count}", count + 1
        self.names.add(unique)
        return unique

    def within(self) -> Marks:
        """Return an empty `Marks` for the body of a loop or a branch, with names unique within it.

        The caller copies the values found there to its own marks, under their final names.
        """
        return Marks(once=self.once, numbered={n: f"{n}#{{}}" for n in self.numbered})

    def next_names(self, names: Iterable[str]) -> list[str]:
        """Return the unique name that the next value of each mark in `names` would get, without
        reserving it."""
        ahead = dataclasses.replace(self, names=set(self.names), counts=dict(self.counts))
        return [ahead.name_of(name) for name in names]


def has_marks(eqn: Any) -> bool:
    """Return whether an equation calls a jaxpr that contains a mark (named intermediate)."""
    return any(
        inner_eqn.primitive.name == "name" and isinstance(inner_eqn.params["name"], str)
        for inner in inner_jaxprs(eqn)
        for inner_eqn in equations(inner)
    )


def in_turn(name: str, turn: int) -> str:
    """Return the name `name@turn` of a named intermediate in iteration `turn` of its loop.

    The iteration of an outer loop goes before the iterations already in the name: `name@3` in
    iteration 5 of the outer loop becomes `name@5@3`.
    """
    base, _, inner = name.partition("@")
    return f"{base}@{turn}" + (f"@{inner}" if inner else "")


def of_turns(changes: Sequence[MarkChange | None], shape: Any) -> MarkChange:
    """Return the changes of one mark (named intermediate) in all iterations of a scan as one
    `MarkChange`, whose fields have a leading axis of iterations.

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
    """Union of the marks (named intermediates) of all branches of a condition, of which only one is
    taken."""

    shapes: dict[str, jax.ShapeDtypeStruct]
    """Shape and dtype of each mark, by its name in this union."""
    own: tuple[dict[str, str], ...]
    """For each branch, the name in this union by the name inside the branch."""

    @classmethod
    def of(cls, branches: Sequence[Mapping[str, Any]]) -> Branches:
        """Merge the marks (named intermediates) of branches, each given as shapes by name.

        Marks of different branches with equal name, shape and dtype become one mark. Marks with the
        same name but another shape or dtype get a number.
        """
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
