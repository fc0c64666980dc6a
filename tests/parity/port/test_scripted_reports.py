"""Whole reports of sides whose every number is written down: rows, ledger, notices and text."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import pytest

from parity.device import device_kind
from parity.engine.measure.compare import Comparison, Work
from parity.engine.measure.contract import Gate
from parity.engine.measure.deviation import Worst
from parity.engine.measure.localize import Stage
from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.engine.measure.quantity import GENERATED, LOSSES, WEIGHTS, stage_kind
from parity.engine.pairing.alignment import AlignedBy, Alignment
from parity.engine.pairing.closeness import EQUAL
from parity.engine.pairing.constructions import copied, laid_out
from parity.engine.pairing.layouts import Layout, identity, transposition
from parity.engine.pairing.parameter_pairs import Matching, Means, Pair, Unmatched
from parity.engine.pairing.stage_pairs import Pair as StagePair
from parity.engine.pairing.stage_pairs import Pin
from parity.engine.programs.operations import Unknown
from parity.port.compare import FORCED, Port, PortError, _Both, _completed, _repeated, compare
from parity.port.correspondence import Correspondence
from parity.port.hidden import ROUNDINGS, hidden
from parity.port.ledger import (
    ALL_DERIVATIVES,
    BETWEEN,
    BY_INPUT,
    NO_OUTPUT,
    Entry,
    Role,
    has_output,
    ledger_of,
    require_an_output,
)
from parity.port.localisation import Place
from parity.port.narrow import NarrowStage
from parity.port.report import AROUND, ELEMENTS, NAMES, Report, first_use
from parity.port.rounding_floors import (
    MORE_SEEDS,
    SEEDS,
    Noise,
    PortBounds,
    narrowed,
    pooled,
    together,
)
from parity.port.side_runs import SideRuns
from parity.port_tolerances import NARROWING, STUDENT, PortEdge
from parity.sides.side import Precision, Rounding, Run, SideError, Trace
from tests.helpers import roundoff as chain
from tests.reports.nights import measurement

E = PortEdge
WEIGHT = np.arange(12.0).reshape(3, 4)
X = np.array([[1.0, -2.0, 0.5]])
OPERATIONS, TABLES = 2.0**-24, 2.0**-26
"""What one seed moves a result of a side by, relative to it."""
NARROW = 2.0**-9


class Side:
    """A linear map and twice its result; what is wrong with it is a factor by stage and precision.

    Stages: `lin`, `odd` (its absolute value, of this side alone if it has a name), `out`.
    """

    kind = "scripted"

    def __init__(
        self,
        wrong: dict[tuple[str, Precision], float] | None = None,
        *,
        stages: tuple[str, str, str] = ("lin", "odd", "out"),
        weight: np.ndarray = WEIGHT,
        refuses: tuple[Precision, ...] = (),
        gradients: bool = True,
        exact: dict[str, np.ndarray] | None = None,
        transposed: bool = False,
        bias: np.ndarray | None = None,
        forced: bool = True,
        unread: dict[str, str] | None = None,
        unsteady: bool = False,
    ) -> None:
        self.wrong, self.names, self.weight = wrong or {}, stages, weight
        self.refuses, self.has_gradients, self.exact = refuses, gradients, exact or {}
        self.transposed, self.bias, self.can_be_fed = transposed, bias, forced
        self.unread, self.unsteady, self.asked = unread or {}, unsteady, []

    def parameters(self) -> dict[str, np.ndarray]:
        found = {"w": self.weight.T if self.transposed else self.weight}
        return found | ({} if self.bias is None else {"b": self.bias})

    def inputs(self) -> dict[str, np.ndarray]:
        return {"x": X}

    def run(self, how: Run = Run()) -> Trace:  # noqa: B008
        self.asked.append(how)
        if how.precision in self.refuses:
            raise SideError(f"no {how.precision}")
        if how.forced and not self.can_be_fed:
            raise SideError("cannot be fed")
        lin, odd, out = self.names
        share = {None: 0.0, Rounding.OPERATIONS: OPERATIONS, Rounding.CONSTANTS: TABLES}
        move = 1 + share[how.rounding] * (1 if how.seed % 2 else -1)
        if how.precision is Precision.BFLOAT16 and not how.still:
            move = 1 + (move - 1) * NARROW / OPERATIONS + (0 if how.rounding else NARROW)

        def off(name: str) -> float:
            return move * (1 + self.wrong.get((name, how.precision), 0.0))

        dtype = np.float32 if how.precision is Precision.FLOAT32 else np.float64
        y = (X @ self.weight) * off("lin")
        stages = {lin: y, odd: np.abs(how.forced.get(lin, y)) * off("odd")}
        stages[out] = 2 * how.forced.get(odd, stages[odd]) * off("out")
        if self.unsteady and len(self.asked) == 2:
            stages[odd] = stages[odd] + 1.0
        trace = Trace(
            {n: x.astype(dtype) for n, x in stages.items() if n},
            (out,),
            exact=dict(self.exact),
            unread=dict(self.unread),
        )
        if how.cotangents is None or not self.has_gradients:
            return trace
        # By the weight, of the sum of the outputs along the cotangents.
        along = next(iter(how.cotangents.values())).astype(np.float64)
        grad = X.T @ (2 * along * np.sign(y)) * off("grad")
        found = {"w": grad.T if self.transposed else grad}
        if self.bias is not None:
            found["b"] = 2 * (along * np.sign(y)).sum(0) * off("grad")
        return replace(trace, gradients={n: g.astype(dtype) for n, g in found.items()})


OTHER = ("first", "beside", "result")


def ported(original: Side | None = None, port: Side | None = None, **how) -> Port:
    return Port("twin", original or Side(), port or Side(stages=OTHER), "case", work="hash", **how)


SUMS, QUIET = 1e-5, 0.3
"""Noise of a side with long sums, and the share of it that its first seeds have."""


class Quiet(Side):
    """A side whose noise is `SUMS`, times `QUIET` in the first seeds and `late` in the others."""

    late: float | None = 1.0
    """None: other seeds than the first are refused, as by a capture."""
    constants: float = 0.0

    def run(self, how: Run = Run()) -> Trace:  # noqa: B008
        trace = super().run(how)
        if how.rounding is None or how.precision is not Precision.FLOAT64:
            return trace
        late = QUIET if how.seed < SEEDS else self.late
        if late is None:
            raise SideError("only the first seeds are stored")
        own = {Rounding.OPERATIONS: SUMS, Rounding.CONSTANTS: self.constants}[how.rounding]
        return replace(trace, stages={n: x * (1 + own * late) for n, x in trace.stages.items()})


def quiet(
    error: float, late: tuple[float | None, float | None] = (1.0, 1.0), **how
) -> tuple[Report, list[int]]:
    """Return the report of two quiet sides, and how many seeds each was asked for.

    Args:
        error: error of the port's float32 output, in units of the noise.
        late: noise of the later seeds of the original and of the port.
        how: what the port is, besides.
    """
    wrong = {("out", Precision.FLOAT32): error * SUMS} | how.pop("wrong", {})
    original = Quiet(gradients=False, bias=how.pop("original_bias", None))
    sides = original, Quiet(wrong, stages=OTHER, gradients=False, **how)
    for side, each in zip(sides, late, strict=True):
        side.late = each
    report = compare(ported(*sides, gradients=False, bfloat16=False))
    seeds = [{r.seed for r in s.asked if r.rounding is Rounding.OPERATIONS} for s in sides]
    assert all(found == set(range(len(found))) for found in seeds)
    return report, list(map(len, seeds))


def tolerances(report: Report) -> dict[str, float]:
    rows = [m for m in report.measurements if m.metric == "rel_l2" and m.quantity == "result"]
    return {row.edge: row.tolerance for row in rows}


def told(report: Report, whose: str = "the original and the port") -> bool:
    start = f"{MORE_SEEDS} perturbed runs of {whose} measured"
    return any(notice.startswith(start) for notice in report.notices)


@pytest.mark.parametrize(
    ("error", "holds", "seeds"),
    [
        (1.7, True, SEEDS),
        (4.0, True, MORE_SEEDS),
        (8.0, False, MORE_SEEDS),
        (17.0, False, MORE_SEEDS),
        (19.0, False, SEEDS),
    ],
)
def test_floors_are_measured_better_before_a_port_fails_by_little(error, holds, seeds):
    """The bound is 6 floors: 1.8 of these with the first seeds, 5.6 with all; 18 is hopeless."""
    report, asked = quiet(error)
    assert (report.holds, asked) == (holds, [seeds] * 2)
    assert told(report) == (seeds == MORE_SEEDS)


@pytest.mark.parametrize("late", [30.0, math.nan, math.inf])
def test_rare_jumps_do_not_widen_a_tolerance(late):
    """Rounding that decides a comparison moves a few seeds by far more than the others."""
    report, asked = quiet(4.0, (late, late))
    assert not report.holds and asked == [MORE_SEEDS] * 2
    edge = E.PORT32_PORT64
    assert tolerances(report)[edge] == pytest.approx(6 * QUIET * SUMS, rel=0.1)


def test_a_side_that_refuses_more_runs_keeps_its_own_noise():
    """A capture has the first seeds alone; the other side's noise is not its."""
    report, asked = quiet(4.0, (None, 1.0))
    assert asked == [SEEDS + 1, MORE_SEEDS] and report.holds and told(report, "the port")
    tolerance = tolerances(report)
    assert tolerance[E.ORIGINAL32_ORIGINAL64] == pytest.approx(6 * QUIET * SUMS, rel=0.1)
    assert tolerance[E.PORT32_PORT64] == pytest.approx(6 * SUMS, rel=0.1)
    # Where neither has more, nothing was measured better and no notice says so.
    report, _ = quiet(4.0, (None, None))
    assert not report.holds and "perturbed runs" not in str(report.notices)


def test_stages_have_the_room_of_the_tables_of_the_original_and_not_of_the_port(monkeypatch):
    asked: list[dict[str, float]] = []

    def localise(names, original, port, constants):
        asked.append(constants)
        return Place(WIDE[0], ())

    monkeypatch.setattr(sys.modules[compare.__module__], "localise", localise)
    original, port = Quiet(), Quiet(stages=OTHER)
    original.constants = SUMS
    compare(ported(original, port, gradients=False, bfloat16=False))
    [constants] = asked
    assert [*constants] == [*STAGES]
    # bound: the side of this test moves by it
    assert min(constants.values()) > QUIET * SUMS


def test_no_result_of_either_side_is_taken_for_another_quantity(monkeypatch):
    asked: list[set[str]] = []

    def compensated(alignment, rows, place, outputs):
        asked.append({*outputs})

    monkeypatch.setattr(sys.modules[compare.__module__], "compensated", compensated)
    compare(ported(gradients=False, bfloat16=False))
    assert asked == [{"out", "result"}]


@pytest.mark.parametrize(
    "how",
    [
        {"wrong": {("out", Precision.FLOAT64): 1e-3}},
        {"bias": np.ones(4), "original_bias": np.arange(4.0)},
        {"bias": np.ones(4)},
        {"exact": {"n": np.array([1])}},
    ],
    ids=["float64", "a weight", "another parameter", "an integer"],
)
def test_no_runs_are_spent_on_a_port_that_fails_all_the_same(how):
    report, asked = quiet(4.0, **how)
    assert not report.holds and asked == [SEEDS] * 2


def test_more_runs_are_pooled_with_the_first():
    first = dict.fromkeys(("x", "quiet", "jumps", "lost", "missing", "still"), 1.0) | {"still": 0.0}
    rest = {"x": 3.0, "quiet": 0.0, "jumps": 12.0, "lost": math.nan, "still": 1.0}
    more = MORE_SEEDS - SEEDS
    found = pooled(first, rest)
    assert found.pop("x") == pytest.approx(math.sqrt((SEEDS + 9.0 * more) / MORE_SEEDS))
    assert found.pop("quiet") == pytest.approx(math.sqrt(SEEDS / MORE_SEEDS))
    assert found == {"jumps": 1.0, "lost": 1.0, "missing": 1.0, "still": 0.0}
    almost = STUDENT * math.sqrt(MORE_SEEDS / more)
    assert pooled({"x": 1.0}, {"x": 0.99 * almost})["x"] > 9.0


def verdicts(report: Report, metric: str = "rel_l2") -> dict[tuple[str, str], Verdict]:
    return {(m.edge, m.quantity): m.verdict for m in report.measurements if m.metric == metric}


STAGES = ("first", "beside", "result")
ALL = (*STAGES, "grad/w")
WIDE = (E.PORT64_ORIGINAL64, E.PORT32_PORT64, E.ORIGINAL32_ORIGINAL64, E.PORT32_ORIGINAL32)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_right_port_passes_each_gate_of_each_edge(transposed: bool):
    report = compare(ported(port=Side(stages=OTHER, transposed=transposed)))
    assert report.holds and report.failures == () and report.culprit is None
    gates = verdicts(report)
    expected = {(edge, name) for edge in WIDE for name in ALL}
    expected |= {(E.PORTBF16_PORT64, name) for name in STAGES}
    assert set(gates) == expected and set(gates.values()) == {Verdict.PASS}
    [weights] = [m for m in report.measurements if m.metric == "unmatched"]
    assert (weights.value, weights.verdict, weights.edge) == (0.0, Verdict.PASS, WIDE[3])
    assert {m.case for m in report.measurements} == {"twin/case"}
    assert {m.suite for m in report.measurements} == {"twin"}
    assert {m.identity for m in report.measurements if m.edge == WIDE[0]}
    assert report.sentence() == f"twin/case: holds; {len(expected) + 1} gates"
    assert repr(report) == f"<Report: {report.sentence()}>"
    assert report.ledger == (
        Entry("out", Role.OUTPUT, "result", True),
        Entry("w", Role.GRADIENT, "w", True),
        Entry("x", Role.INPUT, reason=BY_INPUT),
    )
    assert report.left_out == report.ledger[-1:] and report.untransposed == {}
    assert report.notices == () and report.wrong_derivatives == ()
    assert [(p.port, p.original, p.by) for p in report.alignment.pairs] == [
        (port, name, AlignedBy.VALUE)
        for port, name in zip(OTHER, ("lin", "odd", "out"), strict=True)
    ]
    assert report.place.edge is E.PORT64_ORIGINAL64
    assert [stage.name for stage in report.place.stages] == list(STAGES)
    assert [stage.name for stage in report.narrow] == list(STAGES)
    gate_rows = [m for m in report.measurements if m.verdict is not Verdict.INFO]
    assert report.contract == tuple(dict.fromkeys(map(Gate.of, gate_rows)))
    # Stages are numbered in the port's order, and derivatives have no place in it.
    order = {m.quantity: m.stage for m in report.measurements if m.metric == "rel_l2"}
    assert order == {"first": 0, "beside": 1, "result": 2, "grad/w": -1}


@pytest.mark.parametrize("refuses", [(), (Precision.FLOAT64,)])
def test_stages_are_judged_as_stages_whatever_the_port_calls_them(refuses):
    """Other comparisons have a rule of their own for quantities of these names."""
    usual = compare(ported(Side(refuses=refuses)))
    names = dict(zip(OTHER, (GENERATED, LOSSES, WEIGHTS), strict=True))
    special = compare(ported(Side(refuses=refuses), Side(stages=tuple(names.values()))))
    assert special.holds

    def rows(report: Report, called: dict[str, str]) -> list[tuple]:
        return [
            (m.edge, called.get(m.quantity, m.quantity), m.kind, m.metric, m.tolerance, m.verdict)
            for m in report.measurements
        ]

    assert rows(special, {}) == rows(usual, names)
    stages = {m.kind for m in special.measurements if m.metric in ("rel_l2", FORCED)}
    assert stages == {Kind.BLOCK, Kind.GRADIENT}
    unsteady = Side(stages=tuple(names.values()), unsteady=True)
    [row] = compare(ported(Side(refuses=refuses), unsteady)).measurements
    assert (row.quantity, row.kind) == (LOSSES, Kind.BLOCK)


def test_a_result_in_low_precision_without_a_gate_is_a_stage_whatever_its_name():
    low = Side(stages=(*OTHER[:2], GENERATED), refuses=(Precision.FLOAT64,))
    low.autocast = "bfloat16"  # pyright: ignore[reportAttributeAccessIssue]
    low.used = {"bfloat16"}  # pyright: ignore[reportAttributeAccessIssue]
    report = compare(ported(Side(refuses=(Precision.FLOAT64,)), low, bfloat16=False))
    kinds = {m.quantity: m.kind for m in report.measurements if m.metric == "compared"}
    assert kinds == {GENERATED: Kind.BLOCK, NO_OUTPUT: Kind.BLOCK}


@pytest.mark.parametrize("device", ["", "cuda", "cpu"])
def test_rows_are_of_the_device_that_a_case_names_and_else_of_the_one_that_runs_it(device: str):
    report = compare(ported(device=device))
    assert {m.device for m in report.measurements} == {device or device_kind()}
    for sides in (
        (Side(), Side(stages=OTHER, unsteady=True)),
        (Side(refuses=(Precision.FLOAT64,)), Side(stages=OTHER)),
    ):
        other = compare(ported(*sides, device=device))
        assert {m.device for m in other.measurements} == {device or device_kind()}


def test_tolerances_are_the_factors_of_the_table_times_the_floors():
    """Each side's operations and tables move its results by one share of them."""
    report = compare(ported())
    single, double = 6.0, 12.0
    own, tables = OPERATIONS, TABLES
    expected = {
        E.PORT64_ORIGINAL64: max(
            1e-11, single * math.hypot(tables, tables, *[own * NARROWING] * 2)
        ),
        E.PORT32_PORT64: max(3e-7, single * own),
        E.ORIGINAL32_ORIGINAL64: max(3e-7, single * own),
        E.PORT32_ORIGINAL32: max(6e-7, double * math.hypot(own, own, tables, tables)),
        E.PORTBF16_PORT64: 6.0 * NARROW,
    }
    rows = {
        m.edge: m for m in report.measurements if (m.quantity, m.metric) == ("result", "rel_l2")
    }
    # Three factors of the stages before it, each moved alike.
    grown = dict.fromkeys(expected, 3.0)
    for edge, bound in expected.items():
        low, high = bound, bound * grown[edge] * 1.1
        assert low * 0.99 <= rows[edge].tolerance <= high, edge


CASES = {
    "mathematics of a stage": (("odd", 0.25), tuple(Precision), "beside", WIDE[0]),
    "rounding of a stage": (("odd", 0.25), (Precision.FLOAT32,), "beside", WIDE[1]),
    "the last stage": (("out", 0.25), tuple(Precision), "result", WIDE[0]),
    "the first stage": (("lin", 0.25), tuple(Precision), "first", WIDE[0]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_stage_is_blamed_and_what_follows_fails_too(name: str):
    (stage, factor), precisions, culprit, edge = CASES[name]
    wrong = {(stage, p): factor for p in precisions}
    report = compare(ported(port=Side(wrong, stages=OTHER)))
    assert not report.holds and report.culprit is not None
    assert report.culprit.name == culprit and report.place.edge is edge
    partner = dict(zip(OTHER, ("lin", "odd", "out"), strict=True))[culprit]
    assert report.sentence() == f"twin/case: diverges at {culprit} (the original's {partner})"
    found = verdicts(report)
    behind = STAGES[STAGES.index(culprit) :]
    mathematics = edge is WIDE[0]
    for (row_edge, quantity), verdict in found.items():
        if row_edge == E.PORTBF16_PORT64 or quantity.startswith("grad"):
            continue
        is_wrong = quantity in behind and (
            row_edge in ((WIDE[0], WIDE[3]) if mathematics else (WIDE[1], WIDE[3]))
        )
        assert verdict is (Verdict.FAIL if is_wrong else Verdict.PASS), (row_edge, quantity)
    # A difference of two values, each of a chain of at most 16 roundings to float32.
    bound = chain(16, np.float32) * (2 + factor) / factor
    assert report.culprit.forced == pytest.approx(factor, rel=bound)
    assert [s.broken for s in report.place.stages].count(True) == 1
    # Worst elements: of the row that the stage is, the largest first.
    errors = [abs(w.actual - w.expected) for w in report.place.worst]
    assert errors == sorted(errors, reverse=True) and errors[0] > 0
    text = report.text()
    assert "  <- here" in text and text.startswith(report.sentence() + "\n\n")


def test_a_wrong_derivative_alone_is_named():
    wrong = {("grad", p): 0.25 for p in Precision}
    report = compare(ported(port=Side(wrong, stages=OTHER)))
    assert report.sentence() == "twin/case: every stage holds, derivatives do not: w"
    assert report.wrong_derivatives == ("w",) and report.culprit is None
    failing = {(m.edge, m.quantity) for m in report.failures}
    assert failing == {(WIDE[0], "grad/w"), (WIDE[3], "grad/w")}


def test_of_wrong_derivatives_that_of_the_parameter_used_last_is_named_first():
    """The backward pass meets it first, and all others inherit its error."""
    report = compare(ported())
    some = report.place.stages[0]
    stages = tuple(replace(some, name=name) for name in ("first", "second", "third"))
    wrong = ("first.w", "third.w", "second.w", "nowhere.w")
    rows = tuple(
        measurement(quantity=f"grad/{name}", value=1.0, verdict=Verdict.FAIL) for name in wrong
    )
    report = replace(report, measurements=rows, place=replace(report.place, stages=stages))
    assert report.wrong_derivatives == ("third.w", "second.w", "first.w", "nowhere.w")


def test_a_derivative_that_is_lost_in_float32_fails_where_the_port_rounds():
    report = compare(ported(port=Side({("grad", Precision.FLOAT32): 0.25}, stages=OTHER)))
    failing = {(m.edge, m.quantity) for m in report.failures}
    assert failing == {(WIDE[1], "grad/w"), (WIDE[3], "grad/w")}


@pytest.mark.parametrize(
    ("original", "port", "edges"),
    [
        ((), (Precision.FLOAT64,), (E.ORIGINAL32_ORIGINAL64, E.PORT32_ORIGINAL64, WIDE[3])),
        ((Precision.FLOAT64,), (), (E.PORT32_PORT64, E.ORIGINAL32_PORT64, WIDE[3])),
        ((Precision.FLOAT64,), (Precision.FLOAT64,), (WIDE[3],)),
    ],
)
def test_edges_are_those_that_both_sides_can_run(original, port, edges):
    report = compare(
        ported(Side(refuses=original), Side(stages=OTHER, refuses=port), bfloat16=False)
    )
    rows = [m for m in report.measurements if m.metric == "rel_l2"]
    assert list(dict.fromkeys(m.edge for m in rows)) == [*edges]
    told = [n for n in report.notices if "does not run in float64: no float64" in n]
    assert len(told) == len(original) + len(port)
    forced = [m for m in report.measurements if m.metric == FORCED]
    # Only where the original's float32 is all there is of it, each stage by itself is a gate.
    assert {m.quantity for m in forced} == (set(STAGES) if original and not port else set())
    assert {m.edge for m in forced} <= {E.ORIGINAL32_PORT64}
    if original and port:
        assert not report.holds and {m.verdict for m in rows} == {Verdict.NOT_COMPARABLE}
    else:
        assert report.holds, report.text()
        assert all(m.verdict is Verdict.PASS for m in forced)
    assert report.narrow == () and E.PORTBF16_PORT64 not in {m.edge for m in report.measurements}


def test_a_port_against_float32_alone_is_blamed_stage_by_stage():
    wrong = {("odd", p): 0.25 for p in Precision}
    report = compare(
        ported(Side(refuses=(Precision.FLOAT64,)), Side(wrong, stages=OTHER), bfloat16=False)
    )
    forced = {m.quantity: m for m in report.measurements if m.metric == FORCED}
    assert {n: m.verdict for n, m in forced.items()} == {
        "first": Verdict.PASS, "beside": Verdict.FAIL, "result": Verdict.PASS,
    }  # fmt: skip
    assert report.culprit is not None and report.culprit.name == "beside"
    assert forced["beside"].value == report.culprit.forced
    assert forced["beside"].tolerance == report.culprit.tolerance
    assert report.place.edge is E.ORIGINAL32_PORT64


def test_a_port_that_cannot_be_fed_is_compared_all_the_same():
    report = compare(ported(port=Side(stages=OTHER, forced=False), bfloat16=False))
    assert report.holds and report.place == Place(E.PORT32_ORIGINAL32, ())
    assert report.notices == ("stages were not tested one by one on correct inputs: cannot be fed",)


def test_what_is_not_asked_for_is_in_the_ledger_with_its_reason():
    report = compare(ported(gradients=False, bfloat16=False))
    assert report.ledger[1:] == (
        Entry(ALL_DERIVATIVES, Role.GRADIENT, reason=report.ledger[1].reason),
    )
    assert report.ledger[1].reason == (
        "no derivative was compared: it was not requested (Port.gradients)"
    )
    assert not any(m.quantity.startswith("grad") for m in report.measurements)
    assert f"not compared: gradient grad/*: {report.ledger[1].reason}" in report.text()
    assert report.holds


@pytest.mark.parametrize("whose", ["original", "port"])
def test_a_side_without_derivatives_is_told(whose: str):
    sides = {"original": Side(gradients=whose != "original"),
             "port": Side(stages=OTHER, gradients=whose != "port")}  # fmt: skip
    report = compare(ported(sides["original"], sides["port"], bfloat16=False))
    assert report.ledger[-1].reason == (
        f"no derivative was compared: the {whose} has no trained parameter"
    )
    assert f"no derivative is compared: the {whose} has no trained parameter" in report.notices


def test_whole_numbers_and_what_is_no_array():
    ids = np.array([1, 2, 3])
    original = Side(
        exact={"ids": ids, "mask": ids > 1, "lost": ids[:1]}, unread={"n": "a str, not an array"}
    )
    port = Side(stages=OTHER, exact={"ids": ids + (ids > 1), "mask": ids > 1, "own": ids[:2]})
    report = compare(ported(original, port, bfloat16=False))
    rows = {(m.edge, m.quantity): m for m in report.measurements if m.metric == "unequal"}
    assert {edge for edge, _ in rows} == {WIDE[0], WIDE[3]}
    for edge in (WIDE[0], WIDE[3]):
        assert (rows[edge, "ids"].value, rows[edge, "ids"].verdict) == (2.0, Verdict.FAIL)
        assert rows[edge, "ids"].note == "2 of 3 whole numbers or bools differ"
        assert (rows[edge, "mask"].value, rows[edge, "mask"].verdict) == (0.0, Verdict.PASS)
        assert rows[edge, "mask"].note == ""
        assert "and the port does not" in rows[edge, "lost"].note
        assert "and the original does not" in rows[edge, "own"].note
    entries = {e.name: e for e in report.ledger}
    assert entries["ids"] == Entry("ids", Role.OUTPUT, "ids", True)
    assert entries["lost"].port == "" and not entries["lost"].compared
    assert entries["n"].reason == "a str, not an array: return an array to have it compared"


def test_results_that_are_left_out_are_in_the_ledger_with_the_reason_given():
    ids = np.array([1, 2])
    original = Side(exact={"cache.ids": ids, "ids": ids})
    port = Side(stages=OTHER, exact={"ids": ids})
    report = compare(ported(original, port, not_compared={"cache": "of another shape"}))
    assert report.holds
    entries = {e.name: e for e in report.ledger}
    assert entries["cache.ids"] == Entry("cache.ids", Role.OUTPUT, reason="of another shape")
    with pytest.raises(PortError, match="not_compared names other, which no side returns"):
        compare(ported(original, port, not_compared={"other": "x"}))
    with pytest.raises(PortError, match="no reason for cache: give each name a reason"):
        compare(ported(original, port, not_compared={"cache": " "}))


def test_a_parameter_of_either_side_alone_is_told():
    bias = np.zeros(4)
    report = compare(ported(Side(bias=bias), bfloat16=False))
    [row] = [m for m in report.measurements if m.metric == "unmatched"]
    assert row.value == 1.0 and row.note == "the original's that the port does not have: b"
    assert report.lost == ("b",)
    assert report.sentence() == f"twin/case: the parameters differ; {row.note}"
    assert any(
        n.startswith("no parameter of the port holds the original's b:") for n in report.notices
    )
    entry = next(e for e in report.ledger if e.name == "b")
    assert entry == Entry("b", Role.GRADIENT, reason="the port has no counterpart of it")
    more = compare(ported(port=Side(stages=OTHER, bias=bias), bfloat16=False))
    [row] = [m for m in more.measurements if m.metric == "unmatched"]
    assert row.value == 1.0 and row.note == "not the original's: b"
    with pytest.raises(PortError, match="the two sides share no parameter"):
        compare(ported(port=Side(stages=OTHER, weight=WEIGHT**2 + 0.5), bfloat16=False))


class Bare(Side):
    """A side whose numbers are written in its code."""

    def parameters(self) -> dict[str, np.ndarray]:
        return {}


def test_a_port_without_parameters_shares_none_and_is_compared_all_the_same():
    """It computes with constants; one whose parameters are all of its own was not converted."""
    report = compare(ported(port=Bare(stages=OTHER), gradients=False, bfloat16=False))
    assert report.holds and report.matching.unmatched_original[0].name == "w"
    assert any("no parameter of the port holds the original's w" in n for n in report.notices)
    with pytest.raises(PortError, match="the two sides share no parameter"):
        compare(ported(Bare(), gradients=False, bfloat16=False))


def test_a_parameter_of_one_number_is_missed_too():
    port = ported(Holder({"scale": np.ones(1)}, {}), bfloat16=False)
    both = _Both(Correspondence(Alignment((), {}, {}),
                                Matching((), (Unmatched("scale", (1,)), Unmatched("none", (0,))))),
                 SideRuns(Side(), None), SideRuns(Side(), None))  # fmt: skip
    best = both.original.wide
    assert best is not None
    both.original.wide = replace(best, gradients={"scale": np.ones(1), "none": np.ones(0)})
    port.original.more["none"] = np.ones(0)
    assert both.lost(port.original, {"original": Noise(), "port": Noise()}) == ["scale"]


@pytest.mark.parametrize(("side", "stage"), [("original", "odd"), ("port", "beside")])
def test_a_side_that_is_not_deterministic_fails_from_where_it_differs(side: str, stage: str):
    original, port = Side(unsteady=side == "original"), Side(stages=OTHER, unsteady=side == "port")
    report = compare(ported(original, port, bfloat16=False))
    # Nothing else: a tolerance from noise of this size would pass a wrong port.
    [row] = report.measurements
    # By the port's name, in the words of the side.
    assert row.quantity == "beside" and row.edge == WIDE[3]
    assert (row.suite, row.case) == ("twin", "twin/case")
    assert report.sentence() == (
        f"twin/case: the {side} is not deterministic: two runs of the same inputs differ from "
        f"{stage} on; is it in evaluation mode, and does it get its random key?"
    )
    assert "beside not compared" in report.text() and "nan" not in report.text()
    assert report.notices == ("nothing else was compared",)


def test_a_side_that_is_not_deterministic_tells_what_it_could_not_run():
    port = Side(stages=OTHER, unsteady=True, refuses=(Precision.FLOAT64,))
    original = Side(unsteady=True, refuses=(Precision.FLOAT64,))
    report = compare(ported(original, port))
    assert [m.note.split(":")[0] for m in report.measurements] == [
        "the original is not deterministic",
        "the port is not deterministic",
    ]
    # The original's changes alone would make the port's numbers differ.
    assert report.sentence() == f"twin/case: {report.measurements[0].note}"
    told = "scripted does not run in float64: no float64"
    assert report.notices == (told, told, "nothing else was compared")


class Holder(Side):
    """A side with more parameters and inputs than it computes with."""

    def __init__(self, more: dict[str, np.ndarray], inputs: dict[str, np.ndarray], **how) -> None:
        super().__init__(**how)
        self.more, self.given = more, inputs

    def parameters(self) -> dict[str, np.ndarray]:
        return super().parameters() | self.more

    def inputs(self) -> dict[str, np.ndarray]:
        return super().inputs() | self.given


class Precise(Holder):
    """A side that runs in float64 with more precise parameters."""

    def with_exact(self, values: dict[str, np.ndarray]) -> Precise:
        return self


class Tabled(Holder):
    """A side with a table."""

    def tables(self) -> list[np.ndarray]:
        return [np.arange(5.0)]

    def sharing(self, tables: list[np.ndarray]) -> Tabled:
        return self


def test_parameters_that_both_sides_hold_bit_for_bit_are_not_perturbed():
    """Also under a second name, but not the terms of a sum, which the port holds rounded."""
    rng = np.random.default_rng(0)
    terms = {name: rng.normal(size=16).astype(np.float32) for name in ("left", "right")}
    mine = {"sum": terms["left"] + terms["right"]}
    original = Holder({"tied": WEIGHT, **terms, "own": np.arange(5.0)}, {})
    port = Holder(mine, {}, stages=OTHER)
    report = compare(ported(original, port, gradients=False, bfloat16=False))
    assert {p.port: (p.originals, p.also) for p in report.matching.pairs} == {
        "w": (("w",), ("tied",)),
        "sum": (("left", "right"), ()),
    }
    moved = {how.shared for how in original.asked if how.rounding is not None}
    assert moved == {frozenset({"w", "tied"})}
    # A port that runs in float64 with the sum itself holds the terms too.
    original = Holder({"tied": WEIGHT, **terms, "own": np.arange(5.0)}, {})
    compare(ported(original, Precise(mine, {}, stages=OTHER), gradients=False, bfloat16=False))
    moved = {how.shared for how in original.asked if how.rounding is not None}
    assert moved == {frozenset({"w", "tied", *terms})}
    # Nor is a parameter that the port holds as a table.
    original = Holder({"tied": WEIGHT, **terms, "own": np.arange(5.0)}, {})
    compare(ported(original, Tabled(mine, {}, stages=OTHER), gradients=False, bfloat16=False))
    moved = {how.shared for how in original.asked if how.rounding is not None}
    assert moved == {frozenset({"w", "tied", "own"})}


@pytest.mark.parametrize("off", [0.0, 0.25])
def test_an_order_that_derivatives_show_is_right_only_if_all_gates_pass(off: float, monkeypatch):
    """A port that fails may fail because of the order."""
    monkeypatch.setattr(_Both, "shown_by_derivatives", lambda both: frozenset({"gates"}))
    rows = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    port = Holder({"gates": np.roll(rows, 4, 0)}, {}, wrong={("out", p): off for p in Precision},
                  stages=OTHER)  # fmt: skip
    report = compare(ported(Holder({"gates": rows}, {}), port, bfloat16=False))
    assert report.matching.by_port["gates"].is_reordered and report.holds == (off == 0.0)
    [weights] = [m for m in report.measurements if m.metric == "unmatched"]
    assert weights.note == ("" if report.holds else "not the original's: gates")


def test_only_numbers_of_the_inputs_could_have_a_derivative():
    more = {"ids": np.array([1, 2]), "mask": np.array([True, False]), "z": np.ones(2, np.float32)}
    report = compare(ported(Holder({}, more), Holder({}, more, stages=OTHER), bfloat16=False))
    assert [e.name for e in report.ledger if e.role is Role.INPUT] == ["x", "z"]


def test_a_result_of_the_port_alone_may_be_left_out_too():
    """It is none of the original's results, so that the ledger does not have it."""
    port = Side(stages=OTHER, exact={"own": np.arange(3)})
    assert not compare(ported(port=port, bfloat16=False)).holds
    report = compare(ported(port=port, bfloat16=False, not_compared={"own": "a cache"}))
    assert report.holds and "own" not in {e.name for e in report.ledger}


def test_a_name_that_no_side_returns_is_refused_with_those_that_the_original_returns():
    whole = {"ids": np.arange(2), "counts": np.arange(3)}
    original = Side(exact=whole, unread={"n": "a str, not an array"})
    port = Side(stages=OTHER, exact=whole)
    told = r"names other, which .* expected outputs such as out, counts, n$"
    with pytest.raises(PortError, match=told):
        compare(ported(original, port, not_compared={"ids": "known", "other": "x"}))


def test_every_notice_of_a_comparison_is_kept():
    original = Side(refuses=(Precision.FLOAT64, Precision.BFLOAT16))
    report = compare(ported(original, Side(stages=OTHER, forced=False)))
    assert [notice.split(":")[0] for notice in report.notices] == [
        "scripted does not run in float64",
        "the original does not run in bfloat16",
        "stages were not tested one by one on correct inputs",
    ]


@pytest.mark.parametrize("refuses", ["original", "port"])
def test_a_report_tells_which_side_does_not_run_in_bfloat16(refuses: str):
    none = (Precision.BFLOAT16,)
    original = Side(refuses=none if refuses == "original" else ())
    port = Side(stages=OTHER, refuses=none if refuses == "port" else ())
    report = compare(ported(original, port))
    if refuses == "original":
        assert report.holds
        assert report.notices == ("the original does not run in bfloat16: no bfloat16",)
    else:
        [bad] = [m for m in report.measurements if m.verdict is Verdict.NOT_COMPARABLE]
        assert (bad.quantity, bad.edge, report.notices) == ("result", E.PORTBF16_PORT64, ())


def test_a_gate_of_bfloat16_that_zeros_would_pass_is_for_information(monkeypatch):
    monkeypatch.setitem(globals(), "NARROW", 0.25)
    report = compare(ported())
    rows = [m for m in report.measurements if m.edge == E.PORTBF16_PORT64 and m.metric == "rel_l2"]
    assert {m.verdict for m in rows} == {Verdict.INFO}
    assert all("rounding alone may change it by" in m.note for m in rows)


def test_a_gate_between_float32_runs_that_zeros_would_pass_is_for_information(monkeypatch):
    monkeypatch.setitem(globals(), "OPERATIONS", 0.5)
    report = compare(ported(gradients=False, bfloat16=False))
    rows = [m for m in report.measurements if (m.edge, m.metric) == (WIDE[3], "rel_l2")]
    assert {m.quantity for m in rows} == set(STAGES)
    assert {m.verdict for m in rows} == {Verdict.INFO}
    assert all("rounding alone may change it by" in m.note for m in rows)


class Cancelling(Side):
    """A side with a stage and a derivative that rounding moves; the stage cancels to nothing."""

    def __init__(self, noise: float, left: float, **how) -> None:
        super().__init__(**how)
        self.noise, self.left = noise, left

    def run(self, how: Run = Run()) -> Trace:  # noqa: B008
        found = super().run(how)
        move = (1 if how.seed % 2 else -1) if how.rounding is Rounding.OPERATIONS else 0
        rest = np.full(4, self.left + self.noise * OPERATIONS * move)
        dtype = found.stages[self.names[2]].dtype
        grown = 1 + self.noise * OPERATIONS * move
        return replace(
            found,
            stages={"rest": rest.astype(dtype)} | found.stages,
            gradients={n: (x * grown).astype(dtype) for n, x in found.gradients.items()},
        )


@pytest.mark.parametrize("left", [0.0, 1.0])
def test_a_stage_that_cancels_costs_no_digits(left: float):
    """Its norm is rounding, so that a share of it means nothing; nor is a derivative a stage."""
    sides = Cancelling(1.0, left), Cancelling(100.0, left, stages=OTHER)
    report = compare(ported(*sides, bfloat16=False))
    assert "rest" in {stage.name for stage in report.place.stages}
    told = [text for text in report.notices if "float32 costs the port" in text]
    assert [" from rest on" in text for text in told] == [True] * bool(left)


def test_a_loss_is_a_scalar_that_both_sides_return():
    with pytest.raises(PortError, match=r"got 'result'; the outputs .* are result \(1, 4\)"):
        compare(ported(loss="result"))
    with pytest.raises(PortError, match="got 'other'"):
        compare(ported(loss="other"))


def test_a_pin_decides_and_a_result_without_a_partner_fails():
    """Pinned to have none, it is compared under its own name on both sides, and missing."""
    pins = (Pin("result", None), Pin(None, "out"))
    report = compare(ported(pins=pins, gradients=False, bfloat16=False))
    assert not report.holds
    rows = {(m.edge, m.quantity): m for m in report.measurements if m.metric == "rel_l2"}
    for edge in (WIDE[0], WIDE[3]):
        assert rows[edge, "result"].note.startswith("missing in original")
        assert rows[edge, "out"].note == "the original returns it and the port does not"
    # A side against itself knows nothing of it.
    assert (WIDE[1], "out") not in rows
    assert report.ledger[0].reason and not has_output(report.ledger)


LIES = identity((2,))


def pair(port: str, original: str, **how) -> StagePair:
    known = {"layout": LIES, "by": AlignedBy.VALUE, "distance": 0.0}
    return StagePair(port, original, **(known | how))


def reported(rows=(), place=None, **how) -> Report:
    known = {
        "alignment": Alignment((pair("a", "a"), pair("p", "o")), {"only": (2,)}, {}),
        "matching": Matching((Pair("w", copied("w", (2,)), Means.VALUE),)),
        "place": place or Place(E.PORT64_ORIGINAL64, ()),
        "narrow": (),
        "notices": (),
        "ledger": (Entry("out", Role.OUTPUT, "out", True),),
    }
    return Report("port", tuple(rows), **(known | how))


def row(quantity: str, verdict: Verdict = Verdict.FAIL, **how) -> Measurement:
    known = {"edge": E.PORT64_ORIGINAL64, "value": 2e-6, "tolerance": 1e-6, "note": ""}
    return measurement(quantity=quantity, verdict=verdict, **(known | how))


def test_a_text_lists_edges_stages_around_the_culprit_and_what_is_left():
    """Whole, so that no line of it can be another one."""
    stages = tuple(
        Stage(f"s{n}", 0.5 * n, 4e-6 if n in (4, 6) else 0.25e-6, 1e-6) for n in range(10)
    )
    worst = tuple(Worst((0, n), 1.0 + n, 1.0) for n in range(ELEMENTS + 2))
    place = Place(E.PORT64_ORIGINAL64, stages, worst, "row 0")
    rows = [
        row("s0", Verdict.PASS, value=0.5e-6),
        row("s4", value=4e-6),
        row("s5", Verdict.NOT_COMPARABLE, tolerance=math.nan, edge=E.PORT32_PORT64),
        row("info", Verdict.INFO, edge=E.PORT32_ORIGINAL64),
        # What has no tolerance is in no row of the table.
        row("s0", Verdict.INFO, metric="cosine", value=9.0, tolerance=math.nan),
    ]
    pairs = (
        Pair("w", copied("w", (2,)), Means.VALUE),
        Pair("r", copied("r", (2,)), Means.ROUNDED, "rounded once"),
    )
    report = reported(
        rows,
        place,
        matching=Matching(pairs),
        narrow=(NarrowStage("x", 1.0, 1.0, 1.0), NarrowStage("out", 2e-3, 1e-3, 1e-3)),
        notices=("one", "two"),
        ledger=(Entry("out", Role.OUTPUT, "out", True), Entry("m", Role.OUTPUT, reason="why")),
    )
    shown = stages[4 - AROUND : 4 + AROUND + 1]
    table = [
        f"{s.name:<44}{s.free:>9.1e}{s.forced:>9.1e}{s.tolerance:>9.1e}"
        + ("  <- here" if s.name == "s4" else "")
        for s in shown
    ]
    assert report.text().split("\n") == [
        "port: diverges at s4",
        "",
        f"{'edge':<26}{'gates':>6}{'fail':>6}  furthest",
        f"{E.PORT64_ORIGINAL64:<26}{2:>6}{1:>6}  s4 4.0e-06 of 1.0e-06",
        f"{E.PORT32_PORT64:<26}{1:>6}{1:>6}  s5 not compared",
        "",
        f"{'stage':<44}{'free':>9}{'forced':>9}{'limit':>9}",
        *table,
        "",
        "elements of it that break the tolerance: row 0",
        "",
        "worst elements of it, fed the original's values: port, original",
        *(f"  [0, {n}]  {1 + n}  1" for n in range(ELEMENTS)),
        "",
        "2 parameters matched, 2 stages aligned; without a partner: 0 of the port, 1 of the "
        "original",
        "not compared: output m: why",
        "in bfloat16 out is off by 2.0e-03 in the port and 1.0e-03 in the original",
        "note: parameter r: rounded once",
        "note: one",
        "note: two",
    ]


def test_a_text_without_a_culprit_shows_the_first_stages():
    stages = tuple(Stage(f"s{n}", 0.0, 0.0, 1.0) for n in range(9))
    text = reported([row("grad/w")], Place(E.PORT64_ORIGINAL64, stages)).text()
    assert [n for n in range(9) if f"\ns{n} " in text] == list(range(AROUND + 1))
    assert "<- here" not in text and "worst elements" not in text
    held = reported([row("s0", Verdict.PASS)], Place(E.PORT64_ORIGINAL64, stages)).text()
    assert "forced" not in held and held.startswith("port: holds; 1 gates\n")


def test_an_operation_is_shown_with_its_lines():
    bad = Stage("p", 1.0, 1.0, 0.5)
    place = Place(E.PORT64_ORIGINAL64, (bad,), operation=Unknown(("f.py:3 (g)", "h.py:1 (k)")))
    report = reported([row("p")], place)
    assert report.sentence() == "port: diverges at p (the original's o), f.py:3 (g)"
    assert (
        "first operation of the port that the original does not do:\n  f.py:3 (g)\n  h.py:1 (k)"
        in report.text()
    )
    masked = replace(place, operation=Unknown(("f.py:3 (g)",), ("m.py:7 (n)",)))
    report = reported([row("p")], masked)
    assert report.sentence() == "port: diverges at p (the original's o), m.py:7 (n)"
    assert (
        "it applies a mask that the original does not have, made here:\n  m.py:7 (n)"
        in report.text()
    )


NO_PLACE = Place(E.PORT64_ORIGINAL64, ())
SENTENCES = {
    "weights first": (
        [row("s"), row("weights", metric="unmatched", note="not the original's: w")],
        "the parameters differ; not the original's: w",
    ),
    "no weights that hold": (
        [row("s"), row("weights", Verdict.PASS, metric="unmatched", note="rounded")],
        "s fails on port64:original64; no stage was found that is wrong by itself",
    ),
    "then what does not repeat": (
        [row("s"), row("t", note="the port is not deterministic: x")],
        "the port is not deterministic: x",
    ),
    "a derivative and a stage": (
        [row("grad/w", stage=-1), row("s", stage=3)],
        "s fails on port64:original64; no stage was found that is wrong by itself",
    ),
    "with its note": (
        [row("s", note="expected shape")],
        "s fails on port64:original64; no stage was found that is wrong by itself: expected shape",
    ),
    "not comparable": (
        [row("s", Verdict.NOT_COMPARABLE, note="no tolerance")],
        "s was not compared: no tolerance",
    ),
    "no output": ([row(NO_OUTPUT, Verdict.NOT_COMPARABLE, note="none at all")], "none at all"),
    "derivatives alone": (
        [row("grad/b.x"), row("grad/a.x")],
        "every stage holds, derivatives do not: b.x, a.x",
    ),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_a_sentence_says_the_gravest_first(name: str):
    rows, told = SENTENCES[name]
    report = reported(rows, NO_PLACE)
    assert report.sentence() == f"port: {told}" and not report.holds


@pytest.mark.parametrize("count", [1, 2, 4])
def test_parameters_in_one_anothers_place_are_counted_in_the_sentence(count: int):
    """They explain every stage that is wrong, so that none is named."""
    names = [f"w{n}" for n in range(count)]
    place = Place(WIDE[0], (Stage("p", 1.0, 1.0, 0.5),))
    report = reported([row("p")], place, misplaced={name: f"holds {name}" for name in names})
    more = {1: "", 2: " and 1 more", 4: " and 3 more"}[count]
    assert report.sentence() == (
        f"port: the conversion is wrong, not the code: parameter w0{more}: holds w0"
    )
    assert report.hints == tuple(f"parameter {name}: holds {name}" for name in names)
    unmatched = row("weights", metric="unmatched", note="not the original's: x")
    both = replace(report, measurements=(*report.measurements, unmatched))
    assert both.sentence() == "port: the parameters differ; not the original's: x"


def test_results_left_out_are_listed_by_what_they_are_and_why():
    """One reason may hold for a result and for a derivative, which are two lines."""
    ledger = (
        Entry("out", Role.OUTPUT, "out", True),
        Entry("a", Role.OUTPUT, reason="why"),
        Entry("w", Role.GRADIENT, reason="why"),
        Entry("b", Role.OUTPUT, reason="why"),
        Entry("c", Role.OUTPUT, reason="else"),
    )
    lines = reported([row("a", Verdict.PASS)], ledger=ledger).text().split("\n")
    assert [line for line in lines if line.startswith("not compared")] == [
        "not compared: output a, b: why",
        "not compared: gradient w: why",
        "not compared: output c: else",
    ]


@pytest.mark.parametrize("count", [NAMES, NAMES + 1])
def test_results_left_out_are_counted_where_they_are_not_listed(count: int):
    ledger = tuple(Entry(f"r{n}", Role.OUTPUT, reason="why") for n in range(count))
    text = reported([row("a", Verdict.PASS)], ledger=ledger).text()
    more = " and 1 more" if count > NAMES else ""
    names = ", ".join(f"r{n}" for n in range(NAMES))
    assert f"not compared: output {names}{more}: why" in text


def test_the_row_furthest_is_one_of_relative_errors():
    """A count of flips or of whole numbers has no share of a tolerance that it could use."""
    near, far = row("near", Verdict.PASS, value=1e-7), row("far", Verdict.PASS, value=5e-7)
    flips = row("flips", metric="top1_flips", value=3.0, tolerance=0.0)
    report = reported([near, far, flips])
    assert report.worst(WIDE[0]) is far and report.worst(WIDE[1]) is None
    # What is NaN, or has no tolerance, is furthest of all, in the table too.
    for lost in (
        row("lost", value=math.nan),
        row("lost", Verdict.NOT_COMPARABLE, tolerance=math.nan),
    ):
        report = reported([near, lost, far])
        assert report.worst(WIDE[0]) is lost
        assert f"{E.PORT64_ORIGINAL64:<26}{3:>6}{1:>6}  lost " in report.text()


def test_lines_of_an_operation_are_shown_with_what_is_around_them(tmp_path):
    (tmp_path / "seen.py").write_text("a = 1\nb = 2\nc = 3\n", encoding="utf-8")
    at = f"{tmp_path / 'seen.py'}:2 (f)"
    place = Place(WIDE[0], (Stage("p", 1.0, 1.0, 0.5),), operation=Unknown((at,)))
    text = reported([row("p")], place).text()
    [line] = place.lines
    assert f"\n\n{at}\n  " + line.excerpt.replace("\n", "\n  ") in text
    assert "b = 2" in line.excerpt


def test_what_was_not_compared_is_no_failure_and_a_port_that_holds_has_notes_too():
    report = reported([row("s"), row("t", Verdict.NOT_COMPARABLE), row("u", Verdict.PASS)])
    assert [m.quantity for m in report.failures] == ["s"]
    pairs = (Pair("r", copied("r", (2,)), Means.ROUNDED, "rounded once"),)
    held = reported([row("u", Verdict.PASS)], matching=Matching(pairs), notices=("one",))
    assert held.holds and held.text().endswith("note: parameter r: rounded once\nnote: one")


def test_suspects_are_named_where_no_stage_is_wrong_by_itself_too():
    report = reported([row("grad/w")], NO_PLACE, misplaced={"w": "holds v"})
    assert report.culprit is None and report.hints == ("parameter w: holds v",)


def test_a_contract_has_each_gate_once_and_no_more():
    rows = [row("s"), row("t", Verdict.PASS), row("s"), row("s", Verdict.INFO, metric="cosine")]
    assert [gate.quantity for gate in reported(rows).contract] == ["s", "t"]


def test_a_port_that_holds_has_no_culprit_and_stages_are_no_derivatives():
    """A stage may be off by itself within the tolerances of all gates."""
    place = Place(WIDE[0], (Stage("p", 1.0, 1.0, 0.5),))
    assert reported([row("p", Verdict.PASS)], place).culprit is None
    wrong = reported([row("p"), row("grad/w")], place)
    assert wrong.culprit is place.stages[0] and wrong.wrong_derivatives == ("w",)


@pytest.mark.parametrize("count", [NAMES, NAMES + 1])
def test_names_that_are_not_listed_are_counted(count: int):
    sentence = reported([row(f"grad/w{n}") for n in range(count)], NO_PLACE).sentence()
    assert (" and 1 more" in sentence) == (count > NAMES) and "and 0 more" not in sentence
    assert f"w{NAMES - 1}" in sentence and f"w{NAMES}" not in sentence


def test_no_result_is_no_success():
    report = reported([row("s", Verdict.PASS)], ledger=(Entry("x", Role.OUTPUT, reason="why"),))
    assert not report.holds
    assert report.sentence() == "port: no result of the original was compared"


def test_wrong_derivatives_say_where_to_look():
    stages = tuple(Stage(n, 0.0, 0.0, 0.5) for n in ("m.a", "m.b", "m.c", "m.d"))
    wrong = [row("grad/m.a.kernel"), row("grad/m.b.kernel")]
    right = [row(f"grad/m.{n}.kernel", Verdict.PASS) for n in "cd"]

    def told(*rows):
        return reported([*rows], Place(WIDE[0], stages)).sentence()

    head = "port: every stage holds, derivatives do not: m.b.kernel, m.a.kernel"
    assert told(*wrong, *right) == f"{head}; look at what uses m.b; those from m.c on hold"
    assert told(*wrong, right[1]) == f"{head}; look at what uses m.b; those from m.d on hold"
    # What was not measured is not said to hold.
    unknown = row("grad/m.c.kernel", Verdict.NOT_COMPARABLE)
    assert told(*wrong, unknown, right[1]) == (
        f"{head}; look at what uses m.b; those from m.d on hold"
    )
    # One that the same stage uses says nothing of what comes after it.
    beside = row("grad/m.b.bias", Verdict.PASS)
    assert told(*wrong, beside, *right) == f"{head}; look at what uses m.b; those from m.c on hold"
    assert told(*wrong, beside) == f"{head}; look at what uses m.b"
    # A parameter that is wrong on one edge is no right one, and one used before says nothing.
    assert told(*wrong, row("grad/m.a.bias", Verdict.PASS)) == f"{head}; look at what uses m.b"
    # Of many, eight are named.
    many = told(*(row(f"grad/m.a.w{i}") for i in range(10)))
    assert many.startswith("port: every stage holds, derivatives do not: m.a.w0, ")
    assert "m.a.w7 and 2 more; look at what uses m.a" in many and "m.a.w8" not in many


@pytest.mark.parametrize(
    ("parameter", "index"),
    [
        ("m.1.w", 2),  # not of m.10
        ("m.10.w", 1),
        ("m.10.deep.er.w", 1),  # of the nearest module that has stages
        ("m.2.w", 0),
        ("n.w", 3),
        ("other.w", -1),
        ("w", -1),
        # A stage of the parameter's own name, one whose name is longer than the module's, and one
        # of a module of that name elsewhere.
        ("more.w", -1),
        ("out", -1),
        ("long.w", -1),
    ],
)
def test_the_first_use_of_a_parameter_is_a_stage_of_its_module(parameter: str, index: int):
    assert (
        first_use(parameter, ["m", "m.10.out", "m.1.out", "n[0]", "m.1.more", "out", "long_er"])
        == index
    )


def test_suspects_are_named_where_something_is_wrong_alone():
    """A parameter may be both untransposed and unlike its kind: neither note hides the other."""
    stages = tuple(Stage(n, 0.0, 1.0 if n == "m.b" else 0.0, 0.5) for n in ("m.a", "m.b", "m.c"))
    notes = {"m.b.kernel": "is transposed", "m.c.kernel": "too", "else.kernel": "and this"}
    report = reported([row("m.b")], Place(WIDE[0], stages), untransposed=notes)
    lines = [line for line in report.text().split("\n") if line.startswith("parameter")]
    assert lines == [f"parameter {name}: {note}" for name, note in notes.items()]
    turn = transposition((4, 4), (1, 0))
    lies = [identity((4, 4)), turn, turn, turn]
    pairs = tuple(
        Pair(f"m.{n}.kernel", laid_out(f"h.{n}.weight", each), Means.VALUE)
        for n, each in zip("bcde", lies, strict=True)
    )
    both = reported(
        [row("m.b")], Place(WIDE[0], stages), untransposed=notes, matching=Matching(pairs)
    )
    line, *_ = [line for line in both.text().split("\n") if line.startswith("parameter")]
    assert line == (
        "parameter m.b.kernel: is transposed; unchanged, where 3 of its kind are transposed (1, 0)"
    )
    # The note of a parameter in another's place says what the pair's layout says, and more.
    moved = reported(
        [row("m.b")],
        Place(WIDE[0], stages),
        misplaced={"m.b.kernel": "holds m.c's"},
        matching=Matching(pairs),
    )
    assert moved.hints == ("parameter m.b.kernel: holds m.c's",)
    right = reported([row("m.b", Verdict.PASS)], Place(WIDE[0], stages), untransposed=notes)
    assert "parameter m.b" not in right.text()


def test_floors_add_as_independent_errors():
    assert together({"a": 3.0, "b": 1.0}, {"a": 4.0}) == pytest.approx(
        {"a": 5.0, "b": math.nan}, nan_ok=True
    )
    assert together() == {} and narrowed({"a": 3.0}) == {"a": 3.0 * NARROWING}


def gates(quantity: str, *rows: dict) -> list[Measurement]:
    known = {"edge": E.PORT32_ORIGINAL32, "metric": "rel_l2", "verdict": Verdict.PASS, "value": 0.0,
             "tolerance": 1e-6}  # fmt: skip
    return [measurement(quantity=quantity, **(known | each)) for each in rows]


@pytest.mark.parametrize(
    ("rows", "compared"),
    [
        ([{}], True),
        ([{"verdict": Verdict.FAIL}], True),
        ([{"verdict": Verdict.INFO}], False),
        ([{"verdict": Verdict.NOT_COMPARABLE}], False),
        ([{"verdict": Verdict.FAIL, "tolerance": math.nan}], False),
        ([{"verdict": Verdict.FAIL, "tolerance": math.inf}], False),
        ([{"metric": "unequal"}], True),
        ([{"metric": "cosine"}], False),
        ([{"edge": E.PORT32_PORT64}], False),
        ([{"edge": E.ORIGINAL32_ORIGINAL64}], False),
        ([{"edge": E.PORTBF16_PORT64}], False),
        ([{"verdict": Verdict.NOT_COMPARABLE}, {}], True),
        ([], False),
    ],
)
def test_a_result_was_compared_by_a_gate_between_the_sides(rows, compared: bool):
    trace = Trace({"o": np.ones(2)}, ("o",), gradients={"w": np.ones(2)})
    matching = Matching((Pair("p.w", copied("w", (2,)), Means.VALUE),))
    made = [*gates("p", *rows), *gates("grad/p.w", *rows)]
    entries = ledger_of(made, trace, {"o": "p"}, matching, left_out={})
    assert [e.compared for e in entries] == [compared, compared]
    assert [e.port for e in entries] == ["p", "p.w"]
    assert [e.name for e in entries] == ["o", "w"]
    assert set(BETWEEN) == {WIDE[0], E.ORIGINAL32_PORT64, E.PORT32_ORIGINAL64, WIDE[3]}


def test_every_parameter_that_is_not_trained_is_in_the_ledger():
    trace = Trace({}, (), frozen=("w", "b"), updated=("m", "v"))
    entries = ledger_of([], trace, {}, Matching(()), left_out={})
    assert [(e.name, e.role) for e in entries] == [
        ("m", Role.STATE), ("v", Role.STATE), ("w", Role.GRADIENT), ("b", Role.GRADIENT),
    ]  # fmt: skip


def test_a_parameter_in_two_parts_was_compared_where_both_were():
    trace = Trace({}, (), gradients={"w": np.ones(2), "lone": np.ones(2)})
    matching = Matching(
        (
            Pair("a", copied("w", (2,)), Means.VALUE),
            Pair("b", copied("v", (2,)), Means.VALUE, also=("w",)),
        )
    )
    both = [*gates("grad/a", {}), *gates("grad/b", {})]
    first, lone = ledger_of(both, trace, {}, matching, left_out={})
    assert first == Entry("w", Role.GRADIENT, "a, b", True)
    assert lone == Entry("lone", Role.GRADIENT, reason="the port has no counterpart of it")
    half = [
        *gates("grad/a", {}),
        *gates("grad/b", {"verdict": Verdict.INFO, "note": "0 everywhere"}),
    ]
    first, _ = ledger_of(half, trace, {}, matching, left_out={})
    assert first == Entry("w", Role.GRADIENT, "a, b", reason="0 everywhere")
    # A result without a partner has its rows under its own name.
    alone = ledger_of(gates("o", {}), Trace({}, ("o",)), {}, matching, left_out={"z": "left out"})
    assert alone == (Entry("o", Role.OUTPUT, "", True), Entry("z", Role.OUTPUT, reason="left out"))


def test_the_reason_is_the_first_note_of_any_gate():
    """The gate of another edge may have none."""
    bad = {"verdict": Verdict.NOT_COMPARABLE}
    edges = zip((WIDE[3], E.ORIGINAL32_PORT64, WIDE[0]), ("", "infinite", "other"), strict=True)
    rows = gates("o", *({**bad, "edge": edge, "note": note} for edge, note in edges))
    [entry] = ledger_of(rows, Trace({}, ("o",)), {}, Matching(()), left_out={})
    assert entry == Entry("o", Role.OUTPUT, reason="infinite")


def test_no_result_makes_a_row_that_cannot_pass():
    comparison = Comparison(
        Work("c", "h", ()), WIDE[3], PortBounds({}), "float32", kinds=stage_kind
    )
    compared = [Entry("a", Role.OUTPUT, "a", True)]
    rows = gates("a", {})
    assert require_an_output(rows, compared, comparison) == rows
    without = [
        Entry("b", Role.OUTPUT, reason="why"),
        Entry("a", Role.OUTPUT, reason="because"),
        Entry("w", Role.GRADIENT, reason="other"),
    ]
    *_, last = require_an_output(rows, without, comparison)
    assert (last.quantity, last.metric, last.verdict) == (
        NO_OUTPUT, "compared", Verdict.NOT_COMPARABLE,
    )  # fmt: skip
    assert last.note == "no result of the original was compared: because; why"
    *_, none = require_an_output([], [Entry("w", Role.GRADIENT, "w", True)], comparison)
    assert none.note == "no result of the original was compared: it has none"


def hidden_by_model(actual, expected, bound, absolute, factor, squares, float64):
    """Return (count, below, error, bound) of the layer of small elements that is worst."""
    found, roundoff = [], 2.0**-53 if float64 else 2.0**-24
    while True:
        small = np.abs(expected) < bound
        n = int(np.count_nonzero(small))
        if n in (0, expected.size):
            break
        norm = math.sqrt(sum(float(e) ** 2 for e in expected[small]))
        floor = math.sqrt(float(squares[small].sum()))
        passes = max(absolute * norm, STUDENT * factor * floor, ROUNDINGS * roundoff * math.sqrt(n))
        error = math.sqrt(sum(float(d) ** 2 for d in (actual - expected)[small]))
        found.append((n, bound, error, passes))
        if passes >= bound / 2:
            break
        bound = passes
    return max(found, key=lambda each: each[2] / each[3], default=None)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("float64", [False, True])
def test_hidden_elements_are_layers_of_what_the_bound_lets_pass(seed: int, float64: bool):
    rng = np.random.default_rng(seed)
    expected = rng.normal(size=(4, 6)) * 10.0 ** rng.integers(-6, 12, (4, 6))
    actual = expected * (1 + 1e-6 * rng.normal(size=(4, 6)))
    squares = (1e-7 * expected) ** 2 * rng.random((4, 6))
    bound = float(10.0 ** rng.integers(-2, 8))
    absolute, factor = float(rng.choice([0.0, 3e-7, 1e-3])), float(rng.choice([1.0, 6.0]))
    found = hidden(
        actual, expected, bound,
        absolute=absolute, factor=factor, mean_squares=squares, float64=float64,
    )  # fmt: skip
    model = hidden_by_model(actual, expected, bound, absolute, factor, squares, float64)
    if model is None:
        assert found is None
        return
    assert found is not None
    assert (found.count, found.below, found.error, found.bound) == pytest.approx(model)
    assert found.fraction == pytest.approx(model[2] / model[3])
    assert found.text() == (
        f"{found.count} elements below {found.below:.1e}, which larger ones hide, are off by "
        f"{found.error:.1e} (L2), and rounding explains {found.bound:.1e}"
    )


def test_a_pair_of_other_shapes_and_a_mask_are_explained():
    """By the results of both sides, in the shapes that they were returned in."""

    def side(name: str, x: np.ndarray) -> Side:
        made = Side()
        made.run = lambda how=None: Trace({name: x}, (name,))  # pyright: ignore[reportAttributeAccessIssue]
        return made

    flat = np.array([1.0, 2.0, np.inf, 4.0, 5.0, 6.0])
    turned = Layout((2, 3), (2, 3), (1, 0), (3, 2))
    cases = (
        (flat.reshape(2, 3), flat.reshape(2, 3).T, turned, 0.0, 1.0,
         "expected shape (2, 3), received (3, 2); the values agree when transposed (1, 0)"),
        (flat.reshape(2, 3), flat.reshape(2, 3).T, turned, 2 * EQUAL, 1.0,
         "expected shape (2, 3), received (3, 2)"),
        (flat, flat, identity((6,)), 0.0, math.nan,
         "infinite: set Port(masked_outputs=True) if these are masks"),
        (flat, flat, identity((6,)), 0.0, 1.0, ""),
        (flat[3:], flat[3:], identity((3,)), 0.0, math.nan, ""),
    )  # fmt: skip
    for theirs, ours, layout, distance, value, note in cases:
        pairs = (StagePair("p", "o", layout, AlignedBy.VALUE, distance),)
        runs = [SideRuns(side(n, x), None) for n, x in (("o", theirs), ("p", ours))]
        both = _Both(Correspondence(Alignment(pairs, {}, {}), Matching(())), *runs)
        found = both._explained(row("p", value=value))
        assert found.note == note
        passing = row("p", Verdict.PASS)
        assert both._explained(passing) is passing
    missing = both._explained(row("z", note="missing in port64"))
    assert missing.note == "the original returns it and the port does not"
    computed = both._explained(row("o", note="missing in port64"))
    assert (
        computed.note
        == "the original returns it and the port computes it as p and does not return it"
    )
    assert both._explained(row("z", note="other")).note == "other"


def test_unmatched_parameters_of_the_original_are_listed_once():
    runs = SideRuns(Side(), None)
    matching = Matching((), (Unmatched("a", (2,)), Unmatched("b", (2,))))
    both = _Both(Correspondence(Alignment((), {}, {}), matching), runs, runs)
    [notice] = both.alone()
    assert notice.startswith("no parameter of the port holds the original's a, b:")
    none = _Both(Correspondence(Alignment((), {}, {}), Matching(())), runs, runs)
    assert none.alone() == []
    runs.differentiate({"out": np.ones((1, 4))})
    assert none.alone() == []


@pytest.mark.parametrize(
    ("quantity", "twice"),
    [("layers.0.out", True), ("state/cache", True), ("grad/w", False), ("bar/layers.0", False)],
)
def test_what_each_side_computes_twice_is_deterministic(quantity: str, twice: bool):
    """Derivatives are computed once."""
    unmarked = row(quantity, deterministic=False)
    assert _repeated(unmarked) == replace(unmarked, deterministic=twice)


def test_only_what_was_not_measured_of_the_original_is_taken_from_the_port(monkeypatch):
    """A capture may answer one kind of rounding and not the other."""

    def measured(value: float, *kinds: Rounding) -> Noise:
        responses = {kind: {"s": value} for kind in kinds}
        return Noise({}, responses, {kind: {"s": np.array(value)} for kind in kinds})

    sides = {"original": measured(1.0, Rounding.OPERATIONS), "port": measured(2.0, *Rounding)}
    found = _completed(sides)
    assert found["port"] is sides["port"]
    expected = {Rounding.OPERATIONS: 1.0, Rounding.CONSTANTS: 2.0}
    for part in (found["original"].responses, found["original"].squares):
        assert {kind: float(values["s"]) for kind, values in part.items()} == expected


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("exchanged", [{}, {"w": "the other one's"}])
def test_exchanged_parameters_are_no_transposed_ones_as_well(exchanged, again, monkeypatch):
    """A port that was itself compared with exchanged parameters is not searched for others."""
    module = sys.modules[compare.__module__]
    monkeypatch.setattr(module, "misplaced", lambda *_: exchanged)
    monkeypatch.setattr(module, "untransposed", lambda *_: {"v": "fits transposed"})
    runs, place = SideRuns(Side(), None), Place(WIDE[0], ())
    both = _Both(Correspondence(Alignment((), {}, {}), Matching(())), runs, runs)
    found = both.misconverted([row("out"), row("s", Verdict.PASS)], ported(), place, again)
    assert found == (({}, exchanged) if again and exchanged else ({"v": "fits transposed"}, {}))
    assert both.misconverted([row("s", Verdict.PASS)], ported(), place, again) == ({}, {})


@pytest.mark.parametrize("kind", [Kind.BLOCK, Kind.GRADIENT, Kind.LOGITS])
def test_other_metrics_have_the_bound_of_the_table(kind: Kind):
    bounds = PortBounds({})
    for edge in E:
        expected = 0.0 if kind is Kind.LOGITS else math.nan
        assert bounds.absolute(edge, kind, "top1_flips") == pytest.approx(expected, nan_ok=True)
    assert math.isnan(bounds.absolute(WIDE[3], kind, "unknown"))


def test_a_derivative_by_a_tied_parameter_was_compared_with_that_by_the_one_it_is_tied_to():
    """Both are of one parameter of the port."""
    zeros = np.zeros(2)
    made = Pair("w", copied("table", (2,)), Means.VALUE, also=("head",))
    trace = Trace({}, (), gradients={"table": zeros, "head": zeros, "other": zeros})
    entries = ledger_of(gates("grad/w", {}), trace, {}, Matching((made,)), left_out={})
    assert [(e.name, e.port, e.compared) for e in entries] == [
        ("table", "w", True),
        ("head", "w", True),
        ("other", "", False),
    ]
