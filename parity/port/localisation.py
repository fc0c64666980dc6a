"""Where a difference starts: every stage of the port fed the original's values.

First in float64, where a stage of the same mathematics agrees to the last digits; and where all do,
in float32, which shows what is computed in less precision than it should be. Source:
docs/your-own-port.md "Where it starts".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from parity.engine.deviation import SHOWN, Worst, worst_elements
from parity.engine.exits import exits_named
from parity.engine.localize import Stage
from parity.engine.measurement import Kind
from parity.engine.metrics import relative_l2, without_shared_infinities
from parity.engine.operations import Unknown, first_narrow, first_unknown
from parity.engine.source_lines import LINES, Line
from parity.engine.where import culprits, where
from parity.port.correspondence import Correspondence
from parity.port.rounding_floors import Floors, floors_of, narrowed, stage_bound, together
from parity.port.side_runs import SideRuns
from parity.port_tolerances import PortEdge
from parity.sides.side import Precision, Rounding, Run, TellsOperations, TellsResults, Trace

MAKES_MASK = "makes a mask that the original does not have"
DOES = "first operation that the original does not do"
ROOM = 4.0
"""Tolerances of its stage by which an operation may be off: one table may show in it undiluted."""


@dataclass(frozen=True)
class Place:
    """Every stage on its own, and the first that is wrong on its own."""

    edge: PortEdge
    """What each stage, fed the original's values, was compared with."""
    stages: tuple[Stage, ...]
    worst: tuple[Worst, ...] = ()
    """Elements of the culprit that differ most, the worst first."""
    where: str = ""
    """Which elements of the culprit break its tolerance (`engine.where`)."""
    operation: Unknown | None = None
    """Its first operation that the original does not do."""

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines to look at, the one to begin with first."""
        operation = self.operation
        if operation is None:
            return ()
        # A line that makes a mask may be the one that applies it: it is shown once.
        why = dict.fromkeys(operation.mask, MAKES_MASK)
        for line in operation.source[:1]:
            why.setdefault(line, DOES)
        return tuple(Line.at(*line) for line in list(why.items())[:LINES])

    @property
    def culprit(self) -> Stage | None:
        """The first stage that is wrong although what it is fed is right."""
        return next((stage for stage in self.stages if stage.broken), None)

    @property
    def last_right(self) -> Stage | None:
        """The stage before it."""
        before = [s for s in self.stages if not s.broken]
        if self.culprit is None:
            return before[-1] if before else None
        index = self.stages.index(self.culprit)
        return self.stages[index - 1] if index else None


def localise(
    together_: Correspondence, original: SideRuns, port: SideRuns, constants: Mapping[str, float]
) -> Place:
    """Return what every aligned stage of the port makes of the original's values.

    Args:
        together_: which stage is which.
        original: its runs.
        port: its runs.
        constants: what the original's float32 tables move its stages by, by the port's names.
    """
    if port.wide is None:
        return _without_float64(together_, original, port)
    if original.wide is None:
        fed = _Fed.of(together_, original, port)
        place = _against_float32(port, fed)
        if place.culprit is not None:
            # Operations are known by their float64 values, which the original has none of.
            return place
        narrow = _in_float32(port, fed)
        return place if narrow.culprit is None else narrow
    place = _in_float64(together_, original, port, constants)
    if place.culprit is not None:
        return replace(place, operation=_operation(together_, original, port, place.culprit))
    narrow = _in_float32(port, _Fed.of(together_, original, port))
    if narrow.culprit is None:
        return place
    return replace(narrow, operation=_narrow_operation(together_, original, port, narrow.culprit))


def _narrow_operation(
    together_: Correspondence, original: SideRuns, port: SideRuns, stage: Stage
) -> Unknown | None:
    """Return the first operation of a stage that is done in less than float32."""
    if not isinstance(port.side, TellsOperations):
        return None
    fed = replaceable(original.best, together_, original, port)
    with exits_named(port.name):
        return first_narrow(port.side.operations_of(stage.name, fed)[0])


def _operation(
    together_: Correspondence, original: SideRuns, port: SideRuns, stage: Stage
) -> Unknown | None:
    """Return the first operation of a stage that the original does not do.

    Nothing where a side does not tell its operations: captures and torch modules as ports.
    """
    ours, theirs = port.side, original.side
    if not isinstance(ours, TellsOperations) or not isinstance(theirs, TellsResults):
        return None
    fed = replaceable(original.best, together_, original, port)
    with exits_named(port.name):
        operations, values = ours.operations_of(stage.name, fed)
    if not operations:
        return None
    # Room for tables in float32, as the stage has; and well below what is wrong with it.
    same = min(ROOM * stage.tolerance, stage.forced / ROOM)
    with exits_named(original.name):
        results = theirs.operation_results()
    return first_unknown(operations, values, results, same)


def _in_float64(
    together_: Correspondence, original: SideRuns, port: SideRuns, constants: Mapping[str, float]
) -> Place:
    theirs = together_.stages(original.best.stages)
    fed = replaceable(original.best, together_, original, port)
    forced = port.run(Run(Precision.FLOAT64, forced=fed)).stages
    known = {name: forced[name] for name in theirs}
    # What is float32 on either side all the same, such as a table, is no difference of mathematics.
    tables, operations = (
        floors_of(known, lambda seed, kind=kind: port.moved(kind, seed, fed).stages)
        for kind in (Rounding.CONSTANTS, Rounding.OPERATIONS)
    )
    floors = together(tables, narrowed(operations), constants)
    edge = PortEdge.PORT64_ORIGINAL64
    return _place(edge, port.best.stages, forced, theirs, theirs, floors)


def _against_float32(port: SideRuns, fed: _Fed) -> Place:
    """Return what the port makes in float64 of an original's values that has float32 alone.

    Each stage by itself rounds little, so an error shows here that what is rounded before it hides.
    """
    edge = PortEdge.ORIGINAL32_PORT64
    return _place(edge, port.best.stages, fed.exact, fed.theirs, fed.theirs, fed.floors)


def _in_float32(port: SideRuns, fed: _Fed) -> Place:
    """Return what the port rounds in float32: its truth is its own float64 of the same inputs."""
    forced = port.run(Run(forced=fed.replaced)).stages
    edge = PortEdge.PORT32_PORT64
    return _place(edge, port.narrow.stages, forced, fed.exact, fed.theirs, fed.floors)


def _without_float64(together_: Correspondence, original: SideRuns, port: SideRuns) -> Place:
    theirs = together_.stages(original.narrow.stages)
    fed = replaceable(original.narrow, together_, original, port)
    forced = port.run(Run(forced=fed)).stages
    floors = dict.fromkeys(theirs, 0.0)
    return _place(PortEdge.PORT32_ORIGINAL32, port.narrow.stages, forced, theirs, theirs, floors)


@dataclass(frozen=True)
class _Fed:
    """What the port computes in float64 of the original's float32 values, stage by stage."""

    theirs: dict[str, np.ndarray]
    """The original's, in float32."""
    replaced: dict[str, np.ndarray]
    """Those of them that the port is fed."""
    exact: dict[str, np.ndarray]
    floors: Floors
    """Of each stage on its own."""

    @classmethod
    def of(cls, together_: Correspondence, original: SideRuns, port: SideRuns) -> _Fed:
        """Run the port on them, and again moved by rounding."""
        theirs = together_.stages(original.narrow.stages)
        fed = replaceable(original.narrow, together_, original, port)
        stages = port.run(Run(Precision.FLOAT64, forced=fed)).stages
        exact = {name: stages[name] for name in theirs}
        floors = floors_of(exact, lambda seed: port.moved(Rounding.OPERATIONS, seed, fed).stages)
        return cls(theirs, fed, exact, floors)


def _place(
    edge: PortEdge,
    free: Mapping[str, np.ndarray],
    forced: Mapping[str, np.ndarray],
    truth: Mapping[str, np.ndarray],
    theirs: Mapping[str, np.ndarray],
    floors: Mapping[str, float],
) -> Place:
    stages = tuple(
        Stage(
            name,
            relative_l2(*without_shared_infinities(free[name], theirs[name])),
            relative_l2(*without_shared_infinities(forced[name], truth[name])),
            stage_bound(edge, Kind.BLOCK, floors[name]),
        )
        for name in free
        if name in theirs
    )
    place = Place(edge, stages)
    if place.culprit is None:
        return place
    name = place.culprit.name
    sides = without_shared_infinities(forced[name], truth[name])
    wrong = culprits(*sides, place.culprit.tolerance)
    return replace(
        place, worst=worst_elements(forced[name], truth[name], SHOWN), where=where(wrong)
    )


def replaceable(
    trace: Trace, together_: Correspondence, original: SideRuns, port: SideRuns
) -> dict[str, np.ndarray]:
    """Return what the port can be fed: all but what it returns, and what has masks in it.

    Padding too is the original's: what filters along a sequence may carry it into what counts.
    """
    kept = {*port.best.outputs} | {
        pair.port
        for pair in together_.alignment.pairs
        if pair.port in port.masked or pair.original in original.masked
    }
    return {name: x for name, x in together_.stages(trace.whole).items() if name not in kept}
