"""Report of a port comparison, for programs and as text for people.

Source: docs/your-own-port.md "Reading a report".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from parity.engine.measure.contract import Gate
from parity.engine.measure.localize import Stage, first_divergence
from parity.engine.measure.measurement import Measurement, Verdict
from parity.engine.measure.quantity import Quantity, Role
from parity.engine.pairing.alignment import Alignment
from parity.engine.pairing.irregularities import irregularities
from parity.engine.pairing.parameter_pairs import Matching, Means
from parity.port.ledger import NO_OUTPUT, Entry, has_output
from parity.port.localisation import Place
from parity.port.narrow import NarrowStage
from parity.port_tolerances import PortEdge

AROUND = 3
"""Number of stages shown before and after the stage where a difference starts."""
NAMES = 8
"""Largest number of names in one list of the text, such as that of the results not compared for the
same reason."""
EXCHANGED = "with every parameter assigned by its name, all gates pass"
"""End of a note on parameters that were exchanged."""
ELEMENTS = 3
"""Largest number of elements shown of the stage where the difference starts."""


@dataclass(frozen=True)
class Report:
    """Result of comparing a port with its original: every measurement, and where the two programs
    diverge."""

    title: str
    measurements: tuple[Measurement, ...]
    alignment: Alignment
    matching: Matching
    place: Place
    narrow: tuple[NarrowStage, ...]
    """Errors of both sides in bfloat16; empty if not requested or not possible."""
    notices: tuple[str, ...]
    """Remarks for the reader, a sentence each, such as that a side could not run in bfloat16."""
    ledger: tuple[Entry, ...]
    """Each output and derivative of the original: compared, or the reason why not."""
    untransposed: Mapping[str, str] = field(default_factory=dict)
    """Notes on the port's square matrices whose transpose makes the first wrong stage pass, by
    parameter name (`parity.port.conversion.untransposed`)."""
    misplaced: Mapping[str, str] = field(default_factory=dict)
    """Notes on the port's parameters that were exchanged, by name. Empty unless all gates pass once
    the parameters are assigned by name (`parity.port.conversion.misplaced`)."""
    lost: tuple[str, ...] = ()
    """Parameters of the original that the port lacks and will need once they are trained."""

    def __repr__(self) -> str:
        """Return the result in one sentence, which a failing assertion shows."""
        return f"<Report: {self.sentence()}>"

    @property
    def holds(self) -> bool:
        """Whether every gate passes, and at least one output of the original was compared."""
        return first_divergence(self.measurements) is None and has_output(self.ledger)

    @property
    def left_out(self) -> tuple[Entry, ...]:
        """Outputs and derivatives of the original that were not compared, with reasons."""
        return tuple(entry for entry in self.ledger if not entry.compared)

    @property
    def contract(self) -> tuple[Gate, ...]:
        """The gates (measurements with a tolerance) that a run of this comparison must contain.

        Pairs are found from values, so the gates are known only after both sides ran. `ledger`
        ensures that no output or derivative of the original is left out silently.
        """
        return tuple(dict.fromkeys(map(Gate.of, self._gates())))

    @property
    def culprit(self) -> Stage | None:
        """The first stage that is wrong given correct inputs; None if the port holds, or no stage
        is wrong by itself."""
        return None if self.holds else self.place.culprit

    @property
    def failures(self) -> tuple[Measurement, ...]:
        """The measurements that fail, without those that are not comparable."""
        return tuple(m for m in self.measurements if m.verdict is Verdict.FAIL)

    @property
    def wrong_derivatives(self) -> tuple[str, ...]:
        """Names of the parameters with wrong derivatives, from the last one used in the forward
        pass to the first.

        Derivatives are computed backwards: an error affects the derivatives of all parameters used
        earlier in the forward pass, so the first name is nearest to the error.
        """
        quantities = (Quantity(m.quantity) for m in self.failures)
        names = dict.fromkeys(q.name for q in quantities if q.role is Role.GRADIENT)
        stages = [stage.name for stage in self.place.stages]
        return tuple(sorted(names, key=lambda name: first_use(name, stages), reverse=True))

    @property
    def hints(self) -> tuple[str, ...]:
        """Notes on parameters that hold the original's values in an unusual order of axes, or
        another parameter's values than their name suggests.

        Such parameters are possible causes of a difference. Each note is a sentence; empty if the
        port holds.
        """
        if self.holds:
            return ()
        notes = {name: [note] for name, note in {**self.untransposed, **self.misplaced}.items()}
        for name, note in irregularities(self.matching.pairs).items():
            # A parameter in another one's place has the longer note already.
            if name not in self.misplaced:
                notes.setdefault(name, []).append(note)
        return tuple(f"parameter {name}: {'; '.join(said)}" for name, said in notes.items())

    def worst(self, edge: PortEdge) -> Measurement | None:
        """Return the measurement whose relative L2 error divided by its tolerance is largest on
        an edge (pair of runs).

        NaN counts as the largest. None if no relative L2 error was measured on the edge.
        """
        rows = [m for m in self.measurements if m.edge == edge and m.metric == "rel_l2"]
        return max(rows, key=lambda m: _order(m.fraction), default=None)

    def text(self) -> str:
        """Return the whole report as text; the first line is `sentence()`."""
        return "\n".join([self.sentence(), "", *self._edges(), *self._place(), *self._rest()])

    def sentence(self) -> str:
        """Return the outcome in one sentence: the port holds, or where it diverges."""
        if self.holds:
            return f"{self.title}: holds; {len(self._gates())} gates"
        if weights := [m for m in self.failures if m.metric == "unmatched"]:
            return f"{self.title}: the parameters differ; {weights[0].note}"
        if unstable := [m for m in self.failures if "not deterministic" in m.note]:
            return f"{self.title}: {unstable[0].note}"
        if self.misplaced:
            (first, note), *rest = self.misplaced.items()
            more = f" and {len(rest)} more" if rest else ""
            return (
                f"{self.title}: the conversion is wrong, not the code: parameter {first}{more}: "
                f"{note}"
            )
        if self.culprit is not None:
            operation = self.place.operation
            lines = (operation.mask or operation.source) if operation is not None else ()
            where = f", {lines[0]}" if lines else ""
            partner = self._partner(self.culprit.name)
            return f"{self.title}: diverges at {self.culprit.name}{partner}{where}"
        gradients = [m for m in self.failures if Quantity(m.quantity).role is Role.GRADIENT]
        if gradients and len(gradients) == len(self.failures):
            names = self.wrong_derivatives
            more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
            listed = f"{', '.join(names[:NAMES])}{more}"
            return (
                f"{self.title}: every stage holds, derivatives do not: {listed}{self._backwards()}"
            )
        first = first_divergence(self.measurements)
        if first is None:
            return f"{self.title}: no result of the original was compared"
        if first.quantity == NO_OUTPUT:
            return f"{self.title}: {first.note}"
        if first.verdict is Verdict.NOT_COMPARABLE:
            return f"{self.title}: {first.quantity} was not compared: {first.note}"
        note = f": {first.note}" if first.note else ""
        return (
            f"{self.title}: {first.quantity} fails on {first.edge}; no stage was found that is "
            f"wrong by itself{note}"
        )

    def _backwards(self) -> str:
        """Return a clause that says where the first wrong derivative arises.

        The error is in code that uses the result of the last stage whose parameters have a wrong
        derivative: the derivatives of all parameters that are used later are right. Empty if the
        name of the first parameter of `wrong_derivatives` does not show which stage uses it.
        """
        stages = [stage.name for stage in self.place.stages]
        at = first_use(self.wrong_derivatives[0], stages)
        if at < 0:
            return ""
        rows = (m for m in self.measurements if Quantity(m.quantity).role is Role.GRADIENT)
        # No parameter that is used later has a wrong derivative, but one may have none measured.
        names = {Quantity(m.quantity).name for m in rows if m.verdict is Verdict.PASS}
        later = [use for name in names if (use := first_use(name, stages)) > at]
        rest = f"; those from {stages[min(later)]} on hold" if later else ""
        return f"; look at what uses {stages[at]}{rest}"

    def _gates(self) -> list[Measurement]:
        return [m for m in self.measurements if m.verdict is not Verdict.INFO]

    def _partner(self, name: str) -> str:
        original = next((p.original for p in self.alignment.pairs if p.port == name), name)
        return "" if original == name else f" (the original's {original})"

    def _edges(self) -> list[str]:
        lines = [f"{'edge':<26}{'gates':>6}{'fail':>6}  furthest"]
        for edge in dict.fromkeys(m.edge for m in self._gates()):
            rows = [m for m in self._gates() if m.edge == edge]
            bad = sum(m.verdict is not Verdict.PASS for m in rows)
            worst = max(rows, key=lambda m: _order(m.fraction))
            used = f"{worst.value:.1e} of {worst.tolerance:.1e}"
            if math.isnan(worst.tolerance):
                used = "not compared"
            lines.append(f"{edge:<26}{len(rows):>6}{bad:>6}  {worst.quantity} {used}")
        return lines

    def _place(self) -> list[str]:
        if self.holds or not self.place.stages:
            return []
        stages, culprit = self.place.stages, self.culprit
        lines = ["", f"{'stage':<44}{'free':>9}{'forced':>9}{'limit':>9}"]
        at = stages.index(culprit) if culprit is not None else 0
        for stage in stages[max(0, at - AROUND) : at + AROUND + 1]:
            arrow = "  <- here" if stage is culprit else ""
            lines.append(
                f"{stage.name:<44}{stage.free:>9.1e}{stage.forced:>9.1e}{stage.tolerance:>9.1e}{arrow}"
            )
        if culprit is None:
            return lines
        if self.place.where:
            lines += ["", f"elements of it that break the tolerance: {self.place.where}"]
        lines += ["", "worst elements of it, fed the original's values: port, original"]
        for element in self.place.worst[:ELEMENTS]:
            index = ", ".join(map(str, element.index))
            lines.append(f"  [{index}]  {element.actual:.9g}  {element.expected:.9g}")
        return lines + self._source()

    def _source(self) -> list[str]:
        """Return the lines of the report on where the error of the first wrong stage arises in the
        port's source; empty if unknown."""
        operation, lines = self.place.operation, []
        if operation is None:
            return lines
        if operation.source:
            lines += ["", "first operation of the port that the original does not do:"]
            lines += [f"  {line}" for line in operation.source]
        if operation.mask:
            lines += ["it applies a mask that the original does not have, made here:"]
            lines += [f"  {line}" for line in operation.mask]
        for line in self.place.lines:
            if line.excerpt:
                lines += ["", line.place, *(f"  {text}" for text in line.excerpt.split("\n"))]
        return lines

    def _rest(self) -> list[str]:
        alone = len(self.alignment.unaligned_port), len(self.alignment.unaligned_original)
        lines = [
            "",
            f"{len(self.matching.pairs)} parameters matched, {len(self.alignment.pairs)} stages "
            f"aligned; without a partner: {alone[0]} of the port, {alone[1]} of the original",
        ]
        reasons: dict[tuple[str, str], list[str]] = {}
        for entry in self.left_out:
            reasons.setdefault((entry.role, entry.reason), []).append(entry.name)
        for (role, reason), names in reasons.items():
            more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
            lines.append(f"not compared: {role} {', '.join(names[:NAMES])}{more}: {reason}")
        last = self.narrow[-1] if self.narrow else None
        if last is not None:
            lines.append(
                f"in bfloat16 {last.name} is off by {last.port:.1e} in the port and "
                f"{last.original:.1e} in the original"
            )
        lines += self.hints
        how = {Means.ROUNDED: "", Means.REORDERED: f" {Means.REORDERED}"}
        lines += [
            f"note: parameter {pair.port}{how[pair.means]}: {pair.note}"
            for pair in self.matching.pairs
            if pair.means in how
        ]
        return lines + [f"note: {notice}" for notice in self.notices]


def first_use(parameter: str, stages: Sequence[str]) -> int:
    """Return the index of the first stage that may use a parameter, judged by its name.

    This is the first stage of the parameter's module, or of the nearest enclosing module that has
    stages; -1 if there is none.

    Args:
        parameter: dotted name of the parameter.
        stages: names of the stages, in order of execution.
    """
    parts = parameter.split(".")[:-1]
    while parts:
        module = re.compile(re.escape(".".join(parts)) + r"(?![A-Za-z0-9_])")
        found = next((i for i, name in enumerate(stages) if module.match(name)), None)
        if found is not None:
            return found
        parts.pop()
    return -1


def _order(fraction: float) -> float:
    return math.inf if math.isnan(fraction) else fraction
