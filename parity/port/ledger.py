"""The ledger of a port: each result and derivative of the original, compared or not and why not.

Source: docs/your-own-port.md "What was not compared".
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from parity.engine.compare import Comparison
from parity.engine.measurement import Measurement, Verdict
from parity.engine.parameter_pairs import Matching
from parity.engine.quantity import Quantity
from parity.port_tolerances import PortEdge
from parity.sides.side import Trace

BETWEEN = (
    PortEdge.PORT64_ORIGINAL64,
    PortEdge.ORIGINAL32_PORT64,
    PortEdge.PORT32_ORIGINAL64,
    PortEdge.PORT32_ORIGINAL32,
)
"""Edges that compare the port with the original; the others compare a side with itself."""
ALL_DERIVATIVES = "grad/*"
"""Entry for all derivatives where none was taken."""
NO_OUTPUT = "outputs"
"""Quantity of the row that says that no result was compared."""


class Role(StrEnum):
    """What an entry is about."""

    OUTPUT = "output"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True)
class Entry:
    """One result or derivative of the original.

    Attributes:
        name: The original's name of it.
        role: Result or derivative.
        port: What the port calls it; empty where the port has no counterpart.
        compared: Whether a gate compared it with the port's.
        reason: Why it was not compared; empty where it was.
    """

    name: str
    role: Role
    port: str = ""
    compared: bool = False
    reason: str = ""

    def __post_init__(self) -> None:
        if self.compared == bool(self.reason):
            raise AssertionError(
                f"the ledger says of the original's {self.name} neither that it was compared nor "
                "why it was not, or both"
            )


def has_output(ledger: Iterable[Entry]) -> bool:
    """Whether any result of the original was compared."""
    return any(entry.compared and entry.role is Role.OUTPUT for entry in ledger)


def require_an_output(
    rows: Sequence[Measurement], ledger: Sequence[Entry], comparison: Comparison
) -> list[Measurement]:
    """Return rows that cannot pass where no result was compared."""
    if has_output(ledger):
        return list(rows)
    reasons = {entry.reason for entry in ledger if entry.role is Role.OUTPUT}
    note = f"no result of the original was compared: {'; '.join(sorted(reasons)) or 'it has none'}"
    return [*rows, comparison.unmeasured(NO_OUTPUT, note, "compared")]


def ledger_of(
    rows: Sequence[Measurement],
    original: Trace,
    partners: Mapping[str, str],
    matching: Matching,
    *,
    left_out: Mapping[str, str],
    without_derivatives: str = "",
) -> tuple[Entry, ...]:
    """Return an entry for each result and derivative of the original.

    Args:
        rows: All measurements; what was compared is read from them.
        original: Its most precise run.
        partners: The port's results by the original's names.
        matching: Which parameter is made of which.
        left_out: Results that the case leaves out, with its reasons.
        without_derivatives: Why no derivative was taken; empty where they were.
    """
    gates = _gates(rows)
    entries = []
    for name in (*original.outputs, *original.exact):
        port = partners.get(name, "")
        entries.append(_entry(name, Role.OUTPUT, [port or name], port, gates))
    entries += [
        Entry(name, Role.OUTPUT, reason=f"{kind}: return an array to have it compared")
        for name, kind in original.unread.items()
    ]
    entries += [Entry(name, Role.OUTPUT, reason=why) for name, why in left_out.items()]
    if without_derivatives:
        reason = f"no derivative was compared: {without_derivatives}"
        return (*entries, Entry(ALL_DERIVATIVES, Role.GRADIENT, reason=reason))
    for name in original.gradients:
        made = [p.port for p in matching.pairs if name in (*p.originals, *p.also)]
        quantities = [Quantity.gradient(each) for each in made]
        entries.append(_entry(name, Role.GRADIENT, quantities, ", ".join(made), gates))
    return tuple(entries)


def _gates(rows: Iterable[Measurement]) -> dict[str, list[Measurement]]:
    gates: dict[str, list[Measurement]] = {}
    for row in rows:
        if row.edge in BETWEEN and row.metric in ("rel_l2", "unequal"):
            gates.setdefault(row.quantity, []).append(row)
    return gates


def _entry(
    name: str,
    role: Role,
    quantities: Collection[str],
    port: str,
    gates: Mapping[str, Sequence[Measurement]],
) -> Entry:
    """Return the entry of a result or parameter that the port has as some quantities."""
    why = "the port has no counterpart of it"
    for quantity in quantities:
        found = gates.get(quantity, ())
        if not any(_is_gate(row) for row in found):
            # A parameter of which one part has no gate was not compared.
            notes = (row.note for row in found if row.note)
            return Entry(name, role, port, reason=next(notes, why))
    return Entry(name, role, port, compared=True) if quantities else Entry(name, role, reason=why)


def _is_gate(row: Measurement) -> bool:
    return row.verdict in (Verdict.PASS, Verdict.FAIL) and math.isfinite(row.tolerance)
