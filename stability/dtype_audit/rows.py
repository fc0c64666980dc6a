"""Rows of the dtype audit's table: input, output and accumulation dtypes of operations, by module.

One row stands for all operations that differ in their source line only. Lines are shown but not
compared, so that edits elsewhere in a file do not change committed (pinned) rows. Source:
docs/formats.md "The dtype audit".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp

View = Literal["jaxpr", "hlo", "torch"]
Phase = Literal["forward", "jvp", "backward"]
"""`forward`: a program without a gradient; `jvp` and `backward`: forward and backward part of a
program with a gradient."""
Identity = tuple[str, ...]

COLUMNS = ("view", "phase", "module", "family", "op", "inputs", "output", "accum", "how")


@dataclass(frozen=True, slots=True)
class Row:
    """Row of the dtype audit: operations of one name, view, module and phase with equal dtypes.

    The view is the form of the program: its jaxpr, its compiled HLO, or calls dispatched by torch.
    The phase is `forward` in a program without a gradient; in one with a gradient it is `jvp` for
    the forward part and `backward`.
    """

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
    """For conversions: `promotion` if implicit, because another operand is wider; `round trip` if
    to a narrower dtype and widened again by all readers; else empty."""
    count: int = 1
    """Number of executions, each iteration of a scan counted; for a compiled program, the number of
    instructions in its text."""
    trips: int = 1
    """For a jaxpr, the largest number of executions of one of the operations: the product of the
    lengths of the scans around it; else 1."""
    source: str = ""
    """One of the source lines, relative to the import path."""

    @property
    def identity(self) -> Identity:
        """Key of the row: all fields except `count`, `trips` and `source`."""
        inputs = ",".join(self.inputs)
        plain = (self.view, self.phase, self.module, self.family, self.op)
        return (*plain, inputs, self.output, self.accum, self.how)

    @property
    def dtypes(self) -> frozenset[str]:
        """All dtypes of the row."""
        return frozenset({*self.inputs, self.output, self.accum} - {""})

    def describe(self) -> str:
        """Return the row as text, such as `backward reduce_sum (bfloat16) -> bfloat16`."""
        accum = f" accumulating in {self.accum}" if self.accum else ""
        how = f" [{self.how}]" if self.how else ""
        return f"{self.phase} {self.op} ({', '.join(self.inputs)}) -> {self.output}{accum}{how}"


def aggregated(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return rows sorted by identity; rows of equal identity are merged and their counts summed."""
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
    """One row that differs between two tables of the dtype audit."""

    kind: Literal["added", "removed", "changed"]
    row: Row
    before: int
    """Count in the old table; 0 for an added row."""
    after: int
    """Count in the new table; 0 for a removed row."""


def diff(old: Iterable[Row], new: Iterable[Row]) -> tuple[RowChange, ...]:
    """Return the rows that differ between two tables: added, removed, or changed in count.

    The changes are sorted by identity. Counts of a compiled program are not compared, since counts
    depend on fusion.
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
    """Return each row as a list for JSON: the `COLUMNS`, count and trips, without source line."""
    return [[*row.identity, row.count, row.trips] for row in aggregated(rows)]


def from_json(values: Iterable[Sequence[Any]]) -> tuple[Row, ...]:
    """Return the rows that `to_json` wrote.

    Raises:
        ValueError: an entry has another number of fields.
    """
    rows = []
    for entry in values:
        if len(entry) != len(COLUMNS) + 2:
            raise ValueError(
                f"audit table: an entry has {len(entry)} fields, expected {len(COLUMNS) + 2} "
                f"({', '.join(COLUMNS)}, count, trips); run `megalodon-numerics dtypes renew`."
            )
        named: dict[str, Any] = dict(zip(COLUMNS, entry, strict=False))
        inputs = tuple(named.pop("inputs").split(",")) if named["inputs"] else ()
        named.pop("inputs", None)
        rows.append(Row(**named, inputs=inputs, count=entry[-2], trips=entry[-1]))
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the comparison of tables: dtypes of a family of operations in a module."""

    module: str
    phase: str
    family: str
    cells: Mapping[str, str]
    """Dtypes by table name, such as `bfloat16 x bfloat16 -> float32`, several joined by ` | `;
    empty if the table lacks the family in this module and phase."""

    @property
    def agrees(self) -> bool:
        """Whether all tables that have the family in this module and phase have equal dtypes."""
        return len({cell for cell in self.cells.values() if cell}) <= 1


def side_by_side(tables: Mapping[str, Iterable[Row]]) -> tuple[Line, ...]:
    """Return the lines that compare tables (by name), sorted by module, phase and family.

    Rows of the phase `jvp`, the forward part of a gradient, are omitted: they repeat `forward`.
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
    """Split a table by view, for `side_by_side`.

    The keys are `<name> jaxpr`, `<name> hlo`, and `<name>` for torch.
    """
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
