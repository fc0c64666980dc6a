"""Ledger of a port comparison: which of the original's results were compared, and why not others.

Source: docs/your-own-port.md "What was not compared".
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from parity.engine.measure.compare import Comparison
from parity.engine.measure.measurement import Measurement, Verdict
from parity.engine.measure.quantity import Quantity
from parity.engine.pairing.parameter_pairs import Matching
from parity.port_tolerances import PortEdge
from parity.sides.side import Trace

BETWEEN = (
    PortEdge.PORT64_ORIGINAL64,
    PortEdge.ORIGINAL32_PORT64,
    PortEdge.PORT32_ORIGINAL64,
    PortEdge.PORT32_ORIGINAL32,
)
"""Edges (pairs of runs) that compare the port with the original; other edges compare two runs of
one side."""
ALL_DERIVATIVES = "grad/*"
"""Name of the entry that stands for all derivatives if none was computed."""
FROZEN = "the original does not train it (`requires_grad` is False)"
UPDATED = "the call changed it in place: return it on both sides to have it compared"
BY_INPUT = "derivatives are taken by parameters only"
NO_OUTPUT = "outputs"
"""Quantity of the measurement which reports that no output was compared."""


class Role(StrEnum):
    """Type of result that a ledger entry is about."""

    OUTPUT = "output"
    GRADIENT = "gradient"
    STATE = "state"
    PARAMETER = "parameter"
    INPUT = "derivative by input"


@dataclass(frozen=True, slots=True)
class Entry:
    """Ledger entry: whether one result of the original was compared, or why not.

    Attributes:
        name: name of the result in the original.
        role: output, derivative by a parameter, derivative by an input, state that a call updates,
            or parameter that only one side has.
        port: name of the counterpart in the port; empty if there is none.
        compared: whether a gate compared the result with its counterpart.
        reason: why the result was not compared; empty if it was.
    """

    name: str
    role: Role
    port: str = ""
    compared: bool = False
    reason: str = ""

    def __post_init__(self) -> None:
        if self.compared == bool(self.reason):
            raise AssertionError(
                f"ledger entry for the original's {self.name}: expected either compared=True or a "
                "reason why it was not compared, got both or neither"
            )


def has_output(ledger: Iterable[Entry]) -> bool:
    """Return whether any output of the original was compared."""
    return any(entry.compared and entry.role is Role.OUTPUT for entry in ledger)


def require_an_output(
    rows: Sequence[Measurement], ledger: Sequence[Entry], comparison: Comparison
) -> list[Measurement]:
    """Return the measurements; if no output was compared, a "not comparable" one is added."""
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
    parameters: Mapping[str, str] = MappingProxyType({}),
    inputs: Collection[str] = (),
    without_derivatives: str = "",
) -> tuple[Entry, ...]:
    """Return the ledger: for each result of the original, whether it was compared, or why not.

    There is one entry for each output of the original, each derivative by a parameter, each
    parameter whose `requires_grad` is False, each excluded parameter, each buffer that the call
    updates, and each derivative by an input, which is never compared. If no derivative was
    computed, one entry stands for all derivatives.

    Args:
        rows: all measurements, from which the compared quantities are read.
        original: the original's most precise run.
        partners: names of the port's outputs, by name of the original's output.
        matching: the pairs of parameters.
        left_out: reasons given by the case (`Port.not_compared`), by excluded output.
        parameters: such reasons, by excluded parameter of either side.
        inputs: names of the original's floating-point inputs.
        without_derivatives: why no derivative was computed; empty if derivatives were computed.
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
    entries += [Entry(name, Role.PARAMETER, reason=why) for name, why in parameters.items()]
    entries += [Entry(name, Role.STATE, reason=UPDATED) for name in original.updated]
    entries += [Entry(name, Role.GRADIENT, reason=FROZEN) for name in original.frozen]
    if without_derivatives:
        reason = f"no derivative was compared: {without_derivatives}"
        return (*entries, Entry(ALL_DERIVATIVES, Role.GRADIENT, reason=reason))
    for name in original.gradients:
        made = [p.port for p in matching.pairs if name in (*p.originals, *p.also)]
        quantities = [Quantity.gradient(each) for each in made]
        entries.append(_entry(name, Role.GRADIENT, quantities, ", ".join(made), gates))
    entries += [Entry(name, Role.INPUT, reason=BY_INPUT) for name in inputs]
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
    """Return the entry of an output or derivative, which was compared if each of the port's
    `quantities` for it has a gate.

    Args:
        name: name in the original.
        role: output or derivative.
        quantities: names under which the port's counterparts are measured.
        port: name of the counterpart in the port; empty if there is none.
        gates: measurements by quantity.
    """
    why = "the port has no counterpart of it"
    for quantity in quantities:
        found = gates.get(quantity, ())
        if not any(_is_gate(row) for row in found):
            # A parameter counts as compared only if each of its parts has a gate.
            notes = (row.note for row in found if row.note)
            return Entry(name, role, port, reason=next(notes, why))
    return Entry(name, role, port, compared=True) if quantities else Entry(name, role, reason=why)


def _is_gate(row: Measurement) -> bool:
    return row.verdict in (Verdict.PASS, Verdict.FAIL) and math.isfinite(row.tolerance)
