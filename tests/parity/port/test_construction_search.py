"""Single steps of the search for constructions, on programs of NumPy: nothing is compiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from parity.engine.measure.localize import Stage
from parity.engine.measure.measurement import Verdict
from parity.engine.measure.rounding_noise import UNIT_ROUNDOFF
from parity.engine.pairing.constructions import (
    Construction,
    Piece,
    copied,
    cut,
    laid_out,
    whole,
)
from parity.engine.pairing.layouts import Layout, identity, transposition
from parity.engine.pairing.parameter_pairs import Matching, Means, Pair, Unmatched
from parity.engine.pairing.proposal import MOST_PARTS, SECOND_COPY
from parity.engine.pairing.stage_pairs import Pin
from parity.port import adopt, construction_search
from parity.port.adoption import Adoption
from parity.port.answers import AnswerError
from parity.port.compare import Port
from parity.port.construction_search import (
    CHOICES,
    KEEPS,
    TIED,
    Question,
    Search,
    _differs,
    _equal_inputs,
    _fits,
    _is_numbered,
    _kind,
    _position,
    _turned,
    agree,
)
from parity.port.ledger import Entry, Role
from parity.port.localisation import Place
from parity.port_tolerances import PortEdge
from parity.sides.side import Precision, Rounding, Run, SideError, Trace
from tests.parity.port.test_scripted_reports import reported, row

D = 3
X = np.random.default_rng(1).normal(size=(5, D))
Arrays = dict[str, np.ndarray]
Mark = Callable[[str, np.ndarray], np.ndarray]
Function = Callable[[Arrays, Mark], np.ndarray]


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class Program:
    """A function of parameters, which marks its stages and returns its output."""

    kind = "program"

    def __init__(self, function: Function, held: Mapping[str, np.ndarray], **given: np.ndarray):
        self.function, self.held, self.given = function, {**held}, given

    def parameters(self) -> Arrays:
        return self.held

    def inputs(self) -> Arrays:
        return self.given

    def with_parameters(self, values: Mapping[str, np.ndarray]) -> Program:
        return Program(self.function, self.held | {**values}, **self.given)

    def run(self, how: Run = Run()) -> Trace:  # noqa: B008
        dtype = np.float32 if how.precision is Precision.FLOAT32 else np.float64
        sign = 1 if how.seed % 2 else -1
        move = sign * UNIT_ROUNDOFF if how.rounding is Rounding.OPERATIONS else 0.0
        stages: Arrays = {}

        def mark(name: str, value: np.ndarray) -> np.ndarray:
            stages[name] = np.asarray(value * (1 + move), dtype)
            return np.asarray(how.forced.get(name, stages[name]), dtype)

        with np.errstate(all="ignore"):
            held = {name: x.astype(dtype) for name, x in self.held.items()}
            mark("output", self.function(held, mark))
        return Trace(stages, ("output",))


def searching(
    original: Arrays,
    port: Arrays,
    pairs: Mapping[str, Construction | str],
    function: Function = lambda p, mark: X,
    ours: Function | None = None,
    *,
    fixed: Mapping[str, Construction] | None = None,
    kept: tuple[str, ...] = (),
    notes: Mapping[str, str] | None = None,
) -> Search:
    """Return a search that starts with these constructions, or copies of whole originals."""
    theirs, mine = Program(function, original), Program(ours or function, port)
    made = {
        name: copied(made, original[made].shape) if isinstance(made, str) else made
        for name, made in pairs.items()
    }
    known = notes or {}
    proposal = Matching(
        tuple(Pair(name, c, Means.PROPOSAL, known.get(name, "")) for name, c in made.items())
    )
    given = Port("search", theirs, mine, gradients=False, bfloat16=False)
    return Search(given, mine, proposal, fixed or {}, kept)


def turned(name: str) -> Construction:
    return laid_out(name, transposition((D, D), (1, 0)))


def stacked(*names: str, rows: int = D) -> Construction:
    """Return the construction of these originals below one another."""
    shape, part = (len(names) * rows, D), (rows, D)
    return Construction(
        shape,
        tuple(
            Piece(name, whole(part), identity(part), cut(shape, shape, 0, n * rows, (n + 1) * rows))
            for n, name in enumerate(names)
        ),
    )


# What is confirmed


def test_what_no_result_shows_is_inferred_if_every_neighbour_is_confirmed_in_one_module():
    """Parameters without a module are in none together."""
    for module, inferred in (("m", {"m.b"}), ("", set())):
        names = [f"{module}.{leaf}".strip(".") for leaf in ("w", "v", "b")]
        shapes = ((2, 3), (4, 3), (3,))
        held = {n: draw(*shape, seed=i) for i, (n, shape) in enumerate(zip(names, shapes))}  # noqa: B905
        port = {f"m.{name[-1]}": x for name, x in held.items()}
        search = searching(held, port, {f"m.{name[-1]}": name for name in names})
        search.agreed = True
        search.effective = frozenset({"m.w", "m.v"})
        assert search.confirmed() == {"m.w", "m.v"} and search.inferred() == inferred
        # One of two neighbours shows nothing of the module.
        search.effective = frozenset({"m.w"})
        assert search.confirmed() == {"m.w"} and search.inferred() == set()
    # So are those of the port, whatever modules the original has.
    made = {leaf: f"m.{leaf}" for leaf in ("w", "v", "b")}
    held = {f"m.{name[-1]}": x for name, x in held.items()}
    search = searching(held, {leaf: held[name] for leaf, name in made.items()}, made)
    search.agreed, search.effective = True, frozenset({"w", "v"})
    assert search.confirmed() == {"w", "v"} and search.inferred() == set()


@pytest.mark.parametrize(("other", "inferred"), [("m.c", set()), ("n.c", {"m.b"}), ("c", {"m.b"})])
def test_what_no_result_shows_is_inferred_only_if_its_module_has_no_other_of_its_shape(
    other: str, inferred: set[str]
):
    shapes = {"m.w": (2, 3), "m.b": (3,), other: (3,)}
    held = {name: draw(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    port = {name: held[name] for name in ("m.w", "m.b")}
    search = searching(held, port, {name: name for name in port})
    search.agreed, search.effective = True, frozenset({"m.w"})
    assert search.inferred() == inferred


@pytest.mark.parametrize(("module", "inferred"), [("m", {"p.b"}), ("n", set())])
def test_what_no_result_shows_is_inferred_only_beside_neighbours_of_one_module(module, inferred):
    made = {"p.w": "m.w", "p.v": f"{module}.v", "p.b": "m.b"}
    shapes = {"w": (2, D), "v": (4, D), "b": (D,)}
    held = {name: draw(*shapes[name[-1]], seed=n) for n, name in enumerate(made.values())}
    search = searching(held, {name: held[own] for name, own in made.items()}, made)
    search.agreed, search.effective = True, frozenset({"p.w", "p.v"})
    assert search.confirmed() == {"p.w", "p.v"} and search.inferred() == inferred


@pytest.mark.parametrize(("second", "inferred"), [("n.", {"p.b"}), ("", set())])
def test_each_original_of_what_is_inferred_is_in_a_module(second: str, inferred: set[str]):
    held = {f"{module}{leaf}": draw(n, D, seed=n) for n, leaf in ((1, "w"), (2, "b"))
            for module in ("m.", second)}  # fmt: skip
    port = {f"p.{leaf}": stacked(f"m.{leaf}", f"{second}{leaf}", rows=n) for n, leaf in
            ((1, "w"), (2, "b"))}  # fmt: skip
    arrays = {name: made.from_original(held) for name, made in port.items()}
    search = searching(held, arrays, port)
    search.agreed, search.effective = True, frozenset({"p.w"})
    assert search.confirmed() == {"p.w"} and search.inferred() == inferred


def test_equal_parameters_are_told_apart_only_if_noise_shows_that_they_are_tied():
    small, large = draw(TIED - 1), draw(TIED)
    for held, distinct in (
        ({"a": small, "b": small}, set()),
        ({"a": large, "b": large}, {"a", "b"}),
        ({"a": small, "b": large}, {"a", "b"}),
    ):
        search = searching(held, held, {name: name for name in held})
        search.theirs = held
        assert search.has_noise and search._distinct() == distinct
        search.has_noise = False
        assert search._distinct() == (distinct if held["a"].size != held["b"].size else set())


def test_a_matrix_of_one_number_is_not_told_from_others_by_its_transpose():
    held = {"one": draw(1, 1), "even": draw(2, 2) + draw(2, 2).T, "row": draw(1, 3)}
    search = searching(held, held, {name: name for name in held})
    search.theirs = held
    assert search._distinct() == {"one", "row"}


def test_without_noise_a_constant_is_not_told_from_others_and_one_number_is():
    held = {"zeros": np.zeros(2), "ones": np.ones(D), "number": draw(1), "values": draw(D)}
    search = searching(held, held, {name: name for name in held})
    search.theirs, search.has_noise = held, False
    assert search._distinct() == {"number", "values"}


def test_pieces_that_were_not_tested_are_not_confirmed(monkeypatch: pytest.MonkeyPatch):
    def both(p: Arrays, mark: Mark) -> np.ndarray:
        return X @ p["v"] + X @ p["w"]

    held = {"v": draw(D, D), "w": draw(D, D, seed=1)}
    for runs, effective in ((2, {"v", "w"}), (1, {"v"})):
        monkeypatch.setattr(construction_search, "MOST_RUNS", runs)
        search = searching(held, held, {"v": "v", "w": "w"}, both)
        search.run()
        assert search.agreed and search.effective == effective
        told = [notice for notice in search.notices if "pieces were tested" in notice]
        assert told == ["only the first 1 of 2 pieces were tested"] * (runs == 1)


def test_pieces_that_were_not_tested_are_counted_and_not_parameters(monkeypatch):
    def both(p: Arrays, mark: Mark) -> np.ndarray:
        return X @ p["v"] + X @ (p["a"] + p["b"])

    def ours(p: Arrays, mark: Mark) -> np.ndarray:
        return X @ p["v"] + X @ (p["ab"][:D] + p["ab"][D:])

    monkeypatch.setattr(construction_search, "MOST_RUNS", 2)
    held = {name: draw(D, D, seed=n) for n, name in enumerate("vab")}
    port = {"v": held["v"], "ab": np.zeros((2 * D, D), np.float32)}
    search = searching(held, port, {"v": "v", "ab": stacked("a", "b")}, both, ours)
    search.run()
    assert search.agreed and search.effective == {"v"}
    assert "only the first 2 of 3 pieces were tested" in search.notices


@pytest.mark.parametrize("table", [np.arange(D, dtype=np.float32), np.ones(D, np.float32)])
def test_a_table_that_the_port_makes_itself_is_not_missing_and_a_constant_is(table):
    held = {"w": draw(D, D), "table": table}
    search = searching(
        held,
        {"w": held["w"]},
        {"w": "w"},
        lambda p, mark: X @ p["w"] + p["table"],
        lambda p, mark: X @ p["w"] + table,
    )
    search.run()
    assert search.agreed and search.lost == ({"table"} if np.ptp(table) == 0 else set())


def test_a_missing_constant_counts_as_needed_where_no_gate_passed():
    held = {"w": draw(D, D), "zero": np.zeros(D, np.float32)}
    search = searching(held, {"w": held["w"]}, {"w": "w"}, lambda p, mark: X @ p["w"] + p["zero"],
                       lambda p, mark: X @ p["w"])  # fmt: skip
    search._test_effects(reported([row("output", Verdict.FAIL)]))
    assert search.lost == {"zero"}
    assert any("results depend on zero" in notice for notice in search.notices)


def test_what_the_port_lacks_and_what_is_open_is_counted_and_listed_in_order():
    """Two layers share a question, which is about two parameters."""
    zeros = [f"zero{letter}" for letter in "fbdace"]
    held = {"w": draw(D, D), **dict.fromkeys(zeros, np.zeros(D, np.float32))}

    def plus(p: Arrays, mark: Mark) -> np.ndarray:
        return X @ p["w"] + sum(p[name] for name in zeros)

    mine = {"w": held["w"], **{f"idle.{n}.t": draw(2, 2, seed=n) for n in range(2)}}
    sides = Program(plus, held), Program(lambda p, mark: X @ p["w"], mine)
    found = adopt(Port("search", *sides, gradients=False, bfloat16=False))
    assert found.agrees and found.lost == tuple(sorted(zeros))
    assert [question.parameters for question in found.questions] == [("idle.0.t", "idle.1.t")]
    first, *_ = found.text().split("\n")
    assert first == (
        "search: 1 of 3 parameters of the port are confirmed by a comparison, 2 are open"
    )


@pytest.mark.parametrize(("several", "count"), [(1, ""), (3, " (3 of them)")])
def test_a_question_says_how_many_parameters_it_is_about(several: int, count: str) -> None:
    names = tuple(f"idle.{n}.t" for n in range(several))
    question = Question("idle.{}.t", names, (2, 5), "a.w", "no result depends on it", ("a.w", "b"))
    assert question.text() == (
        f"idle.{{}}.t{count} (2, 5), proposed a.w: no result depends on it; fit: a.w, b"
    )


def test_what_is_open_or_needed_is_in_the_written_conversion_and_in_the_text():
    """The conversion makes what is paired, and names what a person has to add."""
    held = {"w": draw(D, D), "zero": np.zeros(D, np.float32), "idle": np.zeros(2, np.float32)}
    mine = {"w": draw(D, D, seed=1), "extra.t": draw(2, 5, seed=2)}
    sides = (
        Program(lambda p, mark: X @ p["w"] + p["zero"], held),
        Program(lambda p, mark: X @ p["w"], mine),
    )
    found = adopt(Port("search", *sides, gradients=False, bfloat16=False))
    lines = found.source().split("\n")
    assert "    # extra.t (2, 5): no parameter of the original is proposed for it" in lines
    space: dict[str, Any] = {}
    exec(found.source(), space)
    [(name, made)] = space["convert"](held).items()
    assert name == "w" and np.array_equal(made, held["w"])
    assert found.text().split("\n")[-2:] == [
        "not used, but needed: zero (3,)", "not used: idle (2,)"
    ]  # fmt: skip


def test_a_text_lists_everything_that_was_found_in_order():
    names = [f"{letter}.bias" for letter in "fbdace"]
    pairs = tuple(Pair(n, copied("x", (D,)), Means.PROPOSAL) for n in ("w", *names))
    program = Program(lambda p, mark: X, {})
    found = Adoption(
        title="port",
        matching=Matching(pairs, (Unmatched("idle", (2,)), Unmatched("zero", (D,)))),
        parameters={},
        side=program,
        report=None,
        agrees=True,
        confirmed=frozenset({"w"}),
        inferred=frozenset(names),
        questions=(),
        lost=("zero",),
        changed=("a and b exchanged", "c in the other order of axes"),
        notices=("one", "two"),
    )
    assert found.text().split("\n") == [
        "port: 1 of 7 parameters of the port are confirmed by a comparison, 0 are open",
        "no result depends on a.bias, b.bias, c.bias, d.bias, e.bias, f.bias; taken from the "
        "module of the others",
        "changed: a and b exchanged",
        "changed: c in the other order of axes",
        "not used: idle (2,)",
        "not used, but needed: zero (3,)",
        "note: one",
        "note: two",
    ]


def test_an_answer_that_is_right_is_tested_and_confirmed():
    """The port runs with the answered parameter in place of its own value."""
    held = {"w": draw(D, D), "b": draw(D, seed=1)}
    mine = {"kernel": draw(D, D, seed=2), "bias": draw(D, seed=3)}
    for kernel, right in ((turned("w"), True), (copied("w", (D, D)), False)):
        search = searching(
            held,
            mine,
            {"bias": "b"},
            lambda p, mark: X @ p["w"] + p["b"],
            lambda p, mark: X @ p["kernel"].T + p["bias"],
            fixed={"kernel": kernel},
        )
        search.run()
        assert search.agreed is right and not search.changed
        assert search.confirmed() == ({"kernel", "bias"} if right else set())


def test_an_answer_about_what_no_result_shows_is_neither_confirmed_nor_asked_again():
    held = {"w": draw(D, D), "idle": draw(D, seed=1)}
    search = searching(
        held,
        {"w": draw(D, D, seed=2), "spare": draw(D, seed=3), "open": draw(D, seed=4)},
        {"w": "w", "open": "idle"},
        lambda p, mark: X @ p["w"],
        fixed={"spare": copied("idle", (D,))},
    )
    search.run()
    assert search.agreed and search.confirmed() == {"w"}
    assert [question.parameters for question in search.questions()] == [("open",)]


def test_a_missing_constant_counts_as_needed_if_the_port_stops_with_other_parameters():
    def plus(p: Arrays, mark: Mark) -> np.ndarray:
        return X @ p["w"] + p["zero"]

    def strict(p: Arrays, mark: Mark) -> np.ndarray:
        if not np.array_equal(p["w"], first):
            raise SideError("other weights than it was given")
        return X @ p["w"]

    held = {"w": draw(D, D), "zero": np.zeros(D, np.float32)}
    search = searching(held, {"w": held["w"]}, {"w": "w"}, plus, strict)
    first = search.theirs["w"]
    search._test_effects(search._compared(search.pairs))
    assert search.lost == {"zero"} and not search.effective
    assert any("other weights than it was given" in notice for notice in search.notices)


def test_a_result_that_a_parameter_makes_nan_depends_on_it():
    def root(p: Arrays, mark: Mark) -> np.ndarray:
        return X * np.sqrt(p["w"])

    side = Program(root, {"w": np.ones(D)})
    base, bounds = side.run(), {"output": 1e-3}
    for value, differs in ((1.0, False), (1.5, True), (-1.0, True)):
        assert _differs(side, {"w": np.full(D, value)}, Run(), base, bounds) == differs


def test_a_change_has_an_effect_beyond_the_bound_of_relative_errors_alone():
    """A count of flips has a tolerance too, which is 0."""

    def plus(p: Arrays, mark: Mark) -> np.ndarray:
        return X @ p["w"] + np.float32(1e-3) * p["v"]

    held = {"w": draw(D, D), "v": draw(D, seed=1)}
    search = searching(held, held, {name: name for name in held}, plus)
    rows = [row("output", Verdict.PASS, tolerance=1e-2)]
    rows += [row("output", Verdict.PASS, metric="top1_flips", value=0.0, tolerance=0.0)]
    search._test_effects(reported(rows))
    assert search.effective == {"w"}


def test_tables_of_whole_numbers_are_not_converted(tmp_path):
    held = {"w": draw(D, D), "ids": np.arange(D)}
    sides = [Program(lambda p, mark: X[:, p["ids"].astype(int)] @ p["w"], held) for _ in "ab"]
    port = Port("search", *sides, gradients=False, bfloat16=False)
    found = adopt(port)
    assert found.holds and {*found.parameters} == found.confirmed == {"w"}
    file = tmp_path / "answers.json"
    file.write_text('{"answers": {"ids": "w"}}', encoding="utf-8")
    with pytest.raises(AnswerError, match="ids is no parameter of the port"):
        adopt(port, file)


@pytest.mark.parametrize(("share", "needed"), [(1e-3, False), (1.0, True)])
def test_a_constant_is_needed_if_a_result_leaves_the_widest_bound_without_it(share, needed):
    """The original's results have names of their own, so that none of the bounds is theirs."""

    def plus(p: Arrays, mark: Mark) -> np.ndarray:
        return X @ p["w"] + np.float32(share) * p["zero"]

    held = {"w": draw(D, D), "zero": np.zeros(D, np.float32)}
    search = searching(held, {"w": held["w"]}, {"w": "w"}, plus, lambda p, mark: X @ p["w"])
    bounds = {"output": 1e-6, "wide": 1e-2}
    rows = [row(name, Verdict.PASS, tolerance=bound) for name, bound in bounds.items()]
    search._test_effects(reported(rows))
    assert search.lost == ({"zero"} if needed else set()) and search.effective == {"w"}


# Noise


def test_noise_stays_on_an_original_that_is_not_finite_without_it_either():
    def bounded(p: Arrays, mark: Mark) -> np.ndarray:
        if np.any(p["w"] > 1.0):
            raise SideError("a rate above 1")
        return X * p["w"]

    def guarded(p: Arrays, mark: Mark) -> np.ndarray:
        inner = mark("inner", np.log(1.0 - p["w"]))
        return X * np.where(np.isfinite(inner), inner, 0.0)

    for function, weight, noise in (
        (lambda p, mark: X * p["w"] / 0.0, 1.0, True),
        (lambda p, mark: X * np.log(1.0 - p["w"]), 0.99, False),
        # A stage is no result.
        (guarded, 0.99, True),
        # A program that stops has no result at all.
        (bounded, 1.0, False),
    ):
        held = {"w": np.full(D, weight, np.float32)}
        search = searching(held, held, {"w": "w"}, function)
        assert search.has_noise == noise
        assert np.array_equal(search.theirs["w"], held["w"]) is not noise
        assert any("infinite or NaN" in notice for notice in search.notices) is not noise


# Questions


def test_a_question_lists_originals_that_nothing_uses_first():
    held = {f"used.{letter}": draw(D, D, seed=n) for n, letter in enumerate("abcde")}
    held["free"] = draw(D, D, seed=9)
    port = {f"p.{letter}": x for letter, x in zip("abcde", held.values(), strict=False)}
    port["open"] = held["free"]
    search = searching(held, port, {f"p.{letter}": f"used.{letter}" for letter in "abcde"})
    search.pairs.pop("open", None)
    [question] = [q for q in search.questions() if q.parameter == "open"]
    assert question.choices[0] == "free" and len(question.choices) == CHOICES


def test_originals_of_many_layers_are_one_choice():
    held = {f"layers.{n}.a": draw(D, D, seed=n) for n in range(CHOICES + 1)} | {"other": draw(D, D)}
    search = searching(held, {"open": draw(D, D)}, {})
    search.pairs.clear()
    [question] = search.questions()
    assert question.choices == ("layers.{}.a", "other")


def test_parameters_alike_share_a_question_only_if_the_same_is_proposed_for_them():
    held = {f"layers.{n}.{leaf}": draw(D, D, seed=n) for n in range(2) for leaf in "ab"}
    port = {f"block.{n}.w": draw(D, D) for n in range(2)}
    for second, asked in (("layers.1.a", ["block.{}.w"]), ("layers.1.b", [*port])):
        search = searching(held, port, {"block.0.w": "layers.0.a", "block.1.w": second})
        assert [question.parameter for question in search.questions()] == asked


# Order of use


def chained(*names: str) -> Function:
    """Return a program that multiplies by a matrix for each name, a stage each."""

    def function(p: Arrays, mark: Mark) -> np.ndarray:
        x = X
        for name in names:
            x = mark(f"{name}.out", x @ p[f"{name}.w"])
        return x

    return function


def originals(search: Search) -> dict[str, tuple[str, ...]]:
    return {name: pair.originals for name, pair in search.pairs.items()}


def test_the_order_of_use_decides_where_names_are_numbers_or_an_original_is_used_again():
    held = {f"{n}.w": draw(D, D, seed=n) for n in (0, 1)}
    port = {name: draw(D, D) for name in ("first.w", "second.w")}
    wrong = {"first.w": "1.w", "second.w": "0.w"}
    ours = chained("first", "second")
    search = searching(held, port, wrong, chained("0", "1"), ours)
    right = {"first.w": ("0.w",), "second.w": ("1.w",)}
    assert originals(search) == right
    assert {pair.note for pair in search.pairs.values()} == {"in the order of use"}
    # Names with a word say more than the order does, unless the pair is a second copy.
    held = {f"{name}.w": x for name, x in zip(("a", "b"), held.values(), strict=True)}
    wrong = {"first.w": "b.w", "second.w": "a.w"}
    search = searching(held, port, wrong, chained("a", "b"), ours)
    assert originals(search) == {name: (other,) for name, other in wrong.items()}
    copies = {"first.w": "a.w", "second.w": "a.w"}
    search = searching(held, port, copies, chained("a", "b"), ours, notes={"second.w": SECOND_COPY})
    assert originals(search) == {"first.w": ("a.w",), "second.w": ("b.w",)}


def test_one_numbered_part_makes_a_whole_construction_unsure():
    """The order of use then pairs both parts anew."""
    held = {f"{name}.w": draw(D, D, seed=n) for n, name in enumerate(("0", "a"))}
    port = {name: draw(D, D) for name in ("first.w", "second.w")}
    place = whole((D, D))
    fused = Construction((D, D), tuple(Piece(n, place, identity((D, D)), place) for n in held))
    theirs, ours = chained("0", "a"), chained("first", "second")
    search = searching(held, port, {"first.w": fused}, theirs, ours)
    assert originals(search) == {"first.w": ("0.w",), "second.w": ("a.w",)}


def test_a_parameter_that_keeps_its_value_is_not_paired_in_the_order_of_use():
    held = {f"{n}.w": draw(D, D, seed=n) for n in (0, 1)}
    port = {name: draw(D, D) for name in ("own.w", "first.w", "second.w")}
    theirs, ours = chained("0", "1"), chained("own", "first", "second")
    search = searching(held, port, {}, theirs, ours, kept=("own.w",))
    assert originals(search) == {"first.w": ("0.w",), "second.w": ("1.w",)}


def test_an_answer_stays_where_names_are_numbers():
    """The order of use would pair them the other way."""
    held = {f"{n}.w": draw(D, D, seed=n) for n in (0, 1)}
    port = {name: draw(D, D) for name in ("first.w", "second.w")}
    theirs, ours = chained("0", "1"), chained("first", "second")
    said = {"first.w": copied("1.w", (D, D)), "second.w": copied("0.w", (D, D))}
    search = searching(held, port, {}, theirs, ours, fixed=said)
    assert originals(search) == {"first.w": ("1.w",), "second.w": ("0.w",)}


def test_the_matching_says_which_constructions_a_person_gave_and_which_values_stay():
    held = {name: draw(D, seed=n) for n, name in enumerate(("a", "b", "lost"))}
    port = {name: draw(D) for name in ("said", "named", "own")} | {"open": draw(2)}
    fixed = {"said": copied("a", (D,))}
    search = searching(held, port, {"named": "b"}, fixed=fixed, kept=("own",))
    found = search.run()
    assert {pair.port: pair.note for pair in found.pairs} == {"said": "as answered", "named": ""}
    assert {e.name: e.note for e in found.unmatched_port} == {"own": KEEPS, "open": ""}
    assert [(e.name, e.shape, e.note) for e in found.unmatched_original] == [("lost", (D,), "")]


@pytest.mark.parametrize(
    ("name", "numbered"), [("0.w", True), ("1.0.w", True), ("layers.0.w", False), ("w", False)]
)
def test_a_module_is_numbered_if_its_name_has_no_letter(name: str, numbered: bool):
    assert _is_numbered(name) == numbered


# Changes


def test_a_change_that_helped_nothing_at_one_stage_is_tried_again_at_the_next():
    """`second` is stored the other way too, which shows only once `first` is right."""

    def theirs(p: Arrays, mark: Mark) -> np.ndarray:
        x = mark("a", X @ p["first"] + X @ p["third"])
        return mark("b", np.tanh(x) @ p["second"])

    def ours(p: Arrays, mark: Mark) -> np.ndarray:
        x = mark("a", X @ p["first"].T + X @ p["third"])
        return mark("b", np.tanh(x) @ p["second"].T)

    held = {name: draw(D, D, seed=n) for n, name in enumerate(("second", "first", "third"))}
    search = searching(held, held, {name: name for name in held}, theirs, ours)
    matching = search.run()
    assert search.agreed and search.changed == [
        "first in the other order of axes",
        "second in the other order of axes",
    ]
    assert {name: p.construction for name, p in matching.by_port.items()} == {
        "first": turned("first"),
        "second": turned("second"),
        "third": copied("third", (D, D)),
    }
    # What a proposal said of the old construction is not said of the new one.
    notes = {name: p.note for name, p in matching.by_port.items()}
    assert notes["first"] == notes["second"] == "changed after a comparison" != notes["third"]


def test_what_is_used_just_before_the_first_wrong_stage_is_changed_first():
    names = ("a.w", "b.w", "c.w", "d.w", "none.w")
    held = {name: draw(D, D, seed=n) for n, name in enumerate(names)}
    stages = ("a", "b", "c", "d")
    search = searching(held, held, {name: name for name in sorted(names, reverse=True)})
    asked: list[str] = []
    search._exchanged = lambda parameter, others: iter(asked.append(parameter) or ())
    for culprit, order in (("c", ["c", "b", "a"]), ("b", ["b", "a"])):
        asked.clear()
        place = Place(PortEdge.PORT64_ORIGINAL64, (Stage(culprit, 0.0, 1.0, 0.5),))
        list(search._changes(reported([row("case", Verdict.FAIL)], place), stages))
        # Parameters that are used later, or nowhere, come last.
        assert asked[: len(order)] == [f"{name}.w" for name in order]
    # Where each stage is right when fed, what is used last may be wrong.
    asked.clear()
    list(search._changes(reported([row("case", Verdict.FAIL)]), stages))
    assert asked == [f"{name}.w" for name in ("d", "c", "b", "a", "none")]


def test_answers_are_not_changed_with_parameters_of_other_layers():
    held = {f"layers.{n}.{leaf}.w": draw(D, D) for n in range(2) for leaf in ("key", "query")}
    answered = {"layers.1.query.w": copied("layers.1.query.w", (D, D))}
    search = searching(held, held, {name: name for name in held}, fixed=answered)
    [(_, made)] = search._transposed("layers.0.query.w")
    assert made == {"layers.0.query.w": turned("layers.0.query.w")}
    # An exchange changes two parameters, neither of which may be an answer.
    for parameter in ("layers.0.query.w", "layers.0.key.w"):
        other = {"key": "query", "query": "key"}[parameter.split(".")[2]]
        [(_, made)] = search._exchanged(parameter, [f"layers.0.{other}.w"])
        assert {name: c.parameters for name, c in made.items()} == {
            "layers.0.query.w": ("layers.0.key.w",),
            "layers.0.key.w": ("layers.0.query.w",),
        }


def test_pieces_change_places_only_if_each_lies_alike():
    shape = (2 * D, D)
    places = [cut(shape, shape, 0, n * D, (n + 1) * D) for n in range(2)]
    for second, fits in ((identity((D, D)), True), (transposition((D, D), (1, 0)), False)):
        lies = (identity((D, D)), second)
        pieces = [
            Piece(name, whole((D, D)), layout, place)
            for name, layout, place in zip("ab", lies, places, strict=True)
        ]
        assert _fits(pieces, (1, 0)) == fits and _fits(pieces, (0, 1))


def test_of_three_pieces_those_that_lie_alike_change_places():
    shape = (3 * D, D)
    lies = (identity((D, D)), identity((D, D)), transposition((D, D), (1, 0)))
    pieces = [
        Piece(name, whole((D, D)), layout, cut(shape, shape, 0, n * D, (n + 1) * D))
        for n, (name, layout) in enumerate(zip("abc", lies, strict=True))
    ]
    assert _fits(pieces, (1, 0, 2))
    assert not _fits(pieces, (0, 2, 1)) and not _fits(pieces, (1, 2, 0))


def test_matrices_are_turned_together_that_lie_alike():
    held = {name: draw(D, D, seed=n) for n, name in enumerate("abc")}
    search = searching(held, held, {"a": "a", "b": turned("b"), "c": turned("c")})
    [(sentence, made)] = search._together(["a", "b", "c"])
    assert sentence == "b, c in the other order of axes"
    assert made == {name: copied(name, (D, D)) for name in "bc"}


def test_matrices_of_a_stack_are_turned_and_others_than_square_ones_are_not():
    shape = (2, D, D)
    lies = identity((D, D))
    pieces = tuple(
        Piece(
            name,
            whole((D, D)),
            replace(lies, target=(1, D, D)),
            cut(shape, shape, 0, n, n + 1),
        )
        for n, name in enumerate("ab")
    )
    found = _turned(Construction(shape, pieces))
    assert found is not None
    held = {name: draw(D, D, seed=n) for n, name in enumerate("ab")}
    assert np.array_equal(found.from_original(held), np.stack([x.T for x in held.values()]))
    assert _turned(copied("a", (D, 2 * D))) is None and _turned(copied("a", (D,))) is None
    # Nor is a matrix whose numbers make a square one in another shape, or a vector.
    for source, target in (((2, 8), (4, 4)), ((2, 2), (4,))):
        lies = Layout(source, source, (0, 1), target)
        assert _turned(laid_out("a", lies)) is None


def test_an_answer_keeps_the_order_of_its_parts():
    """In another layer, and beside a parameter whose parts change their order."""

    def fused(layer: int, leaf: str, *rest: int) -> Construction:
        shape, part = (2 * D, *rest), (D, *rest)
        pieces = (
            Piece(
                f"layers.{layer}.{module}.{leaf}",
                whole(part),
                identity(part),
                cut(shape, shape, 0, n * D, (n + 1) * D),
            )
            for n, module in enumerate(("key", "query"))
        )
        return Construction(shape, tuple(pieces))

    names = {f"layers.{n}.qk.w": fused(n, "w", D) for n in range(2)}
    names |= {f"layers.{n}.qk.b": fused(n, "b") for n in range(2)}
    whole_ones = {f"layers.{n}.qk.scale": copied(f"layers.{n}.scale", (D,)) for n in range(2)}
    pieces = [piece for made in (names | whole_ones).values() for piece in made.pieces]
    held = {piece.parameter: np.zeros(piece.part.whole, np.float32) for piece in pieces}
    port = {name: np.zeros(made.shape, np.float32) for name, made in (names | whole_ones).items()}
    for answered, others in (
        ((), {*names}),
        (("layers.0.qk.b",), {*names} - {"layers.0.qk.b"}),
        (("layers.1.qk.w",), {"layers.0.qk.w", "layers.0.qk.b"}),
    ):
        search = searching(
            held, port, names | whole_ones, fixed={name: names[name] for name in answered}
        )
        [(_, made)] = search._reordered("layers.0.qk.w")
        assert {*made} == others
        for name, construction in made.items():
            assert construction.parameters == names[name].parameters[::-1]


@pytest.mark.parametrize("count", [1, 2, MOST_PARTS, MOST_PARTS + 1])
def test_every_order_of_a_few_parts_is_tried(count: int):
    """Of many parts there are too many orders, and terms of a sum have none."""
    names = [f"part{n}" for n in range(count)]
    fused = stacked(*names, rows=1)
    held = {name: draw(1, D, seed=n) for n, name in enumerate(names)}
    search = searching(held, {"w": draw(count, D)}, {"w": fused})
    tried = [made["w"].parameters for _, made in search._reordered("w")]
    orders = itertools.permutations(names) if count <= MOST_PARTS else ()
    assert tried == [order for order in orders if order != (*names,)]
    added = Construction((1, D), tuple(replace(p, place=p.part) for p in fused.pieces))
    search = searching(held, {"w": draw(1, D)}, {"w": added})
    assert list(search._reordered("w")) == []


def test_an_exchange_is_the_same_from_either_parameter():
    """Otherwise the two programs would be compared with it twice."""
    for names in (("a.w", "a.v"), ("b.key.w", "b.query.w")):
        held = {name: draw(D, D, seed=n) for n, name in enumerate(names)}
        search = searching(held, held, {name: name for name in names})
        [one], [other] = (list(search._exchanged(name, names)) for name in names)
        assert one == other and {*one[1]} == {*names}


def test_pins_are_not_followed_while_constructions_may_be_wrong(monkeypatch: pytest.MonkeyPatch):
    """They may name stages that differ because of a construction."""
    asked: list[Port] = []

    def compare(port: Port) -> Any:
        asked.append(port)
        return reported([row("output", Verdict.PASS)])

    monkeypatch.setattr(construction_search, "compare", compare)
    held = {"w": draw(D, D)}
    search = searching(held, held, {"w": "w"}, lambda p, mark: X @ p["w"])
    search.port = replace(
        search.port, pins=(Pin("output", "output"),), gradients=True, bfloat16=True
    )
    search.run()
    # With noise and without derivatives first, then without noise and with them.
    assert [(port.pins, port.gradients) for port in asked] == [((), False), ((), True)]
    # A port need not run in bfloat16 to be converted.
    assert not any(port.bfloat16 for port in asked)
    assert not np.array_equal(asked[0].original.parameters()["w"], held["w"])
    assert asked[1].original.parameters()["w"] is held["w"]


def test_a_port_that_keeps_each_of_its_values_is_not_compared():
    """It need not share a parameter with the original."""
    search = searching({"w": draw(D, D)}, {"v": draw(D)}, {}, kept=("v",))
    assert search.run().pairs == () and search.report is None and not search.agreed


def test_equal_inputs_are_told_if_they_have_several_elements():
    ids = np.arange(3)
    side = Program(lambda p, mark: X, {}, a=ids, b=ids.copy(), n=np.array(3), m=np.array(3))
    [notice] = _equal_inputs(side)
    assert notice.startswith("the inputs a and b are equal")
    # Zeros of any dtype and shape are the same bytes.
    zeros = np.zeros((2, 3))
    others = {"b": zeros.T.copy(), "c": zeros.astype(np.int64)}
    assert _equal_inputs(Program(lambda p, mark: X, {}, a=zeros, **others)) == []
    assert _equal_inputs(Program(lambda p, mark: X, {}, a=ids, b=ids + 1)) == []


STAGES = ("a", "b", "c")


def placed(wrong: str | None, verdict: Verdict = Verdict.FAIL, *, tested: bool = True) -> Any:
    stages = tuple(Stage(name, 0.0, 1.0 if name == wrong else 0.0, 0.5) for name in STAGES)
    place = Place(PortEdge.PORT64_ORIGINAL64, stages if tested else ())
    return reported([row("c", verdict)], place)


def test_a_position_is_the_later_the_more_stages_are_right():
    found = [
        _position(report, STAGES)
        for report in (
            placed(None, tested=False),
            placed("a"),
            placed("c"),
            placed(None),
            placed(None, Verdict.PASS),
        )
    ]
    assert found == [-1, 0, 2, 3, 4]
    assert _position(placed("c"), ("a", "b")) == -1, "a stage that was not there before"


def test_programs_agree_only_if_a_result_was_compared():
    right = placed(None, Verdict.PASS)
    assert agree(right)
    assert not agree(replace(right, ledger=(Entry("c", Role.OUTPUT, reason="why"),)))
    assert not agree(replace(right, ledger=(Entry("w", Role.GRADIENT, "w", True),)))


def test_no_change_is_better_than_stages_that_were_not_tested_unless_everything_holds(monkeypatch):
    """Nothing shows then whether a stage became right."""
    held = {"v": draw(D, D), "w": draw(D, D, seed=1)}
    search = searching(held, held, {"v": "v", "w": "w"})
    answers = iter([placed("b"), placed(None), placed(None, Verdict.PASS)])
    monkeypatch.setattr(search, "_compared", lambda pairs: next(answers))
    changes = [(name, {}) for name in ("first", "second", "third")]
    monkeypatch.setattr(search, "_changes", lambda report, stages: iter(changes))
    refused: set[str] = set()
    (sentence, _), report = next(search._improvements(placed(None, tested=False), refused))
    assert sentence == "third" and agree(report) and refused == {"first", "second"}


def compared(search: Search, refused: set[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many of five changes are compared, none of which helps."""
    before = search.tries
    wrong = placed("a")

    def compare(port: Port) -> Any:
        return wrong

    monkeypatch.setattr(construction_search, "compare", compare)
    monkeypatch.setattr(search, "_changes", lambda *given: ((name, {}) for name in "abcde"))
    assert list(search._improvements(wrong, refused)) == []
    return search.tries - before


def test_a_search_ends_with_its_last_comparison(monkeypatch):
    """A change that was refused before costs none."""
    monkeypatch.setattr(construction_search, "TRIES", 3)
    held = {"w": draw(D, D)}
    search = searching(held, held, {"w": "w"})
    refused = {"b"}
    assert compared(search, refused, monkeypatch) == 3 and refused == {*"abcd"}
    assert search.notices == ["stopped after 3 comparisons"]
    search.notices.clear()
    assert compared(search, {"a"}, monkeypatch) == 0
    assert search.notices == ["stopped after 3 comparisons"]


def test_a_few_changes_are_tried_for_one_stage(monkeypatch):
    """Those that were refused before are some of them."""
    monkeypatch.setattr(construction_search, "AT_ONE_STAGE", 3)
    held = {"w": draw(D, D)}
    for refused, tries in ((set(), 3), ({"a", "e"}, 2), ({"a", "b", "c"}, 0)):
        search = searching(held, held, {"w": "w"})
        assert compared(search, refused, monkeypatch) == tries and search.notices == []


def test_parameters_of_one_place_in_modules_that_differ_in_numbers_are_of_one_kind():
    """Numbers of the module itself count: `mlp.0` and `mlp.2` are two modules of one block."""
    assert _kind("h.0.mlp.2.weight") == _kind("h.11.mlp.2.weight")
    assert _kind("h.0.query.weight") == _kind("h.1.query.weight")
    for other in ("h.0.mlp.0.weight", "h.0.mlp.2.bias", "h.0.moe.2.weight", "g.0.mlp.2.weight"):
        assert _kind("h.0.mlp.2.weight") != _kind(other), other
