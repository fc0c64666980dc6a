"""Single steps of a port comparison, on arrays and runs that are written down."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np
import pytest

from parity.engine.measure.bounds import rule
from parity.engine.measure.compare import Comparison, Work
from parity.engine.measure.localize import Stage
from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.engine.measure.quantity import stage_kind
from parity.engine.measure.rounding_noise import UNIT_ROUNDOFF
from parity.engine.pairing.alignment import AlignedBy, Alignment
from parity.engine.pairing.constructions import Construction, Piece, copied, cut, whole
from parity.engine.pairing.layouts import identity
from parity.engine.pairing.parameter_pairs import Matching, Means, Pair, Unmatched
from parity.engine.pairing.stage_pairs import Pair as StagePair
from parity.engine.programs.operations import Unknown
from parity.engine.programs.source_lines import LINES
from parity.port import conversion, localisation
from parity.port.compare import (
    Port,
    PortError,
    _all_hold,
    _Both,
    _completed,
    _hidden_by_tables,
    _not_in_low_precision,
    _with_hidden,
    _with_scale,
    _would_hold,
    check_two_sides,
    floating,
)
from parity.port.consequences import has_effect, notice_of
from parity.port.conversion import TRIED, untransposed
from parity.port.correspondence import Correspondence
from parity.port.hidden import Hidden, Squares, hidden
from parity.port.ledger import NO_OUTPUT
from parity.port.localisation import ROOM, Place, _depending, _place, localise, replaceable
from parity.port.narrow import compare_narrow
from parity.port.report import EXCHANGED, Report
from parity.port.rounding_floors import Noise, PortBounds, norms_of, stage_bound
from parity.port.same_numbers import exact_sums, folded, without_shared_tables
from parity.port.side_runs import MASK, SideRuns, _roundoff
from parity.port_tolerances import NARROWING, PORTS, STUDENT, PortEdge
from parity.sides.captured import CapturedSide
from parity.sides.side import Precision, Rounding, Run, SideError, Trace
from tests.helpers import double
from tests.parity.port.test_scripted_sides import FOUR, Scripted, noise, same, trace
from tests.reports.nights import measurement

E = PortEdge
WIDE = E.PORT64_ORIGINAL64
WORK = Work("port", "hash", ("stage",))


def tabled() -> PortBounds:
    """Bounds of a stage whose float64 tolerance is as wide as it is because of float32 tables."""
    response = {"stage": UNIT_ROUNDOFF}
    side = Noise({"stage": 1.0}, dict.fromkeys(Rounding, response))
    return PortBounds.of(side, side)


BOUNDS = tabled()
LOOSE = BOUNDS.bound(WIDE, Kind.BLOCK, WORK, "stage")
PLAIN = BOUNDS.without_tables(Kind.BLOCK, "stage")
"""The tolerance of that stage in float64, with tables and without."""


@pytest.mark.parametrize(
    ("free", "forced", "tolerance", "fails"),
    [
        (8.0, 8.0, 4.0, True),
        # The free error may be that of the stage: no smaller, up to the room.
        (8.0, 8.0 * ROOM, 4.0, True),
        (8.0, 8.1 * ROOM, 4.0, False),
        # Both tolerances are broken, by the error of the stage and by the free error.
        (8.0, 2.0, 4.0, False),
        (8.0, 0.5, 0.25, False),
        (2.0, 5.0, 4.0, False),
        (0.5, 1.5, 0.25, False),
    ],
)
def test_a_gate_that_tables_let_pass_fails_where_its_stage_is_wrong_by_itself(
    free: float, forced: float, tolerance: float, fails: bool
):
    """Errors and the tolerance of the stage, over the tolerance without tables."""
    assert PLAIN < LOOSE / 2**10
    stage = Stage("stage", free * PLAIN, forced * PLAIN, tolerance * PLAIN)
    gate = Comparison(WORK, WIDE, BOUNDS, "float64", kinds=stage_kind)
    row = gate.gate("stage", "rel_l2", free * PLAIN, LOOSE)
    assert row.verdict is Verdict.PASS
    found = _hidden_by_tables(row, Place(WIDE, (stage,)), BOUNDS)
    if not fails:
        assert found is row
        return
    assert found.verdict is Verdict.FAIL
    # As many tolerances of the gate as the stage is off in its own.
    assert found.value == pytest.approx(forced / tolerance * LOOSE)
    assert found.note == (
        f"fed the original's values it differs by {stage.forced:.1e} of {stage.tolerance:.1e}; "
        "in the free run, float32 tables widen the tolerance and hide this"
    )
    # Other rows, other places, and a tolerance that no table widened.
    for other in (
        replace(row, edge=E.PORT32_ORIGINAL32),
        replace(row, metric="max_abs"),
        replace(row, verdict=Verdict.INFO),
        replace(row, quantity="elsewhere"),
        replace(row, tolerance=PLAIN),
    ):
        assert _hidden_by_tables(other, Place(WIDE, (stage,)), BOUNDS) is other
    assert _hidden_by_tables(row, Place(E.PORT32_PORT64, (stage,)), BOUNDS) is row


def test_the_tolerance_without_tables_is_of_the_operations_of_both_sides_in_float64():
    both = PortBounds.of(noise("original"), noise("port"))
    floor = math.hypot(3.0, 5.0) * NARROWING / 2.0
    assert both.without_tables(Kind.BLOCK, "stage") == pytest.approx(
        stage_bound(WIDE, Kind.BLOCK, floor)
    )
    assert math.isnan(both.without_tables(Kind.BLOCK, "other"))
    # A side that cannot be perturbed leaves the other's.
    one = PortBounds.of(Noise(), noise("port"))
    floor = 5.0 * NARROWING / 4.0
    assert one.without_tables(Kind.BLOCK, "stage") == pytest.approx(
        stage_bound(WIDE, Kind.BLOCK, floor)
    )


HELD = [edge for edge in PortEdge if rule(PORTS, edge, Kind.GRADIENT) is not None]
ERRORS = {
    "below the bound": ([0.0, 0.5, 0.0, 0.0], 0.0),
    "below that": ([0.0, 0.0, 0.0, 2.0**-10], 0.0),
    "that noise explains": ([0.0, 0.5, 0.0, 0.0], 1.0),
}
"""Errors of a large element, an ordinary one, 1 and 0, and the noise floor of each."""


@pytest.mark.parametrize("kind", [Kind.BLOCK, Kind.GRADIENT])
@pytest.mark.parametrize("edge", HELD)
@pytest.mark.parametrize("name", ERRORS)
def test_hidden_elements_are_held_to_the_rule_of_their_edge(name: str, edge: PortEdge, kind: Kind):
    row = rule(PORTS, edge, kind)
    assert row is not None
    # The rules of float64 have the room of one float32 side.
    factor = row.noise_factor or {Kind.BLOCK: 6.0, Kind.GRADIENT: 8.0}[kind]
    error, noises = ERRORS[name]
    expected, scale, floor = np.array([1e20, 1e3, 1.0, 0.0]), 3e20, 2.0**-20
    actual = expected + np.array(error)
    side = Noise(squares={each: {"x": np.full(4, noises)} for each in Rounding})
    bounds = PortBounds({edge: {"x": floor}}, {edge: {"x": scale}}, {}, side, side)
    squares = bounds._squares(edge, "x")
    assert squares is not None
    model = hidden(
        actual,
        expected,
        stage_bound(edge, kind, floor) * scale,
        absolute=row.absolute,
        factor=factor,
        mean_squares=squares,
        float64=edge is WIDE,
    )
    assert model is not None and bounds.hidden(edge, kind, "x", actual, expected) == model
    assert (model.fraction > 1.0) is not bool(noises)
    # What is not finite on either side is judged as a whole.
    for bad in (np.nan, np.inf):
        spoilt = np.where(np.arange(4) == 3, bad, expected)
        assert bounds.hidden(edge, kind, "x", spoilt, expected) is None
        assert bounds.hidden(edge, kind, "x", actual, spoilt) is None
    for other in (np.s_[:3], np.s_[:, None]):
        assert bounds.hidden(edge, kind, "x", actual[other], expected[other]) is None
    assert bounds.hidden(edge, kind, "unknown", actual, expected) is None
    # Nothing but rounding hides nothing.
    rounding = replace(bounds, cancelled={edge: frozenset({"x"})})
    assert rounding.hidden(edge, kind, "x", actual, expected) is None


def refusing(*moved: Rounding) -> Callable[[Run], Trace]:
    """Answer with one stage; of what is moved, these kinds cannot be asked for."""

    def answer(how: Run) -> Trace:
        if how.rounding in moved:
            raise SideError("cannot be perturbed")
        return trace(out=FOUR if how.rounding is None else FOUR + np.array([0.0, 0.5]))

    return answer


def test_an_original_that_cannot_be_perturbed_has_its_own_norm_and_the_port_s_noise():
    """Of each kind that it refuses, and of each element too; a port has no other's noise."""
    original = SideRuns(Scripted(refusing(Rounding.OPERATIONS)), None)
    port = SideRuns(Scripted(refusing()), None)
    both = _Both(same("out"), original, port)
    found = _completed({side: both._noise(side) for side in ("original", "port")})
    assert found["original"].norms == norms_of({"out": FOUR})
    for kind in Rounding:
        assert found["original"].responses[kind] == {"out": 0.5}
        assert found["original"].squares[kind]["out"].tolist() == [0.0, 0.25]
    turned = _Both(same("out"), port, original)
    other = _completed({side: turned._noise(side) for side in ("original", "port")})
    assert set(other["port"].responses) == set(other["port"].squares) == {Rounding.CONSTANTS}
    assert set(other["original"].responses) == {*Rounding}


def test_whole_numbers_of_any_width_are_no_parameters():
    """`dtype.kind` is the same for int4 and bfloat16, which both come from ml_dtypes."""
    whole_numbers = (np.int32, np.uint8, np.bool_, ml_dtypes.int4, ml_dtypes.uint4)
    numbers = (np.float32, np.float64, np.complex64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)
    arrays = {np.dtype(d).name: np.ones(2, d) for d in (*whole_numbers, *numbers)}
    assert list(floating(arrays)) == [np.dtype(d).name for d in numbers]


def verdict(*verdicts: Verdict) -> list[Measurement]:
    return [measurement(verdict=each) for each in verdicts]


def test_all_gates_hold_if_each_was_measured_and_there_is_one():
    assert _all_hold(verdict(Verdict.PASS, Verdict.INFO, Verdict.PASS))
    for bad in (Verdict.FAIL, Verdict.NOT_COMPARABLE):
        assert not _all_hold(verdict(Verdict.PASS, bad))
    assert not _all_hold(verdict(Verdict.INFO)) and not _all_hold([])


def test_a_gate_of_what_cancels_says_what_its_error_is_relative_to():
    bounds = PortBounds({}, {}, {WIDE: frozenset({"zero"})})
    comparison = Comparison(WORK, WIDE, bounds, "float64", kinds=stage_kind)
    told = "0 up to rounding: the error is relative to the terms that cancel"
    row = measurement(edge=WIDE, quantity="zero")
    assert _with_scale(row, comparison) == replace(row, note=told)
    for other in (
        replace(row, quantity="one"),
        replace(row, metric="max_abs"),
        replace(row, note="missing in port64"),
    ):
        assert _with_scale(other, comparison) is other


@dataclass
class Low(Scripted):
    """A side that computes in a low precision on purpose."""

    autocast: str = "bfloat16"
    used: tuple[str, ...] = ("float32", "bfloat16")


def test_a_result_in_low_precision_is_compared_by_its_error_in_that_precision():
    """That its best tokens agree, or its float64 run, says nothing of that error."""
    comparison = Comparison(WORK, E.PORT32_ORIGINAL32, BOUNDS, "float32", kinds=stage_kind)
    gate = measurement(edge=E.PORT32_PORT64, quantity="out", metric="rel_l2")

    def missing(side: Scripted, *rows: Measurement) -> list[str]:
        found = _not_in_low_precision(side, rows, ("out",), comparison)
        assert all(row.verdict is Verdict.NOT_COMPARABLE for row in found)
        return [row.quantity for row in found]

    for edge in (E.PORT32_PORT64, E.PORT32_ORIGINAL32):
        for verdict in (Verdict.PASS, Verdict.FAIL):
            assert missing(Low(refusing()), replace(gate, edge=edge, verdict=verdict)) == []
    for other in (
        replace(gate, metric="top1_flips"),
        replace(gate, edge=WIDE),
        replace(gate, verdict=Verdict.INFO),
        replace(gate, verdict=Verdict.NOT_COMPARABLE),
        replace(gate, quantity="inner"),
    ):
        assert missing(Low(refusing()), other) == ["out"]
        assert missing(Scripted(refusing()), other) == []
    assert missing(Low(refusing())) == ["out"]


def test_two_sides_may_share_a_module_that_holds_no_parameters():
    """One of Flax is a description; one of torch is the program with its parameters."""

    def side(kind: str, module: object) -> Scripted:
        made = Scripted(refusing(), kind)
        made.module = module  # pyright: ignore[reportAttributeAccessIssue]
        return made

    one = object()
    check_two_sides(Port("flax", side("flax", one), side("flax", one)))
    check_two_sides(Port("torch", side("torch", one), side("torch", object())))
    check_two_sides(Port("of both", side("torch", one), side("flax", one)))
    with pytest.raises(PortError, match="both sides are one object"):
        check_two_sides(Port("torch", side("torch", one), side("torch", one)))


@dataclass
class Holding(Scripted):
    """A side with one parameter."""

    w: np.ndarray = field(default_factory=lambda: np.arange(6.0, dtype=np.float32))

    def parameters(self) -> dict[str, np.ndarray]:
        return {"w": self.w}


def test_a_port_that_cannot_be_compared_with_other_parameters_would_not_hold():
    def answer(how: Run) -> Trace:
        move = 0.0 if how.rounding is None else UNIT_ROUNDOFF
        dtype = np.float32 if how.precision is Precision.FLOAT32 else np.float64
        return Trace({"out": (FOUR * (1 + move)).astype(dtype)}, ("out",))

    original = Holding(answer)
    port = Port("hold", original, Holding(answer), gradients=False, bfloat16=False)
    assert _would_hold(port, Holding(answer))
    # It shares no parameter, it stops, and it ends the program.
    assert not _would_hold(port, Holding(answer, w=np.array([0.3, 0.1, 0.7], np.float32)))

    def stops(how: Run) -> Trace:
        raise SideError("stops")

    assert not _would_hold(port, Holding(stops))
    assert not _would_hold(port, Holding(lambda how: sys.exit(3)))


def test_a_comparison_with_other_parameters_is_made_once_and_in_full(monkeypatch):
    """It measures no floor again, and it looks for no exchange."""
    asked: list[tuple[object, bool]] = []

    def compared(port: Port, *, again: bool):
        asked.append((port.port, again))
        return double(Report, holds=len(asked) == 1)

    monkeypatch.setattr(sys.modules[Port.__module__], "_compare", compared)
    original, other = Holding(refusing()), Holding(refusing())
    port = Port("hold", original, Holding(refusing()))
    assert _would_hold(port, other) and not _would_hold(port, other)
    assert asked == [(other, False)] * 2


def reordered(port: str, *originals: str) -> Pair:
    """Return a pair whose parameter is a sum of originals in another order."""
    one = whole((2, 2))
    pieces = tuple(Piece(name, one, identity((2, 2)), one) for name in originals)
    return Pair(port, Construction((2, 2), pieces), Means.REORDERED)


def test_an_order_is_shown_by_derivatives_that_use_every_row_and_column_of_each_original():
    full = np.ones((2, 2))
    gradients = {
        "full": full,
        "row": np.array([[1.0, 1.0], [0.0, 0.0]]),
        "column": np.array([[1.0, 0.0], [1.0, 0.0]]),
        # Each row and column has one element that counts.
        "diagonal": np.eye(2),
    }
    cases = {
        ("full",): True,
        ("diagonal",): True,
        ("row",): False,
        ("column",): False,
        ("unknown",): False,
        ("full", "diagonal"): True,
        ("full", "row"): False,
        ("column", "full"): False,
        ("unknown", "full"): False,
    }
    pairs = tuple(reordered("+".join(names), *names) for names in cases)
    placed = Pair("w", copied("full", (2, 2)), Means.VALUE)
    side = Scripted(lambda how: replace(trace(out=[1.0]), gradients=gradients))
    runs = SideRuns(side, None)
    both = _Both(Correspondence(Alignment((), {}, {}), Matching((*pairs, placed))), runs, runs)
    shown = {"+".join(names) for names, expected in cases.items() if expected}
    assert both.shown_by_derivatives() == shown


def close(*errors: float, pairs: tuple[Pair, ...] = (), alone: tuple[Unmatched, ...] = ()) -> bool:
    """Return whether more seeds might let gates pass whose errors are these, in tolerances."""
    runs = SideRuns(Scripted(refusing()), None)
    known = Matching(pairs, unmatched_port=alone)
    both = _Both(Correspondence(Alignment((), {}, {}), known), runs, runs)
    noises = {side: noise(side) for side in ("original", "port")}
    bounds, edge = PortBounds.of(*noises.values()), E.PORT32_PORT64
    tolerance = bounds.bound(edge, Kind.BLOCK, WORK, "stage")
    gate = measurement(edge=edge, kind=Kind.BLOCK, quantity="stage", tolerance=tolerance)
    rows = [
        replace(gate, value=x * tolerance, verdict=Verdict.FAIL if x > 1 else Verdict.PASS)
        for x in errors
    ]
    return both._is_close(rows, noises, WORK)


def test_more_seeds_are_asked_for_where_each_gate_that_fails_is_near_its_tolerance():
    near, far = STUDENT * (1 - 2.0**-10), STUDENT * (1 + 2.0**-10)
    assert close(0.5, near, near)
    for errors in ((), (0.5,), (far,), (near, far), (far, near)):
        assert not close(*errors)


def test_more_seeds_are_not_asked_for_where_a_parameter_is_wrong():
    """A parameter in another order may be right."""
    held = {means: Pair(means, copied("w", (2, 2)), means) for means in Means}
    for means in (Means.VALUE, Means.ROUNDED, Means.NAME, Means.REORDERED):
        assert close(2.0, pairs=(held[means],))
    for means in (Means.SLICE, Means.NEAR):
        assert not close(2.0, pairs=(held[Means.VALUE], held[means]))
    assert not close(2.0, pairs=(held[Means.VALUE],), alone=(Unmatched("w", (2, 2)),))


def test_a_parameter_that_the_port_holds_more_often_than_the_original_is_told():
    """Tied on both sides alike it is trained alike."""
    runs = SideRuns(Scripted(refusing()), None)

    def told(*pairs: Pair) -> list[str]:
        names = Correspondence(Alignment((), {}, {}), Matching(pairs))
        return _Both(names, runs, runs).alone()

    def held(port: str, *also: str) -> Pair:
        return Pair(port, copied("table", (2,)), Means.VALUE, also=also)

    assert told(held("table"), held("head", "lm_head")) == []
    assert told(held("table", "lm_head")) == []
    [notice] = told(held("table"), held("head"))
    assert notice == (
        "the original's table is 2 parameters of the port, table, head: they are equal now and "
        "would be trained apart"
    )


def test_results_and_derivatives_are_searched_for_constants_and_stages_are_not():
    """By the port's names, whole numbers included."""
    full = replace(
        trace(inner=[1.0, 1.0], out=FOUR),
        exact={"ids": np.arange(2)},
        gradients={"w": np.array([2.0, 3.0])},
    )
    theirs = replace(full, exact={"tokens": np.arange(2)})
    original = SideRuns(Scripted(lambda how: theirs), None)
    port = SideRuns(Scripted(lambda how: full), None)
    matching = Matching((Pair("w", copied("w", (2,)), Means.VALUE),))
    both = _Both(replace(same("inner", "out"), matching=matching), original, port)
    for side in both.compared():
        assert {str(name): x.tolist() for name, x in side.items()} == {
            "out": [3.0, 4.0],
            "ids": [0, 1],
            "grad/w": [2.0, 3.0],
        }


def test_a_result_without_a_partner_keeps_a_stage_of_its_name():
    """The original's result is called as a stage of the port that another one is paired with."""
    lies = identity((2,))
    pairs = (
        StagePair("x", "inner", lies, AlignedBy.NAME, 0.0),
        StagePair("y", "y", lies, AlignedBy.NAME, 0.0),
    )
    original = SideRuns(Scripted(lambda how: trace(("x", "y"), inner=FOUR, x=-FOUR, y=FOUR)), None)
    port = SideRuns(Scripted(lambda how: trace(("y", "own"), x=FOUR, y=FOUR, own=FOUR)), None)
    both = _Both(Correspondence(Alignment(pairs, {}, {}), Matching(())), original, port)
    ours, theirs = both.arrays(WIDE)
    assert {name: x.tolist() for name, x in theirs.items()} == {
        "x": [3.0, 4.0],
        "y": [3.0, 4.0],
        "x of the original": [-3.0, -4.0],
    }
    assert set(ours) == {"x", "y", "own"}


@pytest.mark.parametrize("masked_outputs", [False, True])
@pytest.mark.parametrize("edge", [WIDE, E.PORT32_ORIGINAL32, E.ORIGINAL32_ORIGINAL64])
def test_an_infinity_of_both_sides_counts_as_a_mask_where_there_may_be_one(edge, masked_outputs):
    """In stages that float64 has it in too, in results if the case says so, in no derivative."""
    x = np.array([np.inf, 1.0])

    def answer(how: Run) -> Trace:
        grown = x if how.precision is Precision.FLOAT32 else np.ones(2)
        return replace(trace(inner=x, grown=grown, out=x), gradients={"w": x})

    original, port = (
        SideRuns(Scripted(answer), None, masked_outputs=masked_outputs) for _ in range(2)
    )
    matching = Matching((Pair("w", copied("w", (2,)), Means.VALUE),))
    both = _Both(replace(same("inner", "grown", "out"), matching=matching), original, port)
    for side in both.arrays(edge):
        masked = {str(name) for name, values in side.items() if values[0] == 0.0}
        assert masked == {"inner", *(["out"] if masked_outputs else [])}
        assert np.isinf(side["grad/w"][0])


@pytest.mark.parametrize(
    ("original64", "port64", "masked"),
    [
        (np.inf, np.inf, True),
        # The port's float64 says what it means where both have one.
        (1.0, np.inf, True),
        (np.inf, 1.0, False),
        (None, np.inf, True),
        (None, 1.0, False),
        (np.inf, None, True),
        (1.0, None, False),
        (None, None, False),
    ],
)
def test_an_infinity_of_both_float32_runs_is_a_mask_where_a_float64_run_has_it(
    original64: float | None, port64: float | None, masked: bool
):
    def side(wide: float | None) -> SideRuns:
        def answer(how: Run) -> Trace:
            if how.precision is Precision.FLOAT64 and wide is None:
                raise SideError("no float64")
            first = wide if how.precision is Precision.FLOAT64 else np.inf
            return trace(inner=[first, 1.0], out=FOUR)

        return SideRuns(Scripted(answer), None)

    both = _Both(same("inner", "out"), side(original64), side(port64))
    for values in both.arrays(E.PORT32_ORIGINAL32):
        assert (values["inner"][0] == 0.0) == masked


def test_a_stage_of_the_port_that_differs_keeps_its_name():
    """A stage of the original may have that name, and another partner."""
    runs = SideRuns(Scripted(lambda how: trace(a=FOUR, b=FOUR, out=FOUR)), None)
    pairs = (StagePair("b", "a", identity((2,)), AlignedBy.VALUE, 0.0),)
    names = Correspondence(Alignment(pairs, {}, {}), Matching(()))
    identities: list[str] = []
    for whose, quantity, work in (("original", "b", "one"), ("port", "a", "one"),
                                  ("port", "a", "two")):  # fmt: skip
        both = _Both(names, copy.copy(runs), copy.copy(runs))
        both.runs(whose).unrepeatable = "a"
        found = both.unstable(Port("p", runs.side, Scripted(refusing()), device="cpu", work=work))
        assert found is not None
        [row] = found.measurements
        assert row.quantity == quantity
        identities.append(row.identity)
    assert identities[1] != identities[2], "rows of other work are no history of one another"


def test_derivatives_are_along_one_direction_of_the_valid_results_or_of_the_loss():
    """By each side's own names."""
    pairs = (
        StagePair("out", "result", identity((1, 4)), AlignedBy.NAME, 0.0),
        StagePair("loss", "total", identity(()), AlignedBy.NAME, 0.0),
    )
    names = Correspondence(Alignment(pairs, {}, {}), Matching(()))

    def asked(**how: object) -> list[Mapping[str, np.ndarray]]:
        row = np.ones((1, 4))
        theirs = Scripted(lambda _: trace(("result", "total"), result=row, total=2.0))
        ours = Scripted(lambda _: trace(("out", "loss", "own"), out=row, loss=2.0, own=3.0))
        both = _Both(names, SideRuns(theirs, None), SideRuns(ours, None))
        both.differentiate(Port("p", theirs, ours, **how))  # pyright: ignore[reportArgumentType]
        cotangents = [side.asked[-1].cotangents for side in (theirs, ours)]
        assert all(each is not None for each in cotangents)
        return cotangents  # pyright: ignore[reportReturnType]

    theirs, ours = asked(loss="loss")
    assert {name: x.tolist() for name, x in ours.items()} == {"loss": 1.0}
    assert {name: x.tolist() for name, x in theirs.items()} == {"total": 1.0}
    theirs, ours = asked(valid=np.array([[True, False, True, False]]))
    # A result without a partner has no direction.
    assert set(ours) == {"out", "loss"} and set(theirs) == {"result", "total"}
    assert (ours["out"] != 0).tolist() == [[True, False, True, False]]
    assert ours["loss"] != 0
    assert np.array_equal(ours["out"], theirs["result"]) and ours["loss"] == theirs["total"]
    assert np.all(asked()[1]["out"] != 0)
    with pytest.raises(PortError, match="got 'own'"):
        asked(loss="own")


def test_the_first_lines_of_a_place_are_shown():
    masks = tuple(f"port.py:{n} (f)" for n in range(LINES + 2))
    place = Place(WIDE, (), operation=Unknown(("port.py:99 (g)",), masks))
    assert tuple(line.place for line in place.lines) == masks[:LINES]


def test_a_sum_was_rounded_to_the_dtype_of_its_parameter_and_at_most_to_float32():
    found = {d: _roundoff(np.ones(2, d)) for d in (np.float64, np.float32, ml_dtypes.bfloat16)}
    assert list(found.values()) == [2.0**-24, 2.0**-24, 2.0**-8]


def test_masks_are_not_said_to_be_declared_where_they_are():
    x = np.array([np.inf, 1.0])
    for masked in (False, True):
        runs = SideRuns(Scripted(lambda how: trace(out=x)), None, masked_outputs=masked)
        row = measurement(quantity="out", value=math.nan, verdict=Verdict.FAIL, note="why")
        note = _Both(same("out"), runs, runs)._explained(row).note
        assert ("masked_outputs" in note) is not masked and (note == "why") is masked


def test_a_float32_difference_is_searched_for_the_operation_that_computes_in_less(monkeypatch):
    """Of the first wrong stage of the port, with the original's values fed to it."""

    @dataclass
    class Telling(Scripted):
        told: list[tuple[str, set[str]]] = field(default_factory=list)

        def operations_of(
            self, stage: str, forced: Mapping[str, np.ndarray]
        ) -> tuple[dict[int, str], dict[int, np.ndarray]]:
            self.told.append((stage, {*forced}))
            return {0: "operations"}, {0: FOUR}

    def answer(wrong: float) -> Callable[[Run], Trace]:
        def answered(how: Run) -> Trace:
            off = wrong if how.precision is Precision.FLOAT32 else 0.0
            return trace(a=FOUR, b=FOUR * (1 + off), out=FOUR)

        return answered

    monkeypatch.setattr(localisation, "first_narrow", lambda found: Unknown((found[0],)))
    original = SideRuns(Scripted(answer(0.0)), None)
    side = Telling(answer(0.5))
    place = localise(same("a", "b", "out"), original, SideRuns(side, None), {})
    assert place.edge is E.PORT32_PORT64 and place.operation == Unknown(("operations",))
    assert side.told == [("b", {"a", "b"})]
    # A side that lists none is no error.
    silent = SideRuns(Scripted(answer(0.5)), None)
    assert localise(same("a", "b", "out"), original, silent, {}).operation is None


def test_a_stage_of_which_a_port_lists_no_operation_names_none():
    @dataclass
    class Idle(Scripted):
        def operations_of(
            self, stage: str, forced: Mapping[str, np.ndarray]
        ) -> tuple[dict[int, str], dict[int, np.ndarray]]:
            return {}, {}

        def operation_results(self) -> list[np.ndarray]:
            return [FOUR]

    def answer(wrong: float) -> Callable[[Run], Trace]:
        return lambda how: trace(a=FOUR, b=FOUR * (1 + wrong), out=FOUR)

    original, port = (SideRuns(Idle(answer(wrong)), None) for wrong in (0.0, 0.5))
    names = ("a", "b", "out")
    place = localise(same(*names), original, port, dict.fromkeys(names, 0.0))
    assert place.culprit is not None and place.culprit.name == "b" and place.operation is None


def test_elements_of_a_place_are_those_of_the_stage_fed_the_right_values():
    """In the free run other elements are wrong, which earlier stages explain."""
    truth = {"a": FOUR, "b": np.array([1.0, 2.0, 0.0, 4.0])}
    theirs = {"a": FOUR, "b": np.array([1.0, 2.0, 0.0, 5.0])}
    forced = {"a": FOUR, "b": np.array([1.0, 3.0, 0.0, 4.25])}
    free = {"a": FOUR, "b": np.array([7.0, 2.0, 0.0, 5.0]), "own": FOUR}
    floors = dict.fromkeys(truth, 0.25 / 6.0)
    place = _place(E.PORT32_PORT64, free, forced, truth, theirs, floors)
    right, wrong = place.stages
    assert (right.name, right.free, right.forced) == ("a", 0.0, 0.0)
    assert wrong.free == pytest.approx(6.0 / math.sqrt(30.0)), "against the original"
    assert wrong.forced == pytest.approx(math.hypot(1.0, 0.25) / math.sqrt(21.0))
    # The sum of squares that is left is within the tolerance.
    assert wrong.tolerance == pytest.approx(0.25) and place.culprit is None
    place = _place(E.PORT32_PORT64, free, forced, truth, theirs, dict.fromkeys(truth, 0.1 / 6.0))
    assert place.culprit is not None and place.culprit.name == "b"
    assert [(w.index, w.actual, w.expected) for w in place.worst] == [
        ((1,), 3.0, 2.0),
        ((3,), 4.25, 4.0),
    ]
    assert "1" in place.where and "3" not in place.where


def test_masks_of_both_sides_are_none_of_the_wrong_elements():
    """More of them than are shown would leave no room for the wrong one."""
    masked = np.full(12, -np.inf)
    truth, forced = (np.array([1.0, x, *masked]) for x in (2.0, 5.0))
    place = _place(WIDE, {"s": forced}, {"s": forced}, {"s": truth}, {"s": truth}, {"s": 2.0**-50})
    assert [(w.index, w.actual, w.expected) for w in place.worst] == [((1,), 5.0, 2.0)]
    # Nor do they make an error NaN, in the port's own run or fed the right values.
    [stage] = place.stages
    assert stage.free == stage.forced == pytest.approx(3.0 / math.hypot(1.0, 2.0))
    # An infinity of one side alone is a wrong element.
    forced[2] = 0.0
    place = _place(WIDE, {"s": forced}, {"s": forced}, {"s": truth}, {"s": truth}, {"s": 2.0**-50})
    assert {w.index for w in place.worst} == {(1,), (2,)}


def test_stages_of_a_place_come_in_the_order_of_the_port():
    ours = dict.fromkeys(("b", "a", "alone"), FOUR)
    theirs = dict.fromkeys(("a", "b", "other"), FOUR)
    found = _place(WIDE, ours, ours, theirs, theirs, {"a": 0.0, "b": 0.0})
    assert [stage.name for stage in found.stages] == ["b", "a"]


@dataclass
class Changing(Scripted):
    """A side that runs with other parameters and inputs, which it hands to its answer."""

    given: dict[str, np.ndarray] = field(default_factory=dict)
    held: dict[str, np.ndarray] = field(default_factory=dict)

    def parameters(self) -> dict[str, np.ndarray]:
        return self.held

    def inputs(self) -> dict[str, np.ndarray]:
        return self.given

    def run(self, how: Run = Run()) -> Trace:  # noqa: B008
        self.asked.append(how)
        return self.answer({**self.held, **self.given})  # pyright: ignore[reportArgumentType]

    def with_exact(self, values: Mapping[str, np.ndarray]) -> Changing:
        return replace(self, held={**self.held, **values})

    def with_inputs(self, change: Callable[[np.ndarray], np.ndarray]) -> Changing:
        return replace(self, given={name: change(x) for name, x in self.given.items()})


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float32])
def test_a_stage_that_uses_no_shared_parameter_or_no_input_is_a_table(dtype: type):
    """A scalar and a mask of the inputs stay as they are; an index stays an index."""
    seen: list[dict[str, np.ndarray]] = []

    def answer(x: dict[str, np.ndarray]) -> Trace:
        seen.append(x)
        return trace(
            table=[1.0, np.nan],
            scaled=x["w"],
            summed=x["bias"],
            inputs=x["ids"] + 0.0,
            masked=np.where(x["mask"], x["w"], 0.0),
            both=x["w"] * x["ids"],
            other=x["bias"] + x["ids"],
            alone=x["alone"] * x["ids"],
        )

    held = {name: np.array([0.0, 1.0], np.float32) for name in ("w", "bias", "alone")}
    given = {
        # One sequence: the reverse of the batch would be the batch itself.
        "ids": np.array([[1, 2]], dtype),
        "mask": np.array([True, False]),
        "length": np.array(3, np.int32),
    }
    side = Changing(answer, given=given, held=held)  # pyright: ignore[reportArgumentType]
    runs = SideRuns(side, None)
    seen.clear()
    one = whole((2,))
    summed = Construction((2,), tuple(Piece(n, one, identity((2,)), one) for n in ("w", "bias")))
    pairs = [Pair("sum", summed, Means.VALUE)]
    assert _depending(runs, pairs) == {"both", "other"}
    parameters, inputs = seen
    assert np.all(parameters["w"] != held["w"]), "zeros too"
    assert np.array_equal(parameters["alone"], held["alone"])
    assert all(inputs[name].dtype == x.dtype for name, x in given.items())
    assert np.array_equal(inputs["mask"], given["mask"]) and inputs["length"] == 3
    if np.issubdtype(dtype, np.integer):
        assert inputs["ids"].tolist() == [[2, 1]]
    # A side that runs with one of the two alone is as unable as one that runs with neither.
    for unable in (Scripted(refusing()), Exact(refusing()), Fed(refusing())):
        with pytest.raises(SideError, match="cannot run with other parameters and inputs"):
            _depending(SideRuns(unable, None), pairs)


class Fed(Scripted):
    """A side that runs with other inputs, and with no other parameters."""

    def with_inputs(self, change: Callable[[np.ndarray], np.ndarray]) -> Fed:
        return self


@dataclass
class Feeding(Changing):
    """A side of two stages, the second one of which multiplies by a table."""

    def run(self, how: Run = Run()) -> Trace:  # noqa: B008
        self.asked.append(how)
        table = 1.0 + (UNIT_ROUNDOFF if how.rounding is Rounding.CONSTANTS else 0.0)
        first = how.forced.get("o1", self.held["w"] * self.given["x"] * table)
        return trace(("o2",), o1=first, o2=2.0 * table * np.asarray(first, np.float64))


def test_the_original_is_fed_its_own_stages_to_see_what_its_tables_do_in_each():
    """Also if they do nothing in some stages, and if the sides' names differ."""
    side = Feeding(refusing(), held={"w": FOUR}, given={"x": FOUR})
    runs = SideRuns(side, None)
    names = [("p1", "o1"), ("p2", "o2")]
    stages = tuple(StagePair(p, o, identity((2,)), AlignedBy.NAME, 0.0) for p, o in names)
    known = Matching((Pair("w", copied("w", (2,)), Means.VALUE),))
    together = Correspondence(Alignment(stages, {}, {}), known)
    side.asked.clear()
    found = localisation._own_tables(together, runs, {"p1": FOUR}, {"p1": 0.0, "p2": 1.0})
    fed = [how.forced for how in side.asked if how.rounding is Rounding.CONSTANTS]
    assert fed and all(list(forced) == ["o1"] for forced in fed)
    # With its padding, which a filter along the sequence may carry on.
    assert runs.wide is not None
    padding = {name: np.zeros_like(x) for name, x in runs.wide.stages.items()}
    runs.wide = replace(runs.wide, stages=padding)
    side.asked.clear()
    localisation._own_tables(together, runs, {"p1": FOUR}, {"p2": 1.0})
    fed = [how.forced["o1"] for how in side.asked if how.rounding is Rounding.CONSTANTS]
    assert fed and all(np.array_equal(values, FOUR * FOUR) for values in fed)
    # The first stage is what it was fed; the table changes the second one alone.
    assert found == {"p1": 0.0, "p2": pytest.approx(UNIT_ROUNDOFF)}
    none = {"p1": 0.0, "p2": 0.0}
    assert localisation._own_tables(together, runs, {"p1": FOUR}, none) is none


def test_what_a_side_remarks_of_its_float64_run_is_told_with_its_kind():
    remark = "one operation has no float64"

    def answer(how: Run) -> Trace:
        wide = how.precision is Precision.FLOAT64
        return replace(trace(out=[1.0]), notices=(remark,) if wide else ("in float32",))

    side = Scripted(answer, "torch")
    assert SideRuns(side, None).notices == (f"torch: {remark}",)


SQUARE = np.array([[1.0, 2.0], [3.0, 4.0]])


@dataclass
class Kernel(Scripted):
    """A side with square matrices, that hands them and the settings of a run to its answer."""

    compute: Callable[[dict[str, np.ndarray], Run], Trace] = lambda held, how: trace()
    held: dict[str, np.ndarray] = field(default_factory=dict)
    tried: list[tuple[str, ...]] = field(default_factory=list)

    def parameters(self) -> dict[str, np.ndarray]:
        return self.held

    def run(self, how: Run = Run()) -> Trace:  # noqa: B008
        return self.compute(self.held, how)

    def with_parameters(self, values: Mapping[str, np.ndarray]) -> Kernel:
        self.tried.append((*values,))
        return replace(self, held={**self.held, **values})


def turned(
    refuses: Collection[Precision] = (),
    edge: PortEdge = WIDE,
    part: bool = False,
    means: Means = Means.VALUE,
    more: int = 0,
) -> tuple[dict[str, str], list[tuple[str, ...]]]:
    """Return notes on matrices of a port whose second stage needs `b.w` transposed, and those
    that were tried.

    Args:
        refuses: Precisions in which the port does not run.
        edge: Where the difference was found.
        part: Whether each matrix is a part of one of the original.
        means: How the matrices were matched.
        more: Number of matrices of which no name says where they are used.
    """
    known = {f"m{n}": SQUARE for n in range(more)}
    known |= {"a.w": SQUARE, "b.w": SQUARE.T, "out.w": SQUARE}

    def compute(held: dict[str, np.ndarray], how: Run) -> Trace:
        if how.precision in refuses:
            raise SideError("refused")
        # In float32 all is larger, so that a run in another precision than the truth shows.
        scale = 2.0 if how.precision is Precision.FLOAT32 else 1.0
        # The first stage is wrong unless it is fed.
        b = scale * held["b.w"] + how.forced.get("a", np.zeros((2, 2)))
        right = held["b.w"] is known["b.w"]
        return trace(a=9 * SQUARE, b=b, mask=[1.0 if right else -2e30, 1.0], out=FOUR)

    def theirs(how: Run) -> Trace:
        scale = 2.0 if how.precision is Precision.FLOAT32 else 1.0
        return trace(a=SQUARE, b=scale * SQUARE + SQUARE, out=FOUR)

    side = Kernel(refusing(), compute=compute, held=known)
    runs = SideRuns(side, None)
    lies, last = identity((2, 2)), identity((2,))
    stages = tuple(
        StagePair(n, n, last if n == "out" else lies, AlignedBy.NAME, 0.0)
        for n in ("a", "b", "out")
    )
    fused = Piece("qkv", cut((6, 2), (6, 2), 0, 0, 2), lies, whole((2, 2)))
    made = [Construction((2, 2), (fused,)) if part else copied(n, (2, 2)) for n in known]
    pairs = tuple(Pair(n, c, means) for n, c in zip(known, made, strict=True))
    names = Correspondence(Alignment(stages, {}, {}), Matching(pairs))
    wrong = tuple(Stage(n, x, x, 2.0**-4) for n, x in (("a", 0.0), ("b", 1.0), ("out", 0.0)))
    found = untransposed(Place(edge, wrong), names, SideRuns(Scripted(theirs), None), runs)
    assert runs.masked == set(), "a mask with other parameters is none of the port"
    return found, side.tried


@pytest.mark.parametrize("refuses", [(), (Precision.FLOAT64,)])
def test_a_matrix_is_tried_transposed_in_the_best_precision_of_the_port(refuses):
    found, tried = turned(refuses)
    assert found == {
        "b.w": "not transposed, it seems: b holds with it transposed; its shape (2, 2) allows both"
    }
    # Matrices of the stages before it and behind it are not tried.
    assert tried == [("b.w",)]


def test_of_many_matrices_those_of_the_stage_are_tried_first():
    found, tried = turned(more=TRIED + 1)
    assert list(found) == ["b.w"]
    assert tried == [("b.w",), *((f"m{n}",) for n in range(TRIED - 1))]


def test_no_matrix_is_tried_where_only_float32_differs_or_where_it_is_not_one_of_the_original():
    assert turned(edge=E.ORIGINAL32_PORT64)[0] != {}
    nothing = ({}, [])
    assert turned(edge=E.PORT32_PORT64) == nothing
    assert turned(part=True) == turned(means=Means.NEAR) == nothing


def test_a_square_matrix_is_one_matrix_of_the_original_and_not_symmetric():
    cube = np.arange(8.0).reshape(2, 2, 2)
    one = whole((2, 2))
    summed = Construction((2, 2), tuple(Piece(n, one, identity((2, 2)), one) for n in "ab"))
    values = {"w": SQUARE, "sum": SQUARE, "cube": cube, "even": SQUARE + SQUARE.T}
    made = {name: copied(name, x.shape) for name, x in values.items()} | {"sum": summed}
    pairs = tuple(Pair(name, each, Means.VALUE) for name, each in made.items())
    assert conversion._square(Matching(pairs), values) == ["w"]


def test_parameters_in_one_anothers_place_are_listed_in_the_order_of_the_port(monkeypatch):
    found = {"second": "a", "first": "b"}
    monkeypatch.setattr(conversion, "placed_by_name", lambda pairs: found)
    pairs = tuple(
        Pair(n, copied(own, (2, 2)), Means.VALUE) for n, own in (("first", "a"), ("second", "b"))
    )
    values = {"a": SQUARE, "b": SQUARE + 1}
    side = Kernel(refusing(), held={"first": values["a"], "second": values["b"]})
    asked: list[Kernel] = []

    def holds(other: Kernel) -> bool:
        asked.append(other)
        return len(asked) == 1

    notes = conversion.misplaced(Matching(pairs), values, side, holds)  # pyright: ignore
    assert list(notes.items()) == [
        ("first", f"holds a in place of b: {EXCHANGED}"),
        ("second", f"holds b in place of a: {EXCHANGED}"),
    ]
    # Compared with each where its name says.
    assert np.array_equal(asked[0].held["first"], values["b"])
    assert np.array_equal(asked[0].held["second"], values["a"])
    assert conversion.misplaced(Matching(pairs), values, side, holds) == {}  # pyright: ignore


def test_three_matrices_that_are_wrong_together_are_all_named():
    """No one of them, and no two, correct the stage."""
    known = {name: SQUARE + n for n, name in enumerate(("b.q", "b.k", "b.v"))}

    def compute(held: dict[str, np.ndarray], how: Run) -> Trace:
        return trace(b=held["b.q"] + 2 * held["b.k"] + 4 * held["b.v"], out=FOUR)

    right = sum(2**n * x.T for n, x in enumerate(known.values()))
    side = Kernel(refusing(), compute=compute, held=known)
    pairs = tuple(Pair(name, copied(name, (2, 2)), Means.VALUE) for name in known)
    stages = (StagePair("b", "b", identity((2, 2)), AlignedBy.NAME, 0.0),)
    names = Correspondence(Alignment(stages, {}, {}), Matching(pairs))
    original = SideRuns(Scripted(lambda how: trace(b=right, out=FOUR)), None)
    wrong = Place(WIDE, (Stage("b", 1.0, 1.0, 2.0**-20),))
    found = untransposed(wrong, names, original, SideRuns(side, None))
    assert side.tried == [("b.q",), ("b.k",), ("b.v",), ("b.q", "b.k", "b.v")]
    assert list(found) == ["b.q", "b.k", "b.v"]
    assert all(" and the other matrices listed here transposed" in note for note in found.values())


def test_a_mask_of_both_sides_hides_no_matrix_that_is_not_transposed():
    mask = np.array([[0.0, -np.inf], [0.0, 0.0]])

    def compute(held: dict[str, np.ndarray], how: Run) -> Trace:
        return trace(b=held["b.w"] + mask, out=FOUR)

    side = Kernel(refusing(), compute=compute, held={"b.w": SQUARE.T})
    stages = (StagePair("b", "b", identity((2, 2)), AlignedBy.NAME, 0.0),)
    pairs = (Pair("b.w", copied("b.w", (2, 2)), Means.VALUE),)
    names = Correspondence(Alignment(stages, {}, {}), Matching(pairs))
    original = SideRuns(Scripted(lambda how: trace(b=SQUARE + mask, out=FOUR)), None)
    wrong = Place(WIDE, (Stage("b", 1.0, 1.0, 2.0**-20),))
    assert list(untransposed(wrong, names, original, SideRuns(side, None))) == ["b.w"]


def test_a_matrix_with_which_the_port_stops_is_not_named():
    def compute(held: dict[str, np.ndarray], how: Run) -> Trace:
        if held["b.w"] is not known["b.w"]:
            raise SideError("stops")
        return trace(b=FOUR, out=FOUR)

    known = {"b.w": SQUARE}
    side = Kernel(refusing(), compute=compute, held=known)
    names = replace(
        same("b", "out"), matching=Matching((Pair("b.w", copied("b.w", (2, 2)), Means.VALUE),))
    )
    original = SideRuns(Scripted(lambda how: trace(b=2 * FOUR, out=FOUR)), None)
    wrong = Place(WIDE, (Stage("b", 1.0, 1.0, 0.25),))
    assert untransposed(wrong, names, original, SideRuns(side, None)) == {}
    assert side.tried == [("b.w",)]


def narrow_runs(side: object, lost: Callable[[Run], bool], **stages) -> SideRuns:
    """Runs of a port with two stages, which lacks the first one where it is lost."""

    def run(how: Run) -> Trace:
        found = trace(a=FOUR, out=FOUR, **stages)
        if lost(how):
            del found.stages["a"]
        return found

    exact = trace(a=FOUR, out=FOUR, **stages)
    return double(SideRuns, side=side, wide=exact, best=exact, run=run, masked_outputs=False)


def narrow_rows(original: SideRuns, port: SideRuns):
    comparison = Comparison(
        WORK, E.PORTBF16_PORT64, PortBounds({}), E.PORTBF16_PORT64.dtype, kinds=stage_kind
    )
    return compare_narrow(comparison, same("a", "out"), original, port)


def test_a_stage_that_bfloat16_does_not_compute_has_no_gate_and_one_lost_to_rounding_no_floor():
    original = narrow_runs(None, lambda how: False)
    stages, rows, _ = narrow_rows(original, narrow_runs(None, lambda how: True))
    assert [stage.name for stage in stages] == ["out"]
    assert {m.quantity for m in rows} == {"out"}
    stages, rows, _ = narrow_rows(original, narrow_runs(None, lambda how: how.seed == 2))
    assert math.isnan(stages[0].floor) and stages[1].floor == 0.0
    gates = {m.quantity: m.verdict for m in rows if m.metric == "rel_l2"}
    assert gates == {"a": Verdict.NOT_COMPARABLE, "out": Verdict.PASS}


def test_a_capture_of_the_port_without_bfloat16_is_told_and_fails_nothing():
    def refuses(how: Run) -> Trace:
        raise SideError("not captured")

    original, exact = narrow_runs(None, lambda how: False), trace(("a", "out"), a=FOUR, out=FOUR)
    for side, told in ((double(CapturedSide), True), (None, False)):
        port = double(SideRuns, side=side, wide=exact, best=exact, run=refuses)
        _, rows, notices = narrow_rows(original, port)
        assert notices == (("bfloat16 is not compared: not captured",) if told else ())
        assert [(m.quantity, m.verdict) for m in rows] == (
            [] if told else [("a", Verdict.NOT_COMPARABLE)]
        )


@pytest.mark.parametrize(
    ("outputs", "named"), [(("a", "out"), "a"), (("out",), "out"), ((), "ids"), (None, NO_OUTPUT)]
)
def test_a_port_without_bfloat16_fails_by_its_first_result(outputs, named: str):
    """Which is a whole number where no other result is compared."""

    def refuses(how: Run) -> Trace:
        raise SideError("no bfloat16")

    exact = replace(trace(outputs or (), a=FOUR, out=FOUR), exact={"ids": np.arange(2)})
    if outputs is None:
        exact = replace(exact, exact={})
    port = double(SideRuns, side=None, wide=exact, best=exact, run=refuses)
    _, [row], _ = narrow_rows(narrow_runs(None, lambda how: False), port)
    assert (row.quantity, row.verdict) == (named, Verdict.NOT_COMPARABLE)


def test_the_original_s_error_in_bfloat16_is_relative_to_its_own_float64():
    def run(how: Run) -> Trace:
        return trace(a=FOUR, out=2.5 * FOUR)

    own = trace(a=FOUR, out=2 * FOUR)
    original = double(SideRuns, side=None, wide=own, best=own, run=run, masked_outputs=False)
    stages, _, _ = narrow_rows(original, narrow_runs(None, lambda how: False))
    assert [stage.original for stage in stages] == [0.0, 0.25]
    assert [stage.port for stage in stages] == [0.0, 0.0]
    # Or to its float32 run, where it has no other.
    original.wide = None
    assert narrow_rows(original, narrow_runs(None, lambda how: False))[0] == stages


EFFECT = StagePair("a", "a", identity((2,)), AlignedBy.NAME, 1.0)


def effect(later: float, *, wide: bool = True, masked: bool = False, first: str = "a") -> bool:
    """Return whether the original's `a` changes a later stage of the port, which it moves."""

    def answer(how: Run) -> Trace:
        if how.precision is Precision.FLOAT64 and not wide:
            raise SideError("no float64")
        b = FOUR * (1 + later) if how.forced.keys() == {"a"} else FOUR
        before = {"before": 2 * FOUR if how.forced else FOUR}
        # The value itself is another one where it is replaced.
        return trace(("out",), **before, a=how.forced.get("a", FOUR), b=b, out=FOUR)

    original = SideRuns(
        Scripted(lambda how: trace(before=FOUR, a=2 * FOUR, b=FOUR, out=FOUR)), None
    )
    port = SideRuns(Scripted(answer), None)
    port.masked = {"a"} if masked else set()
    stages = tuple(Stage(n, 1.0, 1.0, 0.25) for n in ("before", first, "b", "out"))
    names = same("before", "a", "b", "out")
    return has_effect(EFFECT, names, original, port, Place(WIDE, stages))


def test_a_value_has_an_effect_if_it_alone_breaks_the_tolerance_of_a_later_stage():
    """A pair is dropped only then; one whose value cannot be replaced shows nothing."""
    assert effect(0.5) and not effect(0.125)
    assert not effect(0.5, masked=True)
    # Without float64 there is no run to see it in.
    assert effect(0.0, wide=False)


def test_the_notice_of_a_dropped_pair_says_by_how_much_it_differs():
    pair = replace(EFFECT, port="mine", original="theirs", distance=0.0625)
    assert notice_of(pair) == (
        "dropped the pair mine (port) and theirs (original): they differ by 6e-02, yet everything "
        "computed from them agrees, so they are different quantities"
    )


@dataclass
class Exact(Scripted):
    """A side that can run with more precise parameters."""

    def with_exact(self, values: Mapping[str, np.ndarray]) -> Exact:
        return self


@pytest.mark.parametrize(
    ("means", "used"),
    [
        (Means.ROUNDED, True),
        (Means.VALUE, True),
        (Means.REORDERED, True),
        # A wrong parameter stays as the port holds it.
        (Means.SLICE, False),
        (Means.NEAR, False),
        (Means.PROPOSAL, False),
    ],
)
def test_a_sum_that_the_port_holds_is_made_anew_in_float64(means: Means, used: bool):
    one = whole((2,))
    adds = Construction((2,), tuple(Piece(n, one, identity((2,)), one) for n in ("b", "c")))
    pairs = (Pair("sum", adds, means), Pair("plain", copied("b", (2,)), Means.VALUE))
    values = {"b": np.array([1.0, 2.0], np.float32), "c": np.array([2.0**-30, 1.0], np.float32)}
    found = exact_sums(Matching(pairs), values, Exact(refusing()))
    exact = [1.0 + 2.0**-30, 3.0]
    assert {name: x.tolist() for name, x in found.items()} == ({"sum": exact} if used else {})
    assert exact_sums(Matching(pairs), values, Scripted(refusing())) == {}


@dataclass
class Tabled(Scripted):
    """A side with tables, that keeps which of them are shared."""

    arrays: tuple[np.ndarray, ...] = ()
    shared: list[np.ndarray] = field(default_factory=list)

    def tables(self) -> list[np.ndarray]:
        return [*self.arrays]

    def sharing(self, tables: Collection[np.ndarray]) -> Tabled:
        return replace(self, shared=[*tables])


TABLE = np.arange(12.0).reshape(4, 3)


@pytest.mark.parametrize(
    ("ours", "theirs", "shared"),
    [
        (TABLE, TABLE, True),
        # Axes of one element are none, and rows at the end may be missing on either side.
        (TABLE[None], TABLE, True),
        (TABLE[:2], TABLE[:, None], True),
        (TABLE, TABLE[:2], True),
        (TABLE[1:], TABLE, False),
        (TABLE[:, :2], TABLE, False),
        (TABLE.reshape(2, 6), TABLE, False),
        (TABLE.ravel(), TABLE, False),
        (TABLE, TABLE + np.eye(4, 3), False),
        (TABLE[0, :2], TABLE[0, :2], True),
        # One number may be equal by chance.
        (np.ones(1), np.ones(1), False),
        (np.ones(()), np.ones(3), False),
    ],
)
def test_a_table_is_shared_if_one_begins_with_the_rows_of_the_other(ours, theirs, shared: bool):
    """Each side keeps the others of its tables; a parameter of the original counts as one."""
    own, also = np.array([5.0, 7.0]), np.array([8.0, 9.0])
    port = Tabled(refusing(), arrays=(own, ours))
    original = Tabled(refusing(), arrays=(theirs, also))
    a, b, names = without_shared_tables(original, port, {"w": also + 1})
    assert names == frozenset()
    assert isinstance(a, Tabled) and isinstance(b, Tabled)
    assert [x is theirs for x in a.shared] == [x is ours for x in b.shared] == [True] * shared
    # As a parameter of the original.
    a, b, names = without_shared_tables(Scripted(refusing()), port, {"v": own[::-1], "w": theirs})
    assert isinstance(b, Tabled) and not isinstance(a, Tabled)
    assert (
        names == ({"w"} if shared else set()) and [x is ours for x in b.shared] == [True] * shared
    )
    # A side that lists no table shares none.
    a, b, names = without_shared_tables(original, Scripted(refusing()), {"w": theirs})
    assert a is original and names == frozenset()


def test_a_norm_is_folded_into_matrices_that_hold_a_multiple_of_each_row_or_column():
    """And into the biases beside them, if the port lacks a vector of as many numbers."""
    rng = np.random.default_rng(0)
    shapes = {"m.w": (4, 3), "m.v": (4, 3), "m.b": (4,), "n.b": (4,), "one.w": (4, 1)}
    shapes |= {"norm": (4,), "table": (3, 3), "m.none": (0,)}
    original = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    scale = original["norm"]
    other = {name: rng.normal(size=x.shape) for name, x in original.items()}
    port = other | {"m.w": scale[:, None] * original["m.w"]}
    names = ["m.w", "m.v", "m.b", "n.b", "one.w", "m.none"]
    # Neither a matrix beside it, nor one whose rows have one number each, is a multiple.
    assert folded(names, port, original, ["norm"]) == {"m.w", "m.b"}
    assert folded(["m.v", "m.b", "one.w"], port, original, ["norm"]) == set()
    # No vector that the port lacks has an element for each row, or it is no vector.
    assert folded(names, port, original, []) == set()
    assert folded(names, port, original, ["table"]) == set()
    # By columns, up to the rounding to float32 and no more; a row of zeros is one of zeros only.
    columns = port | {"m.w": (original["m.w"] * scale[:3]).astype(np.float32)}
    assert folded(["m.w"], columns, original | {"norm": scale[:3]}, ["norm"]) == {"m.w"}
    columns["m.w"][1, 2] *= 1 + 2.0**-20
    assert folded(["m.w"], columns, original | {"norm": scale[:3]}, ["norm"]) == set()
    nothing = original | {"m.w": np.where(np.arange(4)[:, None] == 2, 0.0, original["m.w"])}
    assert folded(["m.w"], port, nothing, ["norm"]) == set()
    # In a row of zeros and negative numbers, a zero is the largest and shows no factor.
    below = original | {"m.w": -np.abs(original["m.w"]) * [0.0, 1.0, 1.0]}
    scaled = port | {"m.w": scale[:, None] * below["m.w"]}
    assert folded(["m.w"], scaled, below, ["norm"]) == {"m.w"}


@pytest.mark.parametrize("side", ["original", "port"])
def test_a_stage_with_a_mask_on_either_side_is_not_fed_and_no_result_is(side: str):
    masked = np.array([-2 * MASK, 1.0])
    original, port = (
        SideRuns(Scripted(lambda how, a=a: trace(a=a, b=FOUR, out=FOUR)), None)
        for a in (masked if side == name else FOUR for name in ("original", "port"))
    )
    found = replaceable(original.best, same("a", "b", "out"), original, port)
    assert list(found) == ["b"]


def test_a_stage_is_fed_with_its_padding():
    """A filter along the sequence may carry it into what is compared."""
    stages = {"a": [[3.0, 4.0]], "out": [[1.0, 2.0]]}
    runs = SideRuns(Scripted(lambda how: trace(**stages)), np.array([[True, False]]))
    pairs = tuple(StagePair(n, n, identity((1, 2)), AlignedBy.NAME, 0.0) for n in stages)
    names = Correspondence(Alignment(pairs, {}, {}), Matching(()))
    assert runs.best.stages["a"].tolist() == [[3.0, 0.0]]
    fed = replaceable(runs.best, names, runs, runs)
    assert {name: x.tolist() for name, x in fed.items()} == {"a": stages["a"]}


def test_a_mask_has_no_noise_of_its_own():
    squares = Squares()
    squares.add({"x": np.array([-np.inf, 1.0])}, {"x": np.array([-np.inf, 3.0])})
    assert squares.mean()["x"].tolist() == [0.0, 4.0]


def test_a_stage_that_the_port_does_not_return_is_no_partner_of_a_result():
    lies = identity((2,))
    pairs = tuple(
        StagePair(mine, name, lies, AlignedBy.NAME, 0.0)
        for mine, name in (("inner", "hidden"), ("result", "out"))
    )
    original = SideRuns(Scripted(lambda how: trace(("hidden", "out"), hidden=FOUR, out=FOUR)), None)
    port = SideRuns(Scripted(lambda how: trace(("result",), inner=FOUR, result=FOUR)), None)
    both = _Both(Correspondence(Alignment(pairs, {}, {}), Matching(())), original, port)
    assert both.partners() == {"out": "result"}


@pytest.mark.parametrize(("error", "fails"), [(2.0, False), (6.0, True)])
def test_a_row_fails_by_as_many_tolerances_as_what_is_hidden_in_it(error, fails, monkeypatch):
    found = Hidden(count=1, below=1.0, error=error, bound=2.0)
    monkeypatch.setattr(PortBounds, "hidden", lambda *given: found)
    comparison = Comparison(WORK, WIDE, BOUNDS, "float64", kinds=stage_kind)
    row = measurement(edge=WIDE, quantity="out", value=1e-9, tolerance=1e-6)
    judged = _with_hidden(row, comparison, {"out": FOUR}, {"out": FOUR})
    if not fails:
        assert judged is row
        return
    assert (judged.verdict, judged.value) == (Verdict.FAIL, 3.0 * row.tolerance)
    assert judged.note == found.text()
    # What fails already, or is no relative error, stays as it is.
    for other in (replace(row, verdict=Verdict.FAIL), replace(row, metric="max_abs")):
        assert _with_hidden(other, comparison, {"out": FOUR}, {"out": FOUR}) is other
