"""Rows of the audit table: input, output and accumulation dtypes of operations, by module.

One row stands for all equations that differ in their location only. Line numbers are shown but not
compared, so that pinned rows survive edits above the line. Source: docs/formats.md "The dtype
audit".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp

View = Literal["jaxpr", "hlo", "torch"]
Phase = Literal["forward", "jvp", "backward"]
"""A forward program, or the forward or backward part of a gradient program."""
Identity = tuple[str, ...]

COLUMNS = ("view", "phase", "module", "family", "op", "inputs", "output", "accum", "how")


@dataclass(frozen=True, slots=True)
class Row:
    """Operations of one kind in one module, with equal dtypes."""

    view: View
    phase: Phase
    module: str
    """Path of the module, with layers as `*`: `model.layers.*.attn.cema`."""
    family: str
    """Family of the operation, common to all three views: `dot`, `sum`, `exp`."""
    op: str
    """Name of the operation in its view."""
    inputs: tuple[str, ...]
    """Input dtypes in order; for elementwise operations the distinct ones, sorted."""
    output: str
    accum: str = ""
    """`preferred_element_type` of a product. It does not determine the accumulator's dtype."""
    how: str = ""
    """`promotion`: an implicit conversion. `round trip`: a rounding that is undone immediately."""
    count: int = 1
    """Number of executions, with iterations of scans; in a compiled program, of instructions."""
    trips: int = 1
    """Iterations of the enclosing loops."""
    source: str = ""
    """One of the source lines, relative to the import path."""

    @property
    def identity(self) -> Identity:
        """Key of the row: all fields except counts and line."""
        inputs = ",".join(self.inputs)
        plain = (self.view, self.phase, self.module, self.family, self.op)
        return (*plain, inputs, self.output, self.accum, self.how)

    @property
    def dtypes(self) -> frozenset[str]:
        """All dtypes of the row."""
        return frozenset({*self.inputs, self.output, self.accum} - {""})

    def describe(self) -> str:
        """Describe the row, such as `backward reduce_sum (bfloat16) -> bfloat16`."""
        accum = f" accumulating in {self.accum}" if self.accum else ""
        how = f" [{self.how}]" if self.how else ""
        return f"{self.phase} {self.op} ({', '.join(self.inputs)}) -> {self.output}{accum}{how}"


def aggregated(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return one row per identity, with summed counts, sorted."""
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
class RowChange:
    """One difference between two tables."""

    kind: Literal["added", "removed", "changed"]
    row: Row
    before: int
    """Count in the old table; 0 for an added row."""
    after: int
    """Count in the new table; 0 for a removed row."""


def diff(old: Iterable[Row], new: Iterable[Row]) -> tuple[RowChange, ...]:
    """Return rows that were added, removed or whose count changed, sorted by row.

    Counts of a compiled program are ignored: they depend on fusion.
    """
    left = {row.identity: row for row in aggregated(old)}
    right = {row.identity: row for row in aggregated(new)}
    changes = []
    for identity in sorted(left.keys() | right.keys()):
        before, after, counts = left.get(identity), right.get(identity), identity[0] != "hlo"
        if before is None and after is not None:
            changes.append(RowChange("added", after, 0, after.count))
        elif after is None and before is not None:
            changes.append(RowChange("removed", before, before.count, 0))
        elif before is not None and after is not None and counts and before.count != after.count:
            changes.append(RowChange("changed", after, before.count, after.count))
    return tuple(changes)


def to_json(rows: Iterable[Row]) -> list[list[Any]]:
    """Return rows as JSON values: identity, count and trips, without line numbers."""
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
    """One line of the comparison of tables: module, phase, family, and a cell per table."""

    module: str
    phase: str
    family: str
    cells: Mapping[str, str]
    """Cells by table name: `bfloat16 x bfloat16 -> float32`, joined by ` | `; empty if absent."""

    @property
    def agrees(self) -> bool:
        """Whether all tables that have the family here have it in the same dtypes."""
        return len({cell for cell in self.cells.values() if cell}) <= 1


def side_by_side(tables: Mapping[str, Iterable[Row]]) -> tuple[Line, ...]:
    """Merge tables into one, sorted by module, phase and family.

    The forward part of a gradient program is omitted: it repeats the forward program.
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
    """Split a table for `side_by_side`: `name jaxpr`, `name hlo`, or `name` for torch."""
    views: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        views[name if row.view == "torch" else f"{name} {row.view}"].append(row)
    return {view: tuple(of_view) for view, of_view in views.items()}


def is_inexact(dtype: str) -> bool:
    """Whether the named dtype is floating-point or complex."""
    return jnp.issubdtype(jnp.dtype(dtype), jnp.inexact)


def is_narrow(dtype: str) -> bool:
    """Whether the named dtype is a float of fewer than 32 bits."""
    return is_inexact(dtype) and jnp.dtype(dtype).itemsize < 4
