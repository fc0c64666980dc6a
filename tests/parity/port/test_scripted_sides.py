"""Runs, floors, bounds and places of sides whose every number is written down: no program runs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from parity.engine.measure.compare import Comparison, Work
from parity.engine.measure.localize import Stage
from parity.engine.measure.measurement import Kind, Verdict
from parity.engine.measure.quantity import stage_kind
from parity.engine.measure.rounding_noise import UNIT_ROUNDOFF
from parity.engine.pairing import parameter_pairs
from parity.engine.pairing.alignment import AlignedBy, Alignment
from parity.engine.pairing.constructions import copied
from parity.engine.pairing.layouts import Layout
from parity.engine.pairing.parameter_pairs import Matching, Means, Unmatched
from parity.engine.pairing.stage_pairs import Pair
from parity.port import localisation
from parity.port.compare import _Both, _weights
from parity.port.correspondence import Correspondence
from parity.port.localisation import ROOM, Place, localise
from parity.port.narrow import NarrowStage, compare_narrow
from parity.port.rounding_floors import (
    COSTLY,
    SEEDS,
    Noise,
    PortBounds,
    costly,
    floors_of,
    norms_of,
    stage_bound,
)
from parity.port.side_runs import MASK, SideRuns
from parity.port_tolerances import NARROWING, PortEdge
from parity.sides.side import Precision, Rounding, Run, SideError, Trace

FOUR = np.array([3.0, 4.0])
"""Two elements of norm 5."""
E = PortEdge


@dataclass
class Scripted:
    """A side that answers as a test says, and keeps what it was asked."""

    answer: Callable[[Run], Trace]
    kind: str = "scripted"
    asked: list[Run] = field(default_factory=list)

    def parameters(self) -> dict[str, np.ndarray]:
        return {}

    def inputs(self) -> dict[str, np.ndarray]:
        return {}

    def run(self, how: Run = Run()) -> Trace:  # noqa: B008
        self.asked.append(how)
        return self.answer(how)


def trace(outputs=("out",), **stages) -> Trace:
    return Trace({n: np.asarray(x, np.float64) for n, x in stages.items()}, outputs)


def no_float64(how: Run) -> None:
    if how.precision is Precision.FLOAT64:
        raise SideError("no float64")


def test_a_side_runs_twice_in_float32_once_in_float64_and_again_with_derivatives():
    side = Scripted(lambda how: trace(out=[1.0 + (how.precision is Precision.FLOAT64)]))
    runs = SideRuns(side, None, "port")
    assert side.asked == [Run(), Run(), Run(Precision.FLOAT64)]
    assert runs.best is runs.wide and runs.best.stages["out"] == 2.0
    assert runs.name == "the port (scripted)" and runs.notices == ()
    side.asked.clear()
    along = {"out": np.ones(1)}
    runs.differentiate(along)
    runs.shared = frozenset({"w"})
    fed = {"a": np.zeros(1)}
    runs.moved(Rounding.CONSTANTS, 3)
    runs.moved(Rounding.OPERATIONS, 2, fed)
    exact = Precision.FLOAT64
    assert side.asked == [
        Run(cotangents=along),
        Run(exact, cotangents=along),
        Run(exact, Rounding.CONSTANTS, 3, shared=runs.shared, cotangents=along),
        # What is fed has no derivatives.
        Run(exact, Rounding.OPERATIONS, 2, forced=fed, shared=runs.shared),
    ]


def test_the_best_run_of_a_side_without_float64_is_that_in_float32():
    def answer(how):
        no_float64(how)
        return trace(out=[1.0])

    side = Scripted(answer)
    runs = SideRuns(side, None)
    assert runs.wide is None and runs.best is runs.narrow
    assert runs.notices == ("scripted does not run in float64: no float64",)
    side.asked.clear()
    runs.differentiate({})
    assert side.asked == [Run(cotangents={})]


@pytest.mark.parametrize("masked_outputs", [False, True])
def test_a_mask_counts_as_its_sign_and_in_results_only_where_the_case_says_so(masked_outputs):
    values = np.array([MASK, -2 * MASK, 0.5 * MASK, np.inf, 1.0])
    side = Scripted(lambda how: trace(scores=values, plain=[2.0], out=values))
    runs = SideRuns(side, None, masked_outputs=masked_outputs)
    replaced = np.array([1.0, -1.0, 0.5 * MASK, np.inf, 1.0])
    assert runs.masked == ({"scores", "out"} if masked_outputs else {"scores"})
    assert np.array_equal(runs.best.stages["scores"], replaced)
    assert np.array_equal(runs.best.stages["out"], replaced if masked_outputs else values)
    # What a stage of the other side is fed is as it was computed.
    assert np.array_equal(runs.best.whole["scores"], values)
    # Rounding may turn the lowest number into an infinity.
    replaced[3] = 1.0
    for kind in Rounding:
        assert np.array_equal(runs.moved(kind, 0).stages["scores"], replaced)


@dataclass
class Summing(Scripted):
    """A side with a parameter that is a sum, whose runs return what it holds."""

    held: tuple[float, ...] = (0.0, 0.0)
    dtype: Any = np.float32

    def parameters(self):
        return {"sum": np.zeros(2, self.dtype)}

    def run(self, how: Run = Run()) -> Trace:  # noqa: B008
        return trace(out=self.held)

    def with_exact(self, values):
        return replace(self, held=tuple(values["sum"].tolist()))


@pytest.mark.parametrize(
    ("dtype", "unit"), [(np.float32, UNIT_ROUNDOFF), (ml_dtypes.bfloat16, 2.0**-8)]
)
def test_a_side_runs_with_exact_sums_and_moves_them_whether_or_not_it_is_fed(dtype, unit):
    runs = SideRuns(Summing(trace, dtype=dtype), None, sums={"sum": FOUR})
    assert runs.narrow.stages["out"].tolist() == FOUR.tolist()
    for forced in (None, {"a": FOUR}):
        off = [runs.moved(Rounding.OPERATIONS, n, forced).stages["out"] / FOUR - 1 for n in (0, 1)]
        assert all(np.abs(each) == pytest.approx(unit) for each in off)
        signs = [np.sign(runs.moved(Rounding.OPERATIONS, n, forced).stages["out"] / FOUR - 1)
                 for n in range(8)]  # fmt: skip
        assert any(a != b for a, b in signs), "each element has a sign of its own"
        assert runs.moved(Rounding.CONSTANTS, 0, forced).stages["out"].tolist() == FOUR.tolist()


def test_a_result_that_one_run_alone_returns_stays_left_out():
    def answer(how: Run) -> Trace:
        both = trace(("out", "more"), out=FOUR, more=FOUR)
        return both if how.precision is Precision.FLOAT32 else trace(("out",), out=FOUR)

    runs = SideRuns(Scripted(answer), None, left_out=("more", "out"))
    assert runs.dropped == {"out": "out", "more": "more"}


def test_a_run_that_may_be_fed_computes_no_derivatives_though_nothing_is_fed():
    side = Scripted(lambda how: trace(out=FOUR))
    runs = SideRuns(side, None)
    runs.differentiate({"out": FOUR})
    for forced, derivatives in ((None, True), ({}, False), ({"a": FOUR}, False)):
        runs.moved(Rounding.OPERATIONS, 0, forced)
        assert (side.asked[-1].cotangents is not None) is derivatives


def test_floors_are_of_the_runs_that_are_asked_for():
    asked: list[int] = []

    def moved(seed: int) -> dict[str, np.ndarray]:
        asked.append(seed)
        return {"x": FOUR}

    assert floors_of({"x": FOUR}, moved, (5, 7)) == {"x": 0.0} and asked == [5, 7]


def test_what_is_not_valid_is_zero_in_stages_and_whole_numbers():
    valid = np.array([[True, False, True]])
    full = trace(outputs=(), stage=[[1.0, 2.0, 3.0]])
    side = Scripted(lambda how: replace(full, exact={"ids": np.array([[4, 5, 6]])}))
    best = SideRuns(side, valid).best
    assert best.stages["stage"].tolist() == [[1.0, 0.0, 3.0]]
    assert best.whole["stage"].tolist() == [[1.0, 2.0, 3.0]]
    assert best.exact["ids"].tolist() == [[4, 0, 6]]


def test_a_result_that_is_left_out_is_left_out_of_every_part_of_a_run():
    names = ("out", "cache[0]", "cached")
    full = replace(
        trace(names, **dict.fromkeys((*names, "hidden"), 1.0)),
        exact={"cache.ids": np.arange(2), "ids": np.arange(2)},
        unread={"cache.name": "a str", "name": "a str"},
    )
    runs = SideRuns(Scripted(lambda how: full), None, left_out=("cache",))
    assert runs.dropped == dict.fromkeys(("cache[0]", "cache.ids", "cache.name"), "cache")
    best = runs.best
    assert set(best.stages) == {"out", "cached", "hidden"} and best.outputs == ("out", "cached")
    assert set(best.exact) == {"ids"} and set(best.unread) == {"name"}


@pytest.mark.parametrize(
    ("second", "first_other"),
    [
        ({"a": [1.0, np.nan], "b": [2.0]}, None),
        ({"a": [1.0, np.nan], "b": [3.0]}, "b"),
        ({"a": [1.0, np.nan]}, "b"),
        ({"a": [1.0, 1.0], "b": [3.0]}, "a"),
        ({"a": [1.0, np.nan], "b": [2.0], "ids": [7]}, "ids"),
    ],
)
def test_the_first_stage_that_a_second_run_computes_otherwise_is_named(second, first_other):
    def answer(how):
        later = len(side.asked) == 2
        stages = {"a": [1.0, np.nan], "b": [2.0], "ids": [6]} | (second if later else {})
        if later and "b" not in second:
            del stages["b"]
        ids = np.array(stages.pop("ids"))
        return replace(trace(**stages), exact={"ids": ids})

    side = Scripted(answer)
    assert SideRuns(side, None).unrepeatable == first_other


def same(*names: str) -> Correspondence:
    """Stages of one name on both sides, two elements each, that lie alike."""
    lies = Layout((2,), (2,), (0,), (2,))
    pairs = tuple(Pair(name, name, lies, AlignedBy.NAME, 0.0) for name in names)
    return Correspondence(Alignment(pairs, {}, {}), Matching(()))


def test_stages_and_cotangents_go_by_the_other_side_s_names_and_layouts():
    """Only those that were computed: a side may return less than was aligned."""
    turned = Layout((2, 3), (2, 3), (1, 0), (3, 2))
    pairs = tuple(Pair(f"p{n}", f"o{n}", turned, AlignedBy.NAME, 0.0) for n in (1, 2))
    names = Correspondence(Alignment(pairs, {}, {}), Matching(()))
    x = np.arange(6.0).reshape(2, 3)
    found = names.stages({"o1": x, "o9": x})
    assert set(found) == {"p1"} and np.array_equal(found["p1"], x.T)
    back = names.cotangents({"p2": np.ascontiguousarray(x.T), "p9": x})
    assert set(back) == {"o2"} and np.array_equal(back["o2"], x)
    # A program that is handed memory may ask that it is in order.
    assert back["o2"].flags.c_contiguous


ROUNDED, TABLED, KNOWN = 2.0**-10, 2.0**-12, 2.0**-11
"""Relative responses of the port's stages: to its operations, to its tables; to the original's."""


def answering(wrong: dict[Precision, float], can=no_float64, seen: list | None = None):
    """A side whose stage `b` is off by a share of itself; a stage after it adds nothing.

    Args:
        wrong: By precision, how far it is off.
        can: Raises for runs that the side cannot do.
    """

    def answer(how: Run) -> Trace:
        can(how)
        if seen is not None:
            seen.append(how)
        share = {Rounding.OPERATIONS: ROUNDED, Rounding.CONSTANTS: TABLED, None: 0.0}
        moved = FOUR * (1 + share[how.rounding])
        b = moved * (1 + wrong.get(how.precision, 0.0))
        masked = np.array([-MASK, 1.0])
        return trace(a=moved, b=b, scores=masked, out=moved)

    return answer


PLACES = {
    "float64": ({Precision.FLOAT64: 0.5, Precision.FLOAT32: 0.5}, True, E.PORT64_ORIGINAL64, 0.5),
    "float32": ({Precision.FLOAT32: 0.5}, True, E.PORT32_PORT64, 0.5),
    "nowhere": ({}, True, E.PORT64_ORIGINAL64, None),
    "float64 of the port alone": (
        {Precision.FLOAT64: 0.5, Precision.FLOAT32: 0.5},
        False,
        E.ORIGINAL32_PORT64,
        0.5,
    ),
    "float32, and no float64 of the original": (
        {Precision.FLOAT32: 0.5},
        False,
        E.PORT32_PORT64,
        0.5,
    ),
    "nowhere, and no float64 of the original": ({}, False, E.ORIGINAL32_PORT64, None),
    "float64 of the port alone, which is right in float32": (
        {Precision.FLOAT64: 0.5},
        False,
        E.ORIGINAL32_PORT64,
        0.5,
    ),
}


def can_all(how: Run) -> None:
    """A side that runs in any precision."""


@pytest.mark.parametrize("name", PLACES)
def test_a_difference_starts_where_a_stage_is_wrong_fed_the_right_values(name):
    wrong, wide, edge, error = PLACES[name]
    seen: list[Run] = []
    original = SideRuns(Scripted(answering({}, can_all if wide else no_float64)), None)
    port = SideRuns(Scripted(answering(wrong, can_all, seen)), None)
    constants = dict.fromkeys(("a", "b", "scores", "out"), KNOWN)
    seen.clear()
    place = localise(same("a", "b", "scores", "out"), original, port, constants)
    assert place.edge is edge and [s.name for s in place.stages] == ["a", "b", "scores", "out"]
    # The port is fed all but its results and what has masks in it.
    assert all(set(how.forced) == {"a", "b"} for how in seen)
    # Rounding of float64 and the port's tables; of one float32 side its operations alone. The
    # original's tables count where a stage is wrong without them; this one cannot be fed.
    is_wide = edge is E.PORT64_ORIGINAL64
    own = KNOWN if error else 0.0
    floor = math.hypot(TABLED, ROUNDED * NARROWING, own) if is_wide else ROUNDED
    bound = stage_bound(edge, Kind.BLOCK, floor)
    off = {"b": error or 0.0}
    for stage in place.stages:
        if stage.name != "scores":
            assert stage.forced == pytest.approx(off.get(stage.name, 0.0))
            assert stage.free == pytest.approx(off.get(stage.name, 0.0))
            if stage.name == "b" and is_wide and error:
                # Moved against its own truth: the error is in it too.
                continue
            assert stage.tolerance == pytest.approx(bound)
    if error is None:
        assert place.culprit is None and not place.worst and not place.where
        assert place.last_right == place.stages[-1]
    else:
        assert place.culprit is place.stages[1] and place.last_right is place.stages[0]
        [first, *_] = place.worst
        assert (first.index, first.actual, first.expected) == ((1,), 6.0, 4.0) and place.where


def test_a_float32_error_of_the_original_is_none_of_the_port():
    """The port's float32 is compared with its own float64, both fed the original's values."""
    names = ("a", "b", "out")
    original = SideRuns(Scripted(answering({Precision.FLOAT32: 0.25}, can_all)), None)
    port = SideRuns(Scripted(answering({}, can_all)), None)
    place = localise(same(*names), original, port, dict.fromkeys(names, 0.0))
    assert place.culprit is None and place.edge is E.PORT64_ORIGINAL64
    found = localisation._in_float32(port, localisation._Fed.of(same(*names), original, port))
    assert [(s.name, s.free, s.forced) for s in found.stages] == [
        ("a", 0.0, 0.0), ("b", pytest.approx(0.2), 0.0), ("out", 0.0, 0.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("original64", "port64", "off", "edge"),
    [
        (True, True, [*Precision], E.PORT64_ORIGINAL64),
        (True, True, [Precision.FLOAT32], E.PORT32_PORT64),
        (False, True, [*Precision], E.ORIGINAL32_PORT64),
        (False, True, [Precision.FLOAT32], E.PORT32_PORT64),
        (True, False, [*Precision], E.PORT32_ORIGINAL32),
    ],
)
def test_an_error_that_is_carried_on_is_in_a_stage_until_it_is_fed_the_right_values(
    original64: bool, port64: bool, off: list[Precision], edge: PortEdge
):
    """What carries it is right, and shows how far the error reaches."""
    wrong = answering(dict.fromkeys(off, 0.5), can_all if port64 else no_float64)

    def carrying(how: Run) -> Trace:
        stages = wrong(how).stages
        return trace(**stages | ({} if "b" in how.forced else {"out": stages["b"]}))

    names = ("a", "b", "out")
    original = SideRuns(Scripted(answering({}, can_all if original64 else no_float64)), None)
    port = SideRuns(Scripted(carrying), None)
    place = localise(same(*names), original, port, dict.fromkeys(names, 0.0))
    assert place.edge is edge
    found = [(stage.name, stage.free, stage.forced) for stage in place.stages]
    assert found == [("a", 0.0, 0.0), ("b", 0.5, 0.5), ("out", 0.5, 0.0)]


def test_rounding_counts_in_float64_where_no_table_does(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "TABLED", 0.0)
    monkeypatch.setattr(sys.modules[__name__], "ROUNDED", 2.0**-3)
    names = ("a", "out")
    original, port = (SideRuns(Scripted(answering({}, can_all)), None) for _ in range(2))
    place = localise(same(*names), original, port, dict.fromkeys(names, 0.0))
    bound = stage_bound(E.PORT64_ORIGINAL64, Kind.BLOCK, 2.0**-3 * NARROWING)
    assert bound > stage_bound(E.PORT64_ORIGINAL64, Kind.BLOCK, 0.0)
    assert [s.tolerance for s in place.stages] == pytest.approx([bound, bound])


@dataclass
class Telling(Scripted):
    """A side with one operation, of which nothing but the search is scripted."""

    def parameters(self):
        return {"w": 7 * FOUR}

    def operations_of(self, stage, forced):
        return {0: stage}, {0: FOUR}

    def operation_results(self):
        return [FOUR]


@pytest.mark.parametrize("off", [0.5, 1e-10])
def test_operations_are_searched_within_the_tolerance_and_below_the_error(off, monkeypatch):
    """A search that is coarser than the error would find the wrong operation in the original."""
    asked: list[float] = []
    known: list[list[float]] = []

    def first_unknown(operations, values, results, same_within):
        asked.append(same_within)
        known.extend(x.tolist() for x in results)

    monkeypatch.setattr(localisation, "first_unknown", first_unknown)
    original = SideRuns(Telling(answering({}, can_all)), None)
    wrong = {Precision.FLOAT64: off, Precision.FLOAT32: off}
    port = SideRuns(Telling(answering(wrong, can_all)), None)
    monkeypatch.setattr(localisation, "floors_of", lambda *args: dict.fromkeys(("a", "b"), 0.0))
    place = localise(same("a", "b"), original, port, {"a": 0.0, "b": 0.0})
    assert place.culprit is not None and place.culprit.name == "b"
    tolerance = stage_bound(E.PORT64_ORIGINAL64, Kind.BLOCK, 0.0)
    [same_within] = asked
    # A port may transpose or slice what the original uses as it is.
    assert known == [FOUR.tolist(), (7 * FOUR).tolist()]
    assert same_within == pytest.approx(min(ROOM * tolerance, off / ROOM))
    assert (same_within < ROOM * tolerance) == (off < ROOM**2 * tolerance)


def test_a_port_without_float64_is_fed_in_float32_and_has_no_floor():
    seen: list[Run] = []
    original = SideRuns(Scripted(answering({}, can_all)), None)
    port = SideRuns(Scripted(answering({Precision.FLOAT32: 0.5}, no_float64, seen)), None)
    seen.clear()
    place = localise(same("a", "b", "out"), original, port, {})
    assert [(how.precision, set(how.forced)) for how in seen] == [
        (Precision.FLOAT32, {"a", "b"}),
    ]
    bound = stage_bound(E.PORT32_ORIGINAL32, Kind.BLOCK, 0.0)
    assert place == replace(place, edge=E.PORT32_ORIGINAL32)
    assert place.stages == (
        Stage("a", 0.0, 0.0, bound),
        Stage("b", 0.5, 0.5, bound),
        Stage("out", 0.0, 0.0, bound),
    )


def test_the_stage_before_the_first_wrong_one_is_the_last_right_one():
    right, wrong = (Stage(n, 0.0, error, 1.0) for n, error in (("right", 0.5), ("wrong", 2.0)))
    edge = E.PORT64_ORIGINAL64
    assert Place(edge, (right, wrong, right)).last_right is right
    assert Place(edge, (wrong, right)).last_right is None
    assert Place(edge, ()).last_right is None
    late = replace(right, name="late")
    assert Place(edge, (right, late)).last_right is late


def test_the_floor_of_a_stage_is_the_root_mean_square_over_seeds_of_its_relative_change():
    steps = [1.0, 2.0, 3.0, 5.0]
    assert len(steps) == SEEDS
    exact = {"x": np.array([3.0, np.inf, 4.0]), "zero": np.zeros(2)}

    def moved(seed):
        step = steps[seed]
        return {"x": exact["x"] + np.array([step, 0.0, 0.0]), "zero": np.array([0.0, step])}

    square = math.sqrt(sum(s * s for s in steps) / SEEDS)
    assert norms_of(exact) == {"x": 5.0, "zero": 0.0}
    # Relative to the norm of its finite elements, and absolute where that is 0.
    assert floors_of(exact, moved) == pytest.approx({"x": square / 5, "zero": square})


OPERATIONS = {"original": 3.0, "port": 5.0}
TABLES = {"original": 7.0, "port": 11.0}
NORMS = {"original": 2.0, "port": 4.0}
WIDE = (7.0, 11.0, 3.0 * NARROWING, 5.0 * NARROWING)
EVERY = (3.0, 5.0, 7.0, 11.0)
RESPONSES = {
    E.PORT64_ORIGINAL64: (WIDE, "original"),
    E.PORT32_PORT64: ((5.0,), "port"),
    E.ORIGINAL32_ORIGINAL64: ((3.0,), "original"),
    E.ORIGINAL32_PORT64: ((5.0,), "port"),
    E.PORT32_ORIGINAL64: ((3.0,), "original"),
    E.PORT32_ORIGINAL32: (EVERY, "original"),
}
"""By edge, which responses move its two sides apart, and whose norm they are relative to."""


def noise(side: str, norm: float | None = None) -> Noise:
    """Return what rounding does to one quantity, `stage`, of a side."""
    responses = {Rounding.OPERATIONS: OPERATIONS, Rounding.CONSTANTS: TABLES}
    return Noise(
        {"stage": NORMS[side] if norm is None else norm},
        {kind: {"stage": each[side]} for kind, each in responses.items()},
        {kind: {"stage": np.array([each[side] ** 2])} for kind, each in responses.items()},
    )


@pytest.mark.parametrize("edge", RESPONSES)
def test_the_floor_of_an_edge_is_of_what_moves_its_sides_apart(edge):
    responses, reference = RESPONSES[edge]
    bounds = PortBounds.of(noise("original"), noise("port"))
    expected = math.hypot(*responses)
    assert set(bounds.floors) == set(RESPONSES) and not bounds.cancelled[edge]
    assert bounds.scales[edge] == {"stage": NORMS[reference]}
    assert bounds.floors[edge]["stage"] == pytest.approx(expected / NORMS[reference])
    # Likewise of each element, which has no scale.
    squares = bounds._squares(edge, "stage")
    assert squares is not None and squares.tolist() == [pytest.approx(expected**2)]
    assert bounds._squares(edge, "other") is None
    work = Work("port", "hash", ("stage",))
    found = bounds.bound(edge, Kind.BLOCK, work, "stage")
    assert found == stage_bound(edge, Kind.BLOCK, bounds.floors[edge]["stage"])
    assert math.isnan(bounds.bound(edge, Kind.BLOCK, work, "other"))


def test_an_element_in_float64_has_the_float64_rounding_of_both_sides():
    """Without tables, next to which it is nothing: an error of float32's size would hide there."""

    def rounds(side: str) -> Noise:
        squares = {"stage": np.array([OPERATIONS[side] ** 2])}
        return Noise({"stage": 1.0}, squares={Rounding.OPERATIONS: squares})

    bounds = PortBounds.of(rounds("original"), rounds("port"))
    squares = bounds._squares(E.PORT64_ORIGINAL64, "stage")
    assert squares is not None
    assert np.sqrt(squares) == pytest.approx(math.hypot(3.0, 5.0) * NARROWING)


@pytest.mark.parametrize("edge", RESPONSES)
def test_what_is_zero_to_rounding_is_relative_to_its_terms(edge):
    """Over a unit roundoff, the response of what one side rounds is the norm of its terms."""
    responses, _ = RESPONSES[edge]
    bounds = PortBounds.of(noise("original", 0.0), noise("port", 0.0))
    left, right = (each.rstrip("0123456789") for each in edge.sides)
    own = math.hypot(*(OPERATIONS[side] for side in {left, right}))
    assert bounds.cancelled[edge] == {"stage"}
    assert bounds.scales[edge]["stage"] == pytest.approx(own / UNIT_ROUNDOFF)
    floor = math.hypot(*responses) / own * UNIT_ROUNDOFF
    assert bounds.floors[edge]["stage"] == pytest.approx(floor)
    # The rules of float64 have the room of one float32 side, and that of both is twice as wide.
    room = 12.0 if edge is E.PORT32_ORIGINAL32 else 6.0
    found = bounds.bound(edge, Kind.BLOCK, Work("port", "hash", ("stage",)), "stage")
    assert found == pytest.approx(room * floor)


def test_a_side_that_cannot_be_moved_leaves_the_norm_and_the_noise_of_the_other():
    bounds = PortBounds.of(Noise(), noise("port"))
    edge = E.PORT32_ORIGINAL32
    assert bounds.scales[edge] == {"stage": NORMS["port"]}
    assert bounds.floors[edge]["stage"] == pytest.approx(math.hypot(5.0, 11.0) / NORMS["port"])
    # Nothing moved it, so that nobody knows.
    assert bounds.floors[E.ORIGINAL32_ORIGINAL64] == {}


@pytest.mark.parametrize("over", [1.0, 2.0])
def test_a_norm_is_rounding_up_to_the_tolerance_of_float64(over):
    """The room of one float32 side, 6 floors of a stage and 8 of a derivative, in float64."""
    for name, room in (("stage", 6.0), ("grad/w", 8.0)):
        found = Noise({name: over * room * NARROWING}, {Rounding.OPERATIONS: {name: 1.0}})
        assert found.is_rounding(name) == (over == 1.0)
        assert not Noise({name: 1.0}).is_rounding(name)
        assert found.floors(Rounding.OPERATIONS)[name] == pytest.approx(1 / found.norms[name])
        assert found.floors(Rounding.CONSTANTS) == {}
    zero = Noise({"stage": 0.0}, {Rounding.OPERATIONS: {"stage": 3.0, "other": 2.0}})
    assert zero.floors(Rounding.OPERATIONS) == {"stage": 3.0, "other": 2.0}


def test_a_port_that_loses_digits_is_told_from_the_first_stage_where_it_does():
    original = {"first": 1.0, "exact": 0.0, "second": 1.0, "later": 1.0}
    port = {"new": 99.0, "first": COSTLY, "exact": 99.0, "second": 2 * COSTLY, "later": 99.0}
    told = costly(original, port)
    assert told is not None and "16 times" in told and "from second on" in told
    assert costly(original, port | {"second": 1.0, "later": 1.0}) is None
    # In the order of the port.
    told = costly({"late": 1.0, "early": 1.0}, {"early": 99.0, "late": 99.0})
    assert told is not None and "from early on" in told


def narrow_of(port, original, **how):
    work = Work("port", "hash", ("a", "out"))
    edge = E.PORTBF16_PORT64
    comparison = Comparison(work, edge, PortBounds({}), edge.dtype, kinds=stage_kind)
    runs = [SideRuns(Scripted(each), None, **how) for each in (original, port)]
    return compare_narrow(comparison, same("a", "out"), *runs)


def low(off: float, moved: float = 0.0, refuses=lambda how: False, mask: float = 1.0):
    """A side off in bfloat16 by `off` in one of two elements of norm 5, and moved by `moved`."""

    def answer(how: Run) -> Trace:
        if refuses(how):
            raise SideError("no such run")
        if how.precision is not Precision.BFLOAT16 or how.still:
            return trace(a=[np.inf, 1.0], out=FOUR)
        error = off if how.rounding is None else moved
        return trace(a=[np.inf, mask], out=FOUR + np.array([0.0, error]))

    return answer


def test_errors_in_bfloat16_are_relative_to_each_side_s_truth():
    stages, rows, notices = narrow_of(low(1.0, 0.5), low(0.5))
    assert notices == ()
    [masked, out] = stages
    assert out.name == "out" and out.ratio == pytest.approx(2.0)
    assert [out.port, out.original, out.floor] == pytest.approx([0.2, 0.1, 0.1])
    # An infinity that the truth has too is a mask.
    assert (masked.name, masked.port) == ("a", 0.0)
    gates = {m.quantity: m for m in rows if m.metric == "rel_l2"}
    [fact] = [m for m in rows if m.metric == "error_over_original" and m.quantity == "out"]
    assert gates["out"].value == out.port and fact.value == out.ratio
    assert gates["out"].tolerance == pytest.approx(6 * 0.1)
    assert gates["out"].verdict is Verdict.PASS and fact.verdict is Verdict.INFO
    _, rows, _ = narrow_of(low(4.0, 0.5), low(0.5))
    assert {m.quantity: m.verdict for m in rows if m.metric == "rel_l2"}["out"] is Verdict.FAIL


@pytest.mark.parametrize("masked", [False, True])
def test_an_infinity_of_a_result_is_a_mask_in_bfloat16_too_where_the_case_says_so(masked: bool):
    def answer(how: Run) -> Trace:
        return trace(a=FOUR, out=[-np.inf, 1.0])

    stages, rows, _ = narrow_of(answer, answer, masked_outputs=masked)
    [out] = [m for m in rows if m.metric == "rel_l2" and m.quantity == "out"]
    assert out.verdict is (Verdict.PASS if masked else Verdict.FAIL)
    assert (stages[1].port == 0.0) == masked


def test_an_error_over_none_is_infinite_and_is_told():
    _, rows, _ = narrow_of(low(1.0, 0.5), low(0.0))
    [fact] = [m for m in rows if m.metric == "error_over_original" and m.quantity == "out"]
    assert fact.value == math.inf


def test_what_cannot_run_in_bfloat16_is_told_and_the_rest_is_still_compared():
    def bfloat16(how):
        return how.precision is Precision.BFLOAT16

    stages, rows, notices = narrow_of(low(1.0, 0.5), low(0.5, refuses=bfloat16))
    assert notices == ("the original does not run in bfloat16: no such run",)
    assert math.isnan(stages[1].original) and math.isnan(stages[1].ratio)
    assert [(m.quantity, m.metric) for m in rows] == [("a", "rel_l2"), ("out", "rel_l2")]

    def rounded(how):
        return bfloat16(how) and how.rounding is not None

    stages, rows, notices = narrow_of(low(1.0, refuses=rounded), low(0.5))
    assert notices == ("the port's errors in bfloat16 have no tolerance: no such run",)
    assert math.isnan(stages[1].floor)
    assert ("out", "error_over_original") in {(m.quantity, m.metric) for m in rows}
    assert not any(m.metric == "rel_l2" for m in rows if m.quantity == "out")
    # What is no number fails all the same.
    _, rows, _ = narrow_of(low(math.nan, refuses=rounded), low(0.5))
    gates = {m.quantity: m.verdict for m in rows if m.metric == "rel_l2"}
    assert gates == {"out": Verdict.FAIL}
    # What the original does and the port does not is a difference that no gate measured.
    stages, [row], notices = narrow_of(low(1.0, refuses=bfloat16), low(0.5))
    assert (stages, notices, row.verdict) == ((), (), Verdict.NOT_COMPARABLE)
    assert "no such run" in row.note and "bfloat16=False" in row.note
    nothing = narrow_of(low(1.0, refuses=bfloat16), low(0.5, refuses=bfloat16))
    assert nothing == ((), (), ("bfloat16 is not compared: no such run",))
    no_truth = narrow_of(low(1.0, refuses=lambda how: how.precision is Precision.FLOAT64), low(0.5))
    why = "bfloat16 is not compared: the port has no float64 to compare it with"
    assert no_truth == ((), (), (why,))


@pytest.mark.parametrize(
    ("port", "original", "ratio"), [(1.0, 0.5, 2.0), (1.0, 0.0, math.inf), (0.0, 0.5, 0.0)]
)
def test_the_port_s_error_is_over_the_original_s(port, original, ratio):
    assert NarrowStage("x", port, original, 0.0).ratio == ratio
    assert math.isnan(NarrowStage("x", 0.0, 0.0, 0.0).ratio)


def test_a_parameter_that_the_port_lacks_is_told_where_its_derivative_says_that_it_counts():
    """Of values all alike: others show in a stage or are made anew there; no element, no value."""
    values = {
        "bias": np.zeros(3),
        "scale": np.ones(3),
        "idle": np.zeros(3),
        "keys": np.zeros(3),
        "kernel": np.arange(3.0),
        "empty": np.zeros(0),
    }
    gradients = {name: np.ones(x.shape) for name, x in values.items()} | {"idle": np.zeros(3)}
    # An element that does not count leaves those that do.
    gradients["scale"] = np.array([0.0, 1.0, 0.0])
    side = Scripted(lambda how: replace(trace(out=[1.0]), gradients=gradients))
    runs = SideRuns(side, None)
    alone = tuple(Unmatched(name, x.shape) for name, x in values.items())
    both = _Both(Correspondence(Alignment((), {}, {}), Matching((), alone)), runs, runs)
    side.parameters = lambda: values
    # A derivative that is all rounding, of which the original's noise knows.
    [keys] = [name for name in both._measured("original", runs.narrow) if "keys" in name]
    noise = Noise({keys: 0.0}, {Rounding.OPERATIONS: {keys: 1.0}})
    assert both.lost(side, {"original": noise, "port": Noise()}) == ["bias", "scale"]
    assert both.lost(side, {"original": Noise(), "port": noise}) == ["bias", "scale", "keys"]


@pytest.mark.parametrize("lost", [[], ["bias"]])
@pytest.mark.parametrize("more", [(), (Unmatched("extra", (2,)),)])
def test_parameters_are_a_gate_that_names_what_is_lost_and_what_is_not_the_original_s(lost, more):
    work = Work("port", "hash", ())
    bounds = PortBounds({})
    row = _weights(work, bounds, Matching((), (), more), "cpu", lost)
    assert row.value == len(lost) + len(more) and row.metric == "unmatched"
    assert row.verdict is (Verdict.FAIL if row.value else Verdict.PASS)
    notes = ["not the original's: extra"] if more else []
    notes += ["the original's that the port does not have: bias"] if lost else []
    assert row.note == "; ".join(notes)


def test_a_parameter_in_another_order_is_the_original_s_if_everything_else_holds():
    pairs = tuple(
        parameter_pairs.Pair(name, copied(name, (2,)), means)
        for name, means in (("gates", Means.REORDERED), ("near", Means.NEAR), ("w", Means.VALUE))
    )
    for shown, names in ((["gates"], "near"), ([], "gates, near")):
        row = _weights(Work("port", "hash", ()), PortBounds({}), Matching(pairs), "cpu", [], shown)
        assert row.note == f"not the original's: {names}" and row.verdict is Verdict.FAIL
