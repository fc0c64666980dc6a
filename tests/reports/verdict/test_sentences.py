"""Every sentence under a verdict, word by word: each number and name in it is of the run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.tolerances import DRIFT_TYPICAL, DRIFT_WORST
from reports.provenance.host import FIELDS
from reports.store.runs import Run
from reports.verdict import sentences as say
from reports.verdict.changes import Change, Counts, What, gravest_first, machine_name
from reports.verdict.decide import decide
from reports.verdict.drift import Drift, PinComparison
from reports.verdict.pins import pin_of
from reports.verdict.vanished import Seen, Vanished
from stability.core.findings import Severity
from tests.reports.nights import earlier, failing, finding, measurement, run

LOGITS = "logits in case baseline (JAX float32 vs oracle)"
CLOSEST = f"the closest is {LOGITS} at 25 % of its tolerance"
BEFORE = earlier(measurement())
SINCE = f"run {BEFORE.id}"
EDGES = ("jax64:oracle", "jax32:oracle", "reference32:oracle", "jax32:reference32")
THERE = dict.fromkeys(FIELDS, "known") | {"model": "another"}
HERE = "x86_64 (family known, model known, stepping known, instructions known), reference recorded"


def counts(**changes: int) -> Counts:
    return Counts(**{**dict.fromkeys(Counts.__dataclass_fields__, 0), "gates": 7, **changes})


def change(what: What = What.CHANGED, **changes: Any) -> Change:
    made = Change(what, "baseline", "jax32:oracle", "logits", "rel_l2", 1e-6, 2e-6, 4e-6, stage=3)
    return replace(made, **changes)


def port(holds: bool, sentence: str) -> dict[str, Any]:
    return {"title": "t", "holds": holds, "sentence": sentence, "file": ""}


SIZE = "relative L2 9.0e-06 against a tolerance of 4.0e-06, 2.2 times over"
LARGER = "relative L2 {} against a tolerance of 4.0e-06, {} times over"
BLOCKED = measurement(verdict=Verdict.NOT_COMPARABLE)


@pytest.mark.parametrize(
    ("baseline", "new", "persisting", "head"),
    [
        (None, 1, 0, "1 failure, with no earlier run to compare with."),
        (None, 2, 0, "2 failures, with no earlier run to compare with."),
        (BEFORE, 1, 0, "1 new failure."),
        (BEFORE, 0, 1, "1 persisting failure."),
        (BEFORE, 2, 0, "2 failures, all new."),
        (BEFORE, 1, 1, "2 failures, 1 new."),
        (BEFORE, 1200, 34, "1,234 failures, 1,200 new."),
    ],
)
def test_failures_are_counted_and_new_where_there_is_an_earlier_run(
    baseline: Run | None, new: int, persisting: int, head: str
) -> None:
    told = counts(new=new, persisting=persisting)
    assert say.regressed(run(), baseline, told, []) == head
    assert say.regressed(run(), baseline, told, [failing()]) == (
        f"{head} It starts at {LOGITS}: {SIZE}."
    )


@pytest.mark.parametrize(
    ("starts", "end"),
    [
        ([failing(value=1.0)], f"{LARGER.format('1.0e+00', '2.5e+05')}."),
        ([failing(value=3.9e-2)], f"{LARGER.format('3.9e-02', '9,750.0')}."),
        ([failing(value=1e4 * 4e-6)], f"{LARGER.format('4.0e-02', '1.0e+04')}."),
        ([failing(value=math.nan)], "relative L2 NaN against a tolerance of 4.0e-06."),
        ([failing(value=math.inf)], "relative L2 Inf against a tolerance of 4.0e-06."),
        # What says of itself that it fails is not over its tolerance.
        ([failing(value=4e-6)], "relative L2 4.0e-06 against a tolerance of 4.0e-06."),
        (
            [failing(tolerance=math.nan)],
            "relative L2 9.0e-06 with no tolerance to compare it with.",
        ),
        ([failing(), failing(case="b")], f"{SIZE}; 1 other comparison fails."),
        ([failing(), BLOCKED, failing(), failing()], f"{SIZE}; 2 other comparisons fail."),
    ],
)
def test_where_failures_start_and_how_far_they_are(starts: list[Measurement], end: str) -> None:
    told = say.regressed(run(), None, counts(new=1), starts)
    assert told == f"1 failure, with no earlier run to compare with. It starts at {LOGITS}: {end}"


def test_without_a_failing_gate_a_probe_or_what_is_not_comparable_is_named() -> None:
    head = "1 new failure."
    bad = finding(severity=Severity.ERROR, message="too large")
    night = run(findings=(finding(subject="fine"), bad))
    probe = "Probe values on model.embed.weight: too large."
    assert say.regressed(night, BEFORE, counts(new=1), [BLOCKED]) == f"{head} {probe}"
    blocked = f"{head} It starts at {LOGITS}: not comparable."
    assert say.regressed(run(), BEFORE, counts(new=1), [BLOCKED]) == blocked


def test_a_port_is_said_by_what_it_was_found_to_be() -> None:
    night = run()
    for ports, end in (
        ([port(True, "fine"), port(False, "It lacks a scale")], "It lacks a scale."),
        ([port(False, "A"), port(False, "B")], "A; 1 more port of this run."),
        ([port(False, "A"), port(False, "B"), port(False, "C")], "A; 2 more ports of this run."),
    ):
        told = replace(night, manifest=replace(night.manifest, ports=tuple(ports)))
        assert say.regressed(told, BEFORE, counts(new=1), [failing()]) == f"1 new failure. {end}"


@pytest.mark.parametrize("broken", [set(), {0}, {1}, {2}, {3}, {2, 3}, {1, 2, 3}, {0, 2, 3}])
@pytest.mark.parametrize("absent", [None, 0, 1])
def test_what_both_share_is_suspected_where_both_agree_and_the_reference_does_not(
    broken: set[int], absent: int | None
) -> None:
    rows = [
        (failing if i in broken else measurement)(edge=edge)
        for i, edge in enumerate(EDGES)
        if i != absent
    ]
    # Edges of another case say nothing.
    rows += [measurement(case="z", edge=edge) for edge in EDGES]
    starts = [m for m in rows if m.verdict is Verdict.FAIL]
    told = say.regressed(run(*rows), None, counts(new=len(starts)), starts)
    assert ("suspect first what the two share" in told) == (broken == {2, 3} and absent is None)


def test_what_both_share_is_suspected_whatever_fails_in_another_case() -> None:
    rows = [(failing if i in (2, 3) else measurement)(edge=edge) for i, edge in enumerate(EDGES)]
    other = failing(case="z", edge=EDGES[0])
    told = say.regressed(run(*rows, other), None, counts(new=3), [*rows[2:], other])
    assert "suspect first what the two share" in told
    # The other way round, what fails elsewhere is no reason to suspect anything.
    told = say.regressed(
        run(*rows, other), None, counts(new=3), [rows[2], replace(rows[3], case="z")]
    )
    assert "suspect" not in told


def test_a_value_beyond_its_past_is_told_with_how_far() -> None:
    changes = [
        change(What.FIXED, quantity="x"),
        change(What.DRIFTED, note="why"),
        change(What.WORSE, quantity="y"),
    ]
    assert say.worse(run(), changes, counts(worse=2)) == (
        f"All 7 gates hold, but 2 values left their history or level. The worst is {LOGITS}: "
        "relative L2 1.0e-06 → 2.0e-06, why."
    )
    assert "the worst is" in say.worse(run(), [change(What.WORSE)], counts(worse=1)).lower()


SUITE = {"name": "parity", "planned": 13, "executed": 12, "status": "ran", "reason": "stopped"}
WHOLE = {**SUITE, "executed": 13, "reason": ""}


@pytest.mark.parametrize(
    ("suites", "missing", "sentence"),
    [
        (
            [],
            [],
            "The run does not list its planned suites, so nothing shows that it is complete.",
        ),
        (
            [WHOLE],
            ["a", "b"],
            "Nothing failed, but earlier runs ran a suite that this run lacks: a, b. If that is "
            f"intended: `retire --reason ... {run().id} a`.",
        ),
        (
            [WHOLE, {**SUITE, "name": "mesh"}],
            ["a"],
            "Nothing failed, but suite mesh is incomplete (ran): "
            "12 of 13 checks executed: stopped.",
        ),
        (
            [
                {**SUITE, "reason": "", "status": "failed", "planned": 13_002, "executed": 1_200},
                SUITE,
            ],
            [],
            "Nothing failed, but suite parity is incomplete (failed): 1,200 of 13,002 checks "
            "executed. 1 more suite did not finish.",
        ),
        (
            [SUITE, {**SUITE, "name": "mesh", "reason": "killed"}, WHOLE, {**SUITE, "reason": ""}],
            [],
            "Nothing failed, but suite parity is incomplete (ran): 12 of 13 checks executed: "
            "stopped. 2 more suites did not finish.",
        ),
    ],
)
def test_what_did_not_run_is_named(suites: list[Any], missing: list[str], sentence: str) -> None:
    assert say.incomplete(run(suites=suites), missing) == sentence


@pytest.mark.parametrize(
    ("selected", "kind", "sentence"),
    [
        ([], "nightly", ""),
        (["a"], "pytest", ""),
        (["a"], "nightly", "Only a was measured, not the whole night. "),
        (["a", "b", "c"], "nightly", "Only a, b, c were measured, not the whole night. "),
        (list("abcd"), "nightly", "Only a, b, c and 1 more were measured, not the whole night. "),
        (list("abcde"), "nightly", "Only a, b, c and 2 more were measured, not the whole night. "),
    ],
)
def test_a_selection_is_named(selected: list[str], kind: str, sentence: str) -> None:
    assert say.selection(run(selected=selected, kind=kind)) == sentence


def test_the_gate_closest_to_its_tolerance_is_one_that_holds() -> None:
    rows = [
        measurement(quantity="x", value=1e-9),
        measurement(),
        measurement(quantity="y", value=4e-6, verdict=Verdict.NOT_COMPARABLE),
        measurement(quantity="z", value=1.0, tolerance=math.nan, verdict=Verdict.INFO),
    ]
    assert say.tightest(run(*rows)) == CLOSEST


def level(what: What) -> Change:
    return change(what, kind="logits")


@pytest.mark.parametrize(
    ("baseline", "environment", "changes", "sentence"),
    [
        (None, [], [change()], "There is no earlier comparable run."),
        (
            None,
            [],
            [level(What.BETTER)],
            "There is no earlier comparable run. Levels compared with a pinned run: "
            "1 better than before.",
        ),
        (BEFORE, [], [], f"Nothing changed since {SINCE}."),
        (BEFORE, ["threads 2 → 1"], [], f"The environment differs from {SINCE}: threads 2 → 1."),
        (
            BEFORE,
            ["threads 2 → 1", "b", "c"],
            [change()],
            f"The environment differs from {SINCE}: threads 2 → 1 and 2 more.",
        ),
        (
            BEFORE,
            [],
            [change(What.BETTER), change(What.GONE), change(What.GONE)],
            f"Since {SINCE}: 2 no longer measured, 1 better than before.",
        ),
        (
            BEFORE,
            [],
            [change(What.BETTER), level(What.BETTER), level(What.BETTER)],
            f"Since {SINCE}: 1 better than before. Levels compared with a pinned run: "
            "1 better than before.",
        ),
        (
            BEFORE,
            [],
            [level(What.NOT_COMPARABLE)],
            f"Nothing changed since {SINCE}. Levels compared with a pinned run: "
            "1 not comparable with baseline.",
        ),
    ],
)
def test_what_is_different_since_the_baseline(
    baseline: Run | None, environment: list[str], changes: list[Change], sentence: str
) -> None:
    then = baseline and replace(baseline, measurements=(measurement(),))
    assert say.since(run(measurement()), then, environment, changes) == sentence


def test_values_that_grew_without_being_a_change_are_counted() -> None:
    """No replay says whether they repeat, and one earlier run is no history."""
    before = run(measurement(), measurement(quantity="x", value=1e-7), measurement(quantity="y"))
    then = replace(before, manifest=BEFORE.manifest)
    now = run(measurement(), measurement(quantity="x", value=8e-7), measurement(quantity="y"))
    assert say.since(now, then, [], []) == (
        f"Since {SINCE} no gate failed or left its history: 3 gates compared, 2 of them equal. "
        "The largest growth is 8.00 times, x in case baseline (JAX float32 vs oracle)."
    )
    assert say.since(before, then, [], []) == f"Nothing changed since {SINCE}."
    # A value that became smaller is counted too, and one of other work is not said to have grown.
    other = measurement(quantity="x", value=8e-7, identity="other")
    shrunk = run(measurement(), other, measurement(quantity="y", value=1e-12))
    assert say.since(shrunk, then, [], []) == (
        f"Since {SINCE} no gate failed or left its history: 2 gates compared, 1 of them equal; "
        "1 of other work."
    )


def test_one_run_against_another_says_how_many_gates_are_equal() -> None:
    night = run(measurement(), measurement(quantity="x", verdict=Verdict.INFO, tolerance=math.nan))
    assert say.against_one(night, None, [], []) == f"All 1 gate hold; {CLOSEST}."
    then = replace(night, manifest=BEFORE.manifest)
    equal = "Equal: all 1 gate are the same in both runs."
    assert say.against_one(night, then, [], []) == f"{equal} All hold; {CLOSEST}."
    differs = say.against_one(night, then, ["threads 2 → 1"], [])
    assert differs == (
        f"{equal} All hold; {CLOSEST}. The environment differs from {SINCE}: threads 2 → 1."
    )
    # Of two gates one is of other work, and one only in the later run.
    other = replace(then, measurements=(measurement(identity="other"),))
    more = run(measurement(), measurement(quantity="y"), selected=["baseline"])
    assert say.against_one(more, other, [], []) == (
        f"Only baseline was measured, not the whole night. All 2 gates hold; {CLOSEST}. "
        f"Since {SINCE} no gate failed or left its history: "
        "0 gates compared, 0 of them equal; 1 of other work; 1 only in the second."
    )


def test_a_change_is_told_from_the_first_stage_of_the_sharpest_edge() -> None:
    night = run(measurement())
    first = change(edge="jax64:oracle", quantity="x", stage=1)
    later = change(edge="jax64:oracle", quantity="y", stage=2, case="a")
    loss = change(edge="jax64:oracle", quantity="loss", stage=-1)
    blunt = change(stage=0)
    probe = change(What.FIXED, tolerance=math.nan, edge="", quantity="z")
    gone = change(What.GONE, edge="jax64:oracle", stage=0, quantity="w")
    told = say.changed(night, [gone, probe, blunt, loss, later, first], BEFORE)
    assert told == (
        f"All gates hold: 1 failure of {SINCE} is fixed, and 4 values that should repeat exactly "
        "differ from it. The first is x in case baseline (JAX float64 vs oracle): relative L2 "
        f"1.0e-06 → 2.0e-06; {CLOSEST}."
    )
    fact = change(stage=3, quantity="f", tolerance=math.nan)
    both = say.changed(night, [fact, later, first], BEFORE)
    assert "3 values that should repeat exactly differ (2 of gates, 1 without a tolerance)" in both
    # Where all are of one kind nothing has to be added up.
    assert "(" not in say.changed(night, [fact], BEFORE).split(" differs ")[0]
    repaired = say.changed(night, [probe, probe], BEFORE)
    assert repaired.startswith(f"All gates hold: 2 failures of {SINCE} are fixed. The first is z")
    assert "1 value that should repeat exactly differs from" in say.changed(night, [blunt], BEFORE)
    # A night of one case is not mistaken for a whole one because its own failures are mended.
    some = run(measurement(), selected=["baseline"])
    only = "Only baseline was measured, not the whole night. "
    assert say.changed(some, [probe], BEFORE).startswith(f"{only}All gates hold: 1 failure of")
    assert say.worse(some, [change(What.WORSE)], counts(worse=1)).startswith(f"{only}All ")
    order = [first, later, loss, blunt]
    for i in range(3):
        told = say.changed(night, order[i:][::-1], BEFORE)
        assert f"It starts at {order[i].quantity} in case {order[i].case}" in told


def drift(case: str = "baseline", now: float = 1.5, limit: float = 2.0, what: str = "typical"):
    return Drift((case, "jax32:oracle", "logits", "rel_l2"), what, 1.0, now, limit)


def comparison(*compared: Drift, same: bool = False, **changes: Any) -> PinComparison:
    pin = pin_of(run(measurement(), id="pinned"), {}, "as measured", "2026-11-01")
    made = PinComparison(pin, same, ("threads 2 → 1", "jax 1 → 2"), 5, compared, covered=5)
    return replace(made, **changes)


def test_a_pinned_run_is_named_with_what_could_be_compared() -> None:
    two = drift(), drift(what="worst")
    assert say.against(comparison(*two, same=True)) == (
        "run pinned, pinned 2026-11-01 (as measured): 1 of 5 levels comparable"
    )
    assert say.against(comparison(*two)) == (
        "run pinned, pinned 2026-11-01 (as measured): 1 of 5 levels comparable; threads 2 → 1; "
        "jax 1 → 2"
    )
    wide = (drift("b", limit=4.0), drift("b", what="worst"))
    assert "1 of 5 levels comparable, 1 not comparable yet" in say.against(comparison(*two, *wide))
    anchor = replace(comparison(*two, same=True).pin, pinned="")
    assert say.against(comparison(*two, same=True, pin=anchor)) == (
        "run pinned, the oldest healthy run on this machine: 1 of 5 levels comparable"
    )


FIRST = " First night on this machine: it becomes the anchor of later ones"
NOBODY = "; no levels were compared: there is no pinned run."


def test_a_first_night_says_what_it_was_compared_with() -> None:
    two = drift(), drift(what="worst", now=2.9, limit=2.95)
    assert say.first_night(run(), []) == FIRST + NOBODY
    kind = say.first_night(run(kind="port"), [])
    assert kind == FIRST.replace("First night", "First run") + NOBODY
    assert say.first_night(run(host={}), []) == (
        " The processor cannot be identified, so no later run is compared with it" + NOBODY
    )
    assert say.first_night(run(selected=["a"]), []) == (
        " There is no whole night of this machine to compare levels with" + NOBODY
    )
    part = say.first_night(run(selected=["a"]), [comparison(*two)])
    assert part.startswith(" There is no whole night of this machine to compare levels with. 1 ")
    # On its own machine there is nothing to say, unless no level is of the same work.
    assert say.first_night(run(), [comparison(*two, same=True)]) == ""
    assert say.first_night(run(), [comparison(same=True), comparison(*two)]) == (
        f"{FIRST}. 1 level compared with a pinned run of another machine: largest ratio 1.50, "
        "limit 2.00 (baseline, logits, JAX float32 vs oracle, relative L2)."
    )
    # A level that no pin has is no silent part of those that were compared.
    pair = [comparison(*two, covered=1), comparison(drift("b", now=1.9), drift("b"), covered=2)]
    assert say.first_night(run(), pair) == (
        f"{FIRST}. 2 levels compared with 2 pinned runs of other machines: largest ratio 1.90, "
        "limit 2.00 (b, logits, JAX float32 vs oracle, relative L2). 2 other levels have no pinned "
        "level of the same work."
    )
    assert say.first_night(run(), [comparison()]) == (
        f"{FIRST}; no levels were compared: run pinned on {HERE} has no level of the same work "
        "(threads 2 → 1)."
    )
    assert "(other work)." in say.first_night(run(), [comparison(differs=())])


@pytest.mark.parametrize("names", ["a", "ab"])
def test_levels_that_are_not_comparable_yet_are_counted(names: str) -> None:
    wide = [drift(name, limit=4.0 + i) for i, name in enumerate(names)]
    told = say.first_night(run(), [comparison(*wide, *(replace(d, what="worst") for d in wide))])
    what = "1 of the compared is" if len(names) == 1 else "2 of the compared are"
    whom = "it" if len(names) == 1 else "them"
    assert told.endswith(
        f" {what} not comparable yet: rounding alone may move {whom} by more than 3 times. No "
        "level grew by more than 3 times."
    )
    grown = [(drift(name, now=3.5, limit=4.0), comparison()) for name in names]
    several = "1 level" if len(names) == 1 else "2 levels"
    assert say.unseen(run(id="tonight"), grown) == (
        f"All gates hold, but {several} grew by more than 3 times and no earlier run of this "
        "machine shows whether that is its rounding or a loss. The largest is 3.50 times the "
        f"typical logits of run pinned on {HERE} (a, JAX float32 vs oracle, relative L2); rounding "
        "explains up to 4.00. Find out why, then `pin tonight --reason ...`."
    )


def test_tests_without_megalodon_are_no_first_night() -> None:
    night = run(kind="pytest", reference={"kind": None})
    manifest = replace(night.manifest, ports=(port(True, ""),))
    assert manifest.without_megalodon
    assert say.first_night(replace(night, manifest=manifest), []) == ""
    assert say.first_night(replace(night, manifest=manifest), [comparison()]) != ""


def test_pinned_files_that_were_not_used_are_named() -> None:
    lines = [f"{name}.json is not used: damaged" for name in "abcd"]
    assert say.not_used([]) == ""
    assert say.not_used(lines[:1]) == " 1 pinned baseline was not used (a.json)."
    assert say.not_used(lines) == (" 4 pinned baselines were not used (a.json, b.json, c.json).")


def test_a_drift_is_told_with_its_limit_and_both_machines() -> None:
    """The change that a level left a pinned run, of this machine and of another."""
    from reports.verdict.decide import decide

    def night(value: float, **changes: Any) -> Run:
        return run(measurement(value=value, kind=Kind.LOGITS), **changes)

    pin = pin_of(night(1e-6, id="pinned"), {}, "why", "2026-11-01")
    grown = 1e-6 * DRIFT_WORST * DRIFT_TYPICAL
    [here] = decide(night(grown), None, {}, [pin]).changes
    ratio = f"{DRIFT_WORST * DRIFT_TYPICAL:.2f}"
    assert here.note == f"typical of these gates, {ratio} times that of run pinned on this machine"
    assert (here.before, here.now) == (1e-6, pytest.approx(grown))
    assert here.tolerance == pytest.approx(1e-6 * DRIFT_TYPICAL)
    [there] = decide(night(grown, host=THERE), None, {}, [pin]).changes
    another = HERE.replace("model known", "model another")
    assert there.note == (
        f"typical of these gates, {ratio} times that of run pinned on {HERE}; here {another}; "
        f"rounding between them explains {DRIFT_TYPICAL:.2f}"
    )
    [better] = decide(night(1e-7), None, {}, [pin]).changes
    assert math.isnan(better.tolerance) and better.what is What.BETTER


@pytest.mark.parametrize(("kind", "word"), [(None, "absent"), ("", "absent"), ("live", "live")])
def test_a_machine_is_named_with_what_it_compared_with(kind: str | None, word: str) -> None:
    environment = run().manifest.environment
    of = replace(environment, reference=replace(environment.reference, kind=kind))
    assert machine_name(of).endswith(f", reference {word}")


def test_changes_begin_with_the_case_that_the_sentence_names() -> None:
    """`z` fails by far the most, on the sharpest edge; `a` comes first by name alone."""
    rows = [
        failing(case="a", edge="jax32:oracle", value=5e-6),
        failing(case="a", edge="jax32:reference32", value=5e-6),
        failing(case="z", edge="jax64:oracle", value=9e-3),
        failing(case="z", edge="jax32:oracle", value=9e-3),
    ]
    decision = decide(
        run(*rows), run(*(replace(m, value=1e-6, verdict=Verdict.PASS) for m in rows))
    )
    assert " in case z (" in decision.sentence
    assert [c.case for c in decision.changes if c.what is What.NEW] == ["z", "z", "a", "a"]
    alphabetical = gravest_first(decision.changes)
    assert [c.case for c in alphabetical] == ["z", "a", "z", "a"], "by edge, as there is no start"


def test_a_reason_is_cut_between_words() -> None:
    reason = "sums in float32 are ordered differently since the loop over layers was unrolled again"
    told = say._shortened(reason)
    assert told.endswith(" …") and reason.startswith(told[:-2]) and len(told) <= 80
    assert reason[len(told) - 2] == " "
    assert say._shortened("as measured") == "as measured"


def test_of_work_that_vanished_the_newest_is_named() -> None:
    groups = {
        ("z", "jax32:oracle", "gradient"): Seen("one", "2026-11-01T21:30:00+00:00"),
        ("b", "jax64:oracle", ""): Seen("three", "2026-11-03T21:30:00+00:00"),
        ("c", "jax32:oracle", "logits"): Seen("two", "2026-11-02T21:30:00+00:00"),
    }
    head = "Nothing failed, but this run does not plan"
    assert say.vanished(run(id="tonight"), Vanished({}, groups)) == (
        f"{head} 3 groups of gates that earlier runs measured, first: gates of case b (JAX float64 "
        "vs oracle), last in run three. If that is intended: `retire --reason ... tonight b`."
    )
    # Of one run the last by name.
    groups = dict.fromkeys([*groups][::-1], Seen("one", "2026-11-01T21:30:00+00:00"))
    assert "gradient gates of case z (JAX float32" in say.vanished(run(), Vanished({}, groups))
    del groups["b", "jax64:oracle", ""], groups["c", "jax32:oracle", "logits"]
    assert say.vanished(run(), Vanished({}, groups)).startswith(f"{head} 1 group of gates that")


def test_only_a_gate_that_holds_and_was_above_0_is_said_to_have_grown() -> None:
    def rows(**values: float) -> list[Measurement]:
        return [measurement(quantity=name, value=value) for name, value in values.items()]

    info = measurement(quantity="i", tolerance=math.nan, verdict=Verdict.INFO)
    before = run(*rows(a=1e-7, b=0.0, c=1e-6), info)
    then = replace(before, manifest=BEFORE.manifest)
    now = run(*rows(a=2e-7, b=1e-6, c=1.5e-6), replace(info, value=1.0))
    assert say.since(now, then, [], [level(What.BETTER)]) == (
        f"Since {SINCE} no gate failed or left its history: 3 gates compared, 0 of them equal. "
        "The largest growth is 2.00 times, a in case baseline (JAX float32 vs oracle). "
        "Levels compared with a pinned run: 1 better than before."
    )


def test_levels_of_one_kind_in_several_metrics_are_several() -> None:
    both = [level(What.BETTER), replace(level(What.BETTER), metric="max_abs")]
    both.append(replace(level(What.BETTER), edge="jax64:oracle"))
    assert say.since(run(), None, [], both).endswith("pinned run: 3 better than before.")


def test_what_shares_nothing_with_the_other_run_is_counted() -> None:
    rows = [measurement(quantity=name) for name in "abc"]
    other = earlier(*(replace(m, identity="x") for m in rows[:2]))
    night = run(*rows, selected=["baseline"])
    assert say.nothing_shared(night, other) == (
        "Only baseline was measured, not the whole night. Nothing was compared: "
        f"{SINCE} measured none of the 3 gates of this run, 2 of them of other work. "
        f"By themselves all hold; {say.tightest(night)}."
    )


def test_gates_that_the_baseline_did_not_measure_are_counted() -> None:
    rows = [failing(quantity=name) for name in "abc"]
    # Only what failed is counted.
    told_only = measurement(quantity="e", verdict=Verdict.INFO, tolerance=math.nan)
    night = run(*rows, measurement(quantity="d"), told_only)
    told = say.regressed(night, earlier(rows[0]), counts(new=2, persisting=1), rows[:1])
    head = "3 failures, 2 new. The baseline did not measure 2 of these gates. It starts at a in"
    assert told.startswith(head)
    assert "did not measure" not in say.regressed(night, earlier(*rows), counts(new=3), rows[:1])


def test_large_numbers_are_shown_by_thousands() -> None:
    names = [f"q{turn}" for turn in range(1001)]
    wide = [drift(name, limit=4.0) for name in names]
    narrow = [drift(f"n{name}") for name in [*names, "n"]]
    levels = [replace(d, what=what) for d in (*wide, *narrow) for what in ("typical", "worst")]
    other = comparison(*levels, levels=3000)
    assert "1,002 of 3,000 levels comparable, 1,001 not comparable yet;" in say.against(other)
    told = say.first_night(run(), [other])
    assert " 1,001 of the compared are not comparable yet" in told
    rows = [failing(quantity=name) for name in names]
    told = say.regressed(run(*rows), earlier(), counts(new=1001), rows[:1])
    assert "The baseline did not measure 1,001 of these gates." in told
    gates = [measurement(quantity=name) for name in names]
    before = earlier(*(replace(m, identity="x") for m in gates))
    told = say.nothing_shared(run(*gates), before)
    assert "none of the 1,001 gates of this run, 1,001 of them of other work" in told
    moved = [change(quantity=name) for name in names]
    assert "1,001 changed." in say.since(run(), BEFORE, [], moved)
    facts = [change(quantity=f"{name} fact", tolerance=math.nan) for name in [*names, "n"]]
    told = say.changed(run(measurement()), [*moved, *facts], BEFORE)
    assert "2,003 values that should repeat exactly differ (1,001 of gates, 1,002 without" in told


def test_a_first_night_beside_several_pinned_runs_counts_over_all_of_them() -> None:
    wide = [drift(name, now=2.0, limit=9.0) for name in "abc"]
    worst = [replace(d, what="worst") for d in wide]
    narrow = drift("n", now=1.9, limit=1.95), drift("n", what="worst")
    pair = [
        comparison(*narrow, levels=9, covered=2),
        comparison(*wide, *worst, levels=4, covered=2),
    ]
    told = say.first_night(run(), pair)
    # The largest ratio, and not what is the nearest to its limit.
    assert "4 levels compared with 2 pinned runs of other machines: largest ratio 2.00" in told
    assert " 5 other levels have no pinned level" in told
    assert "3 of the compared are not comparable yet" in told
    # A night that is not whole still becomes no anchor only if it is of some cases.
    partial = run(suites=[SUITE])
    assert say.first_night(partial, pair).startswith(FIRST)


def test_of_levels_that_grew_unseen_the_one_that_grew_most_is_named() -> None:
    """Over all pinned runs, each of which has its own largest first."""
    other = comparison()
    other = replace(other, pin=replace(other.pin, run="another"))
    grown = [
        (drift("a", now=3.5, limit=4.0, what="worst"), comparison()),
        (drift("b", now=3.2, limit=5.0), other),
    ]
    for found in (grown, grown[::-1]):
        told = say.unseen(run(id="tonight"), found)
        assert "2 levels grew" in told and "3.50 times the worst logits of run pinned on" in told
        assert "(a, JAX float32" in told and told.count("explains up to 4.00.") == 1


def test_a_run_is_named_with_its_whole_id() -> None:
    name = "2026-11-20T21-30-00Z-1a2b3c4"
    pin = replace(comparison().pin, run=name)
    told = comparison(drift(), drift(what="worst"), pin=pin)
    assert say.against(told).startswith(f"run {name}, pinned 2026-11-01 (as measured)")


def test_what_changed_since_the_other_run_is_told_with_how_many_gates_are_equal() -> None:
    night = run(measurement(), measurement(quantity="x"))
    then = replace(
        run(measurement(value=2e-6), measurement(quantity="x")), manifest=BEFORE.manifest
    )
    assert say.against_one(night, then, [], [change(What.BETTER)]) == (
        f"All 2 gates hold; {say.tightest(night)}. Since {SINCE}: 1 better than before. "
        "2 gates compared, 1 of them equal."
    )


def test_of_what_changed_a_gate_is_named_before_a_fact_of_a_sharper_edge() -> None:
    fact = change(edge="jax64:oracle", quantity="f", stage=1, tolerance=math.nan)
    told = say.changed(run(measurement()), [fact, change(quantity="gate", stage=5)], BEFORE)
    assert "It starts at gate in case baseline" in told
    # Where there are facts alone, nothing is said of gates.
    assert "of gates" not in say.changed(run(measurement()), [fact, fact], BEFORE)


def test_the_closest_gate_need_not_have_the_largest_value() -> None:
    rows = [measurement(quantity="far", value=1.0, tolerance=100.0), measurement()]
    assert say.tightest(run(*rows)) == CLOSEST


def test_one_level_without_a_pinned_one_is_told_too() -> None:
    told = say._not_pinned([comparison(levels=3, covered=1), comparison(levels=3, covered=1)])
    assert told == " 1 other level has no pinned level of the same work."


def test_a_name_that_looks_like_an_option_is_quoted_behind_two_dashes() -> None:
    assert say._retire(run(id="r"), "-x y").endswith(" r -- '-x y'`.")
    assert say._retire(run(id="r"), "x").endswith(" r x`.")
