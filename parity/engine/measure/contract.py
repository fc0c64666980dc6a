"""Contract of a run: the gates (measurements with a tolerance) that it must contain.

A run is incomplete if a gate is missing, measured twice or unplanned. The contract is computed from
cases, configurations and code before anything is measured. It is stored as one line for each suite,
case, edge and kind: the number of gates, and a digest of their names. Source: docs/verdicts.md
"Contract".
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parity.engine.measure.measurement import Kind, Measurement, Verdict


@dataclass(frozen=True, slots=True, order=True)
class Gate:
    """Names that identify a measurement with a tolerance, which a run must contain once."""

    suite: str
    case: str
    edge: str
    kind: str
    quantity: str
    metric: str = "rel_l2"

    @classmethod
    def of(cls, m: Measurement) -> Gate:
        """Return the gate with the names of a measurement."""
        return cls(m.suite, m.case, m.edge, Kind(m.kind).value, m.quantity, m.metric)

    @property
    def group(self) -> tuple[str, str, str, str]:
        """Suite, case, edge and kind."""
        return self.suite, self.case, self.edge, self.kind


@dataclass(frozen=True, slots=True, order=True)
class ContractLine:
    """The gates of one suite, case, edge and kind."""

    suite: str
    case: str
    edge: str
    kind: str
    gates: int = 0
    """Number of planned gates."""
    digest: str = ""
    """Hash of the gates' sorted quantities and metrics."""

    @property
    def group(self) -> tuple[str, str, str, str]:
        """Suite, case, edge and kind."""
        return self.suite, self.case, self.edge, self.kind

    def __str__(self) -> str:
        return f"{self.kind} gates of case {self.case} ({self.edge})"


Contract = tuple[ContractLine, ...]


@dataclass(frozen=True)
class Breaches:
    """Differences between a run and its contract.

    The object is falsy if there are no differences: every planned gate was measured once, and no
    unplanned gate was measured.
    """

    missing: tuple[tuple[ContractLine, int], ...] = ()
    """Contract lines with fewer or different gates than planned, each with the number of gates
    measured."""
    unplanned: tuple[Gate, ...] = ()
    """Measured gates of each group (suite, case, edge and kind) that the contract lacks, or for
    which it plans fewer gates: all gates of the group."""
    doubled: tuple[Gate, ...] = ()
    """Gates measured more than once."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unplanned or self.doubled)

    def sentence(self) -> str:
        """Describe the differences; empty if there are none.

        The text has the numbers of missing, repeated and unplanned gates, each with an example.
        """
        parts = []
        if self.missing:
            lost = sum(max(line.gates - found, 1) for line, found in self.missing)
            line, found = self.missing[0]
            parts.append(
                f"at least {lost:,} planned gate{'s were' if lost > 1 else ' was'} not measured, "
                f"first: {line}: {found} of {line.gates}"
            )
        for what, gates in (
            ("measured more than once", self.doubled),
            ("not in the contract", self.unplanned),
        ):
            if gates:
                first = gates[0]
                parts.append(
                    f"{len(gates):,} gate{'s' if len(gates) > 1 else ''} {what}, first: "
                    f"{first.quantity} ({first.metric}) of case {first.case} ({first.edge})"
                )
        return "; ".join(parts)


def contract_of(gates: Iterable[Gate]) -> Contract:
    """Return the contract for planned gates: one line per suite, case, edge and kind, sorted.

    Raises:
        ValueError: a gate was planned twice.
    """
    groups: dict[tuple[str, str, str, str], list[Gate]] = {}
    for gate in gates:
        groups.setdefault(gate.group, []).append(gate)
    for group in groups.values():
        if len(set(group)) < len(group):
            twice = next(gate for gate, n in Counter(group).items() if n > 1)
            raise ValueError(f"expected every gate to be planned once, got this one twice: {twice}")
    return tuple(
        ContractLine(*name, len(group), _digest(group)) for name, group in sorted(groups.items())
    )


def breaches(contract: Sequence[ContractLine], rows: Iterable[Measurement]) -> Breaches:
    """Return the differences between a contract and the gates among a run's measurements."""
    counts = Counter(Gate.of(m) for m in rows if m.verdict is not Verdict.INFO)
    found: dict[tuple[str, str, str, str], list[Gate]] = {}
    for gate in sorted(counts):
        found.setdefault(gate.group, []).append(gate)
    missing, unplanned = [], []
    for line in contract:
        gates = found.pop(line.group, [])
        if len(gates) == line.gates and _digest(gates) == line.digest:
            continue
        if len(gates) > line.gates:
            unplanned += gates
        else:
            missing.append((line, len(gates)))
    unplanned += [gate for gates in found.values() for gate in gates]
    doubled = tuple(gate for gate, n in sorted(counts.items()) if n > 1)
    return Breaches(tuple(missing), tuple(unplanned), doubled)


def _digest(gates: Iterable[Gate]) -> str:
    names = "\n".join(sorted(f"{gate.quantity}\t{gate.metric}" for gate in gates))
    return hashlib.sha256(names.encode()).hexdigest()[:16]
