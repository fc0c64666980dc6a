"""The audit's table: which dtypes an operation reads, writes and adds up in, by module.

One row stands for all equations that agree in everything but where exactly they stand. Line numbers
are shown and not compared: pinned rows outlive an edit above the line. Source:
docs/audits.md "The dtype audit".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp

View = Literal["jaxpr", "hlo", "torch"]
Phase = Literal["forward", "jvp", "backward"]
"""A forward program, the forward part of a gradient program, and its backward part."""
Identity = tuple[str, ...]

COLUMNS = ("view", "phase", "module", "family", "op", "inputs", "output", "accum", "how")


@dataclass(frozen=True, slots=True)
class Row:
    """Operations of one kind, dtypes and module."""

    view: View
    phase: Phase
    module: str
    """Path of the module, layers as `*`: `model.layers.*.attn.cema`."""
    family: str
    """What kind of operation it is, the same word in all three views: `dot`, `sum`, `exp`."""
    op: str
    """Its name in the view it comes from."""
    inputs: tuple[str, ...]
    """Dtypes read, in order; of elementwise operations each once."""
    output: str
    accum: str = ""
    """`preferred_element_type` of a product: the dtype asked for, no proof of the accumulator."""
    how: str = ""
    """`promotion`: a conversion nobody wrote. `round trip`: a rounding undone at once."""
    count: int = 1
    """Executions, iterations of a scan included; instructions, of a compiled program."""
    trips: int = 1
    """Iterations of the loops around it."""
    source: str = ""
    """One of the lines it comes from, relative to the import path."""

    @property
    def identity(self) -> Identity:
        """What makes two rows the same row: everything but counts and line."""
        inputs = ",".join(self.inputs)
        plain = (self.view, self.phase, self.module, self.family, self.op)
        return (*plain, inputs, self.output, self.accum, self.how)

    @property
    def dtypes(self) -> frozenset[str]:
        """Every dtype the row names."""
        return frozenset({*self.inputs, self.output, self.accum} - {""})

    def describe(self) -> str:
        """Return the row in words, as in `backward reduce_sum (bfloat16) -> bfloat16`."""
        accum = f" accumulating in {self.accum}" if self.accum else ""
        how = f" [{self.how}]" if self.how else ""
        return f"{self.phase} {self.op} ({', '.join(self.inputs)}) -> {self.output}{accum}{how}"


def aggregated(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return one row per identity, counts added up, sorted."""
    groups: dict[Identity, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.identity].append(row)
    return tuple(
        replace(
            group[0],
            count=sum(row.count for row in group),
            trips=max(row.trips for row in group),
            source=min((row.source for row in group if row.source), default=""),
        )
        for _, group in sorted(groups.items())
    )


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two tables."""

    kind: Literal["added", "removed", "changed"]
    row: Row
    before: int
    """Count in the old table; 0 for an added row."""
    after: int
    """Count in the new table; 0 for a removed row."""


def diff(old: Iterable[Row], new: Iterable[Row]) -> tuple[Change, ...]:
    """Return rows that were added or removed, and rows whose count changed, sorted by row.

    Of a compiled program only the rows count: how often fusion repeats an instruction says nothing.
    """
    left = {row.identity: row for row in aggregated(old)}
    right = {row.identity: row for row in aggregated(new)}
    changes = []
    for identity in sorted(left.keys() | right.keys()):
        before, after, counts = left.get(identity), right.get(identity), identity[0] != "hlo"
        if before is None and after is not None:
            changes.append(Change("added", after, 0, after.count))
        elif after is None and before is not None:
            changes.append(Change("removed", before, before.count, 0))
        elif before is not None and after is not None and counts and before.count != after.count:
            changes.append(Change("changed", after, before.count, after.count))
    return tuple(changes)


def to_json(rows: Iterable[Row]) -> list[list[Any]]:
    """Return rows as JSON values: the identity, then count and trips; no line numbers."""
    return [[*row.identity, row.count, row.trips] for row in aggregated(rows)]


def from_json(values: Iterable[Sequence[Any]]) -> tuple[Row, ...]:
    """Inverse of `to_json`.

    Raises:
        ValueError: an entry has another length.
    """
    rows = []
    for entry in values:
        if len(entry) != len(COLUMNS) + 2:
            raise ValueError(
                f"audit table: an entry has {len(entry)} fields, expected {len(COLUMNS) + 2} "
                f"({', '.join(COLUMNS)}, count, trips); renew the pinned rows."
            )
        named: dict[str, Any] = dict(zip(COLUMNS, entry, strict=False))
        inputs = tuple(named.pop("inputs").split(",")) if named["inputs"] else ()
        named.pop("inputs", None)
        rows.append(Row(**named, inputs=inputs, count=entry[-2], trips=entry[-1]))
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the comparison of views: a module, a phase, a family, and a cell per table."""

    module: str
    phase: str
    family: str
    cells: Mapping[str, str]
    """By table name: `bfloat16 x bfloat16 -> float32`, several joined by ` | `; empty if absent."""

    @property
    def agrees(self) -> bool:
        """Whether every table that has the family here has it in the same dtypes."""
        return len({cell for cell in self.cells.values() if cell}) <= 1


def side_by_side(tables: Mapping[str, Iterable[Row]]) -> tuple[Line, ...]:
    """Return the tables as one, sorted by module, phase and family.

    The forward part of a gradient program is left out: it repeats the forward program.
    """
    cells: dict[tuple[str, str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, rows in tables.items():
        for row in rows:
            if row.phase != "jvp":
                cell = f"{' x '.join(row.inputs)} -> {row.output}"
                cells[row.module, row.phase, row.family][name].add(cell)
    return tuple(
        Line(*place, {name: " | ".join(sorted(by_name.get(name, ()))) for name in tables})
        for place, by_name in sorted(cells.items())
    )


def by_view(name: str, rows: Iterable[Row]) -> dict[str, tuple[Row, ...]]:
    """Return a table split for `side_by_side`: `name jaxpr`, `name hlo`, or `name` of torch."""
    views: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        views[name if row.view == "torch" else f"{name} {row.view}"].append(row)
    return {view: tuple(of_view) for view, of_view in views.items()}


def is_inexact(dtype: str) -> bool:
    """Whether a dtype, by name, is of floating-point or complex numbers."""
    return jnp.issubdtype(jnp.dtype(dtype), jnp.inexact)


def is_narrow(dtype: str) -> bool:
    """Whether a dtype, by name, is a float of less than 32 bits."""
    return is_inexact(dtype) and jnp.dtype(dtype).itemsize < 4
