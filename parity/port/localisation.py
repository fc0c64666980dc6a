"""Localisation: recomputes every stage of the port from the original's values ("forced").

The first stage that is still wrong is where the difference starts. Stages are compared in float64
first, where equal mathematics agrees to the last digits. If all agree, they are compared in
float32, which shows operations of too low precision. Source: docs/your-own-port.md "Where it
starts".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from parity.engine.measure.deviation import SHOWN, Worst, worst_elements
from parity.engine.measure.localize import Stage
from parity.engine.measure.measurement import Kind
from parity.engine.measure.metrics import relative_l2, without_shared_infinities
from parity.engine.measure.where import culprits, where
from parity.engine.pairing.parameter_pairs import Pair
from parity.engine.programs.exits import exits_named
from parity.engine.programs.operations import Unknown, first_narrow, first_unknown
from parity.engine.programs.source_lines import LINES, Line
from parity.port.correspondence import Correspondence
from parity.port.rounding_floors import Floors, floors_of, narrowed, stage_bound, together
from parity.port.side_runs import SideRuns
from parity.port_tolerances import PortEdge
from parity.sides.side import (
    Precision,
    Rounding,
    Run,
    SideError,
    TakesExactParameters,
    TakesInputs,
    TellsOperations,
    TellsResults,
    Trace,
)

MAKES_MASK = "makes a mask that the original does not have"
DOES = "first operation that the original does not do"
# The effect of a float32 table averages out over a stage, but one operation may show all of the
# effect.
ROOM = 4.0
"""Factor on a stage's tolerance: an operation inside the stage agrees if the error of its result is
at most this factor times the tolerance."""


# Any change shows a dependence: float64 results then differ.
CHANGE = 1e-3
"""Largest absolute change of a number in the parameters or inputs, when testing which stages depend
on them."""


@dataclass(frozen=True)
class Place:
    """Where a port diverges: the error of every stage given correct inputs, and the first wrong
    stage (the culprit)."""

    edge: PortEdge
    """The two runs whose stages were compared, each stage computed from the original's values."""
    stages: tuple[Stage, ...]
    """Free and forced relative L2 error of each stage, with its tolerance, in order of
    computation."""
    worst: tuple[Worst, ...] = ()
    """Elements of the culprit that differ most, the worst first."""
    where: str = ""
    """Description of the culprit's elements that break its tolerance (`engine.measure.where`)."""
    operation: Unknown | None = None
    """First operation of the culprit that the original does not perform, or, if only float32
    differs, the first one computed in a dtype narrower than float32. None if unknown."""

    @property
    def lines(self) -> tuple[Line, ...]:
        """The source lines to look at, the most suspicious first; empty if unknown."""
        operation = self.operation
        if operation is None:
            return ()
        # The line that makes a mask may also be the one that applies it: list it once.
        why = dict.fromkeys(operation.mask, MAKES_MASK)
        for line in operation.source[:1]:
            why.setdefault(line, DOES)
        return tuple(Line.at(*line) for line in list(why.items())[:LINES])

    @property
    def culprit(self) -> Stage | None:
        """The first stage that is wrong although its inputs are correct."""
        return next((stage for stage in self.stages if stage.broken), None)

    @property
    def last_right(self) -> Stage | None:
        """The stage before the culprit, None if the culprit is the first stage; without a culprit,
        the last."""
        before = [s for s in self.stages if not s.broken]
        if self.culprit is None:
            return before[-1] if before else None
        index = self.stages.index(self.culprit)
        return self.stages[index - 1] if index else None


def localise(
    together_: Correspondence, original: SideRuns, port: SideRuns, constants: Mapping[str, float]
) -> Place:
    """Recompute every paired stage of the port from the original's values, and return which stages
    are wrong.

    Args:
        together_: the pairs of stages and parameters.
        original: runs of the original.
        port: runs of the port.
        constants: noise floors due to tables (constant arrays) that stay float32 in the original's
            float64 run, by the port's names; used if the original cannot run with replaced stages.

    Raises:
        SideError: the port cannot be run with replaced stages.
    """
    if port.wide is None:
        return _without_float64(together_, original, port)
    if original.wide is None:
        fed = _Fed.of(together_, original, port)
        place = _against_float32(port, fed)
        if place.culprit is not None:
            # Operations are identified by float64 values, which the original does not have.
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
    """Return the first operation of a stage that is computed in a dtype narrower than float32.

    None if there is no such operation, or the port cannot list its operations.
    """
    if not isinstance(port.side, TellsOperations):
        return None
    fed = replaceable(original.best, together_, original, port)
    with exits_named(port.name):
        return first_narrow(port.side.operations_of(stage.name, fed)[0])


def _operation(
    together_: Correspondence, original: SideRuns, port: SideRuns, stage: Stage
) -> Unknown | None:
    """Return the first operation of a stage that the original does not perform.

    None if there is no such operation, or a side cannot list its operations, such as a capture, or
    a torch module as the port.
    """
    ours, theirs = port.side, original.side
    if not isinstance(ours, TellsOperations) or not isinstance(theirs, TellsResults):
        return None
    fed = replaceable(original.best, together_, original, port)
    with exits_named(port.name):
        operations, values = ours.operations_of(stage.name, fed)
    if not operations:
        return None
    # Wide enough for the effect of float32 tables, and well below the error to be explained.
    same = min(ROOM * stage.tolerance, stage.forced / ROOM)
    with exits_named(original.name):
        # The port may transpose or slice a parameter that the original uses unchanged.
        results = [*theirs.operation_results(), *original.side.parameters().values()]
    return first_unknown(operations, values, results, same)


def _in_float64(
    together_: Correspondence, original: SideRuns, port: SideRuns, constants: Mapping[str, float]
) -> Place:
    theirs = together_.stages(original.best.stages)
    fed = replaceable(original.best, together_, original, port)
    forced = port.run(Run(Precision.FLOAT64, forced=fed)).stages
    known = {name: forced[name] for name in theirs}
    # Tables that stay float32 in a float64 run are no difference in mathematics, so their effect
    # is part of the floor.
    tables, operations = (
        floors_of(known, lambda seed, kind=kind: port.moved(kind, seed, fed).stages)
        for kind in (Rounding.CONSTANTS, Rounding.OPERATIONS)
    )
    edge = PortEdge.PORT64_ORIGINAL64
    sides = port.best.stages, forced, theirs, theirs
    floors = together(tables, narrowed(operations))
    place = _place(edge, *sides, floors)
    if place.culprit is None:
        return place
    # The original's tables can only widen the tolerances, at the cost of five runs.
    own = _own_tables(together_, original, fed, constants)
    return _place(edge, *sides, together(floors, own))


def _own_tables(
    together_: Correspondence,
    original: SideRuns,
    fed: Mapping[str, np.ndarray],
    constants: Mapping[str, float],
) -> Mapping[str, float]:
    """Return the noise floors due to the original's float32 tables (constant arrays), by the port's
    names, with each stage of the original computed from unperturbed values of earlier stages.

    The rounding of a table used in an earlier stage is already in the stage value that both sides
    are fed, so it explains no error of a stage computed from that value. A stage that is a table
    itself, such as the sines of a rotary embedding, is not fed (`_depending`): the port may compute
    the table anew in each layer.

    Args:
        together_: the pairs of stages and parameters.
        original: runs of the original.
        fed: the stages that are fed to the port, by the port's names.
        constants: noise floors without replaced stages, returned if the original cannot run with
            replaced stages.
    """
    if not any(constants.values()):
        return constants
    assert original.wide is not None
    names = {pair.original for pair in together_.alignment.pairs if pair.port in fed}
    try:
        moving = _depending(original, together_.matching.pairs)
        own = {name: original.wide.whole[name] for name in names & moving}
        return floors_of(
            together_.stages(original.wide.stages),
            lambda seed: together_.stages(original.moved(Rounding.CONSTANTS, seed, own).stages),
        )
    except SideError:
        return constants


def _depending(original: SideRuns, pairs: Iterable[Pair]) -> set[str]:
    """Return the names of the original's stages that depend both on parameters that the port also
    holds and on the inputs.

    The other stages are tables, even those scaled by a parameter or indexed by an input.

    Raises:
        SideError: the original cannot run with other parameters or inputs.
    """
    side = original.side
    if not isinstance(side, TakesExactParameters) or not isinstance(side, TakesInputs):
        raise SideError(
            f"the original ({side.kind}) cannot run with other parameters and inputs; to find its "
            "precomputed tables, such as rotary angles, give the live program as its side"
        )
    random, values = np.random.default_rng(0), side.parameters()
    names = dict.fromkeys(name for pair in pairs for name in pair.originals)

    def moved(x: np.ndarray) -> np.ndarray:
        """Change floating-point numbers a little, zeros too; reverse the order of integers along
        the last axis, so that they stay valid indices."""
        if x.dtype.kind in "iu":
            return np.flip(x, -1) if x.ndim else x
        if x.dtype.kind == "b":
            return x
        return (x + CHANGE * random.uniform(-1.0, 1.0, x.shape)).astype(x.dtype)

    others = {name: moved(np.asarray(values[name], np.float64)) for name in names}
    assert original.wide is not None
    before = original.wide.whole
    found = {*before}
    for other in (side.with_exact(others), side.with_inputs(moved)):
        after = original.run(Run(Precision.FLOAT64), other).whole
        # NaN stays NaN in a table, such as a mask that divides zero by zero.
        found &= {
            n
            for n, x in after.items()
            if n in before and not np.array_equal(x, before[n], equal_nan=True)
        }
    return found


def _against_float32(port: SideRuns, fed: _Fed) -> Place:
    """Compare the port's float64 stages, each computed from the original's values, with the stages
    of an original that has no float64 run.

    A single stage rounds little, so this finds errors that accumulated rounding would hide.
    """
    edge = PortEdge.ORIGINAL32_PORT64
    return _place(edge, port.best.stages, fed.exact, fed.theirs, fed.theirs, fed.floors)


def _in_float32(port: SideRuns, fed: _Fed) -> Place:
    """Compare the port's float32 stages with its float64 stages, all computed from the original's
    float32 values."""
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
    """The port's float64 stages, each computed from the original's float32 values."""

    theirs: dict[str, np.ndarray]
    """The original's stages in float32."""
    replaced: dict[str, np.ndarray]
    """The stages of `theirs` that replaced the port's own."""
    exact: dict[str, np.ndarray]
    """The port's stages in float64, computed from the original's values."""
    floors: Floors
    """Noise floor of each stage, without rounding in earlier stages."""

    @classmethod
    def of(cls, together_: Correspondence, original: SideRuns, port: SideRuns) -> _Fed:
        """Run the port on the original's values, once exactly and then perturbed by rounding."""
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
    return replace(place, worst=worst_elements(*sides, SHOWN), where=where(wrong))


def replaceable(
    trace: Trace, together_: Correspondence, original: SideRuns, port: SideRuns
) -> dict[str, np.ndarray]:
    """Return the stages of a run of the original (`trace`) that can replace the port's, by the
    port's names.

    The port's outputs and stages with masks are left out. Padding is kept, since a filter along the
    sequence may carry it into valid positions.
    """
    kept = {*port.best.outputs} | {
        pair.port
        for pair in together_.alignment.pairs
        if pair.port in port.masked or pair.original in original.masked
    }
    return {name: x for name, x in together_.stages(trace.whole).items() if name not in kept}
