"""Nothing counts as whole, fixed, equal or healthy without what shows it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.megalodon.known_differences import KNOWN_DIFFERENCES
from reports.nightly.document import known_differences
from reports.provenance.host import FIELDS
from reports.registry.lookup import anchors_of, judge_stored
from reports.registry.retention import plan
from reports.store.manifest import PartInfo
from reports.store.runs import Run, write_run
from reports.verdict import pins
from reports.verdict.changes import What
from reports.verdict.decide import ExitCode, Word, decide
from reports.verdict.history import WINDOW, load_history
from reports.verdict.pins import Pins, pin_of
from stability.core.findings import Severity
from tests.reports.nights import earlier, failing, finding, measurement, on_gpu, run

WHOLE = {"name": "parity", "status": "ran", "planned": 1, "executed": 1, "reason": ""}
PARTIAL = {"name": "stability", "status": "ran", "planned": 2, "executed": 1, "reason": "stopped"}
BLOCKED = measurement(verdict=Verdict.NOT_COMPARABLE, value=math.nan, note="shape (2,) and (3,)")
HERE = dict.fromkeys(FIELDS, "known")
THERE = HERE | {"model": "another"}


def night(value: float = 1e-6, day: int = 1, *more: Measurement, **changes: Any) -> Run:
    made = {"id": f"2026-10-{day:02d}T21-30-00Z-0000000", "suites": [WHOLE]}
    made |= {"created": f"2026-10-{day:02d}T21:30:00+00:00"}
    return run(measurement(value=value), *more, **{**made, **changes})


@pytest.fixture(autouse=True)
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of pinned baselines."""
    monkeypatch.setattr(pins, "FOLDER", tmp_path / "pinned")
    return tmp_path / "pinned"


def of_port(name: str) -> dict[str, Any]:
    return {"kind": "port", "suites": [{**WHOLE, "name": name}]}


@pytest.mark.parametrize("suites", [[WHOLE, PARTIAL], [PARTIAL, WHOLE]], ids=["last", "first"])
def test_a_whole_suite_does_not_excuse_another(suites: list[dict[str, Any]]) -> None:
    made = night(suites=suites)
    decision = decide(made, None)
    assert (decision.word, decision.exit_code) == (Word.INCOMPLETE, ExitCode.INCOMPLETE)
    assert "suite stability is incomplete" in decision.sentence
    assert not made.manifest.whole
    assert night(suites=[WHOLE, {**WHOLE, "name": "stability"}]).manifest.whole


def test_only_a_suite_that_was_whole_is_missed() -> None:
    partial, whole = (night(suites=[WHOLE, each]) for each in (PARTIAL, {**PARTIAL, "executed": 2}))
    assert decide(night(day=2), partial).word is Word.PASS
    assert decide(night(day=2), whole).word is Word.INCOMPLETE


def test_what_could_not_be_compared_is_not_fixed() -> None:
    decision = decide(run(measurement(case="other"), BLOCKED), earlier(failing()))
    assert (decision.word, decision.counts.fixed) == (Word.NOT_COMPARABLE, 0)
    assert What.FIXED not in {c.what for c in decision.changes}
    # Neither is what has no tolerance any more, nor what was not measured.
    info = measurement(verdict=Verdict.INFO, tolerance=math.nan)
    for row in (info, measurement(case="other")):
        assert decide(run(measurement(case="third"), row), earlier(failing())).counts.fixed == 0


def test_an_error_whose_probe_did_not_run_is_not_fixed() -> None:
    bad = finding(severity=Severity.ERROR)
    decision = decide(run(measurement()), earlier(measurement(), findings=(bad,)))
    assert [c.what for c in decision.changes] == [What.GONE]
    assert (decision.word, decision.counts.fixed) == (Word.PASS, 0)
    assert "1 no longer measured" in decision.sentence


@pytest.mark.parametrize(
    ("field", "other", "what"),
    [
        (None, None, What.FIXED),
        ("probe", "another", What.GONE),
        ("source", "another.json", What.GONE),
        ("metric", "added", What.GONE),
    ],
)
def test_a_difference_is_fixed_where_all_of_its_comparison_are_counted_without_it(
    field: str | None, other: str | None, what: What
) -> None:
    """One finding per difference: a mended one has none, and its comparison's count shows it."""
    bad = finding(severity=Severity.ERROR, metric="removed", subject="layers.0 exp")
    count = replace(bad, severity=Severity.OK, metric="changes", subject="float32", value=0.0)
    if field is not None:
        count = replace(count, **{field: other})
    decision = decide(run(measurement(), findings=(count,)), earlier(findings=(bad,)))
    assert [c.what for c in decision.changes] == [what]
    assert decision.counts.fixed == (what is What.FIXED)


@pytest.mark.parametrize("field", ["probe", "subject", "metric"])
def test_each_error_is_one_of_its_own(field: str) -> None:
    one = finding(severity=Severity.ERROR)
    other = replace(one, **{field: "another"})
    both = run(measurement(), findings=(one, other))
    assert decide(both, None).counts.new == 2
    counts = decide(both, earlier(measurement(), findings=(one,))).counts
    assert (counts.new, counts.persisting) == (1, 1)
    # One of two was mended.
    good = replace(other, severity=Severity.OK)
    counts = decide(run(measurement(), findings=(one, good)), both).counts
    assert (counts.persisting, counts.fixed) == (1, 1)


def test_a_baseline_is_found_beyond_the_newest_runs(tmp_path: Path) -> None:
    old = write_run(tmp_path, night(day=1))
    for turn in range(WINDOW):
        created = f"2026-11-01T{turn // 60:02d}:{turn % 60:02d}:00+00:00"
        other = run(measurement(identity="other"), id=f"r{turn:03d}", created=created)
        write_run(tmp_path, other)
    baseline = load_history(tmp_path, run(measurement())).baseline
    assert baseline is not None and baseline.id == old.name


def several(first: str, second: str, value: float = 1e-6, **changes: Any) -> Run:
    """A run whose two cases were measured on hosts with these fingerprints."""
    made = run(measurement(case="a", value=value), measurement(case="b"), **changes)
    parts = (PartInfo("a", "n1", first, cases=("a",)), PartInfo("b", "n2", second, cases=("b",)))
    return replace(made, manifest=replace(made.manifest, parts=parts))


@pytest.mark.parametrize(
    ("then", "now", "changed"),
    [
        (("x", "y"), ("x", "y"), 1),
        # Case a was measured on another host, or on one that is not known.
        (("x", "y"), ("z", "y"), 0),
        (("", "y"), ("", "y"), 0),
        # One of the two runs is of one host: the case decides all the same.
        (("x", "x"), ("x", "y"), 1),
        (("x", "x"), ("z", "x"), 0),
        (("z", "x"), ("x", "x"), 0),
    ],
)
def test_values_are_compared_exactly_where_the_host_of_the_case_is_the_same(
    then: tuple[str, str], now: tuple[str, str], changed: int
) -> None:
    before = several(*then, 2e-6, id="before", created="2026-10-01T21:30:00+00:00")
    assert decide(several(*now), before).counts.changed == changed


@pytest.mark.parametrize("known", [True, False])
def test_a_case_of_no_part_of_a_night_of_several_hosts_was_measured_anywhere(known: bool) -> None:
    """Also on another host than the first, which the environment of the night is of."""

    def night_of(value: float, **changes: Any) -> Run:
        made = run(*(measurement(case=name, value=value) for name in "abc"), **changes)
        parts = [PartInfo(name, "n", name, cases=(name,)) for name in "ab"]
        parts += [PartInfo("c", "n", "c", cases=("c",))] * known
        return replace(made, manifest=replace(made.manifest, parts=tuple(parts)))

    before = night_of(2e-6, id="before", created="2026-10-01T21:30:00+00:00")
    changes = decide(night_of(1e-6), before).changes
    assert [c.case for c in changes if c.what is What.CHANGED] == ["a", "b", "c"][: 2 + known]


def test_a_night_that_drifted_from_the_pinned_run_is_no_anchor(tmp_path: Path, pinned) -> None:
    """It would hide the drift from every later night of its machine."""
    pin = pin_of(night(host=THERE), {}, "as measured", "2026-10-01")
    pins.write(pin, pins.file_of(pin))
    root = tmp_path / "runs"
    first = write_run(root, night(1.9e-6, 2))
    assert judge_stored(first).decision.word is Word.REGRESSED
    tonight = night(1.9e-6, 3)
    assert anchors_of(root, tonight, pins.load("cpu")) == ()
    # Negative control: without the pin the same night is one.
    [anchor] = anchors_of(root, tonight, Pins())
    assert anchor.id == first.name


def test_pruning_counts_each_device_by_itself(tmp_path: Path) -> None:
    """Ten nights on a processor are no reason to delete the only one on a GPU."""
    root = tmp_path / "runs"
    gpu = write_run(root, on_gpu(night(day=1), host={}))
    folders = [write_run(root, night(day=day, host={})) for day in (2, 3, 4)]
    made = plan(root, 1)
    assert gpu not in made.goes and folders[0] in made.goes
    assert made.newest == 2


def test_a_machine_that_cannot_be_identified_has_no_anchor_to_keep(tmp_path: Path) -> None:
    """It equals no other, so no later run is compared with its runs."""
    root = tmp_path / "runs"
    unknown = write_run(root, night(day=1, host={}))
    known, *_ = (write_run(root, night(day=day)) for day in (2, 3, 4))
    made = plan(root, 1)
    assert unknown in made.goes
    assert [folder for folder, why in made.spared if why.startswith("anchor")] == [known]


def test_the_baseline_of_the_only_run_on_a_device_is_kept(tmp_path: Path) -> None:
    """It may be a run on another device, of which newer runs did other work."""
    root = tmp_path / "runs"
    baseline = write_run(root, night(day=1, host={}))
    other = replace(night(day=2, host={}), measurements=(measurement(identity="other"),))
    write_run(root, other)
    only = write_run(root, on_gpu(night(day=3, host={})))
    assert plan(root, 1).spared == ((baseline, f"baseline of {only.name}"),)


@pytest.mark.parametrize("other", ["kind", "subject"])
def test_pruning_counts_each_kind_and_subject_by_itself(tmp_path: Path, other: str) -> None:
    root = tmp_path / "runs"
    one: dict[str, Any] = {"kind": "pytest"} if other == "kind" else of_port("mine")
    rest: dict[str, Any] = {} if other == "kind" else of_port("yours")
    kept = write_run(root, night(day=1, host={}, **one))
    folders = [write_run(root, night(day=day, host={}, **rest)) for day in (2, 3, 4)]
    made = plan(root, 1)
    assert kept not in made.goes and folders[0] in made.goes


@pytest.mark.parametrize(
    ("one", "other"),
    [({}, {"host": THERE}), (of_port("mine"), of_port("yours")), ({}, {"kind": "pytest"})],
    ids=["machine", "subject", "kind"],
)
def test_every_anchor_is_spared(tmp_path: Path, one: dict[str, Any], other: dict[str, Any]) -> None:
    root = tmp_path / "runs"
    ours = [write_run(root, night(day=day, **one)) for day in (1, 2, 3)]
    others = [write_run(root, night(day=day, **other)) for day in (4, 5, 6)]
    spared = dict(plan(root, 1).spared)
    assert all("anchor of the machine of" in spared[runs[0]] for runs in (ours, others))


def test_the_anchor_that_is_spared_is_that_of_the_newest_whole_night(tmp_path: Path) -> None:
    """A night that was cut short measured less, so it is held against less than the next one."""
    root = tmp_path / "runs"
    other = replace(night(day=2, host=HERE), measurements=(measurement(identity="other"),))
    folders = [write_run(root, made) for made in (night(day=1, host=HERE), other)]
    write_run(root, night(day=3, host=HERE, suites=[WHOLE, PARTIAL]))
    spared = dict(plan(root, 1).spared)
    assert spared[folders[1]].startswith("anchor of the machine of")


def test_a_machine_with_a_pinned_run_needs_no_anchor_and_others_do(tmp_path: Path, pinned) -> None:
    root, folders = tmp_path / "runs", {}
    for day, host in enumerate((HERE, HERE, THERE, THERE, HERE, THERE), 1):
        folders[day] = write_run(root, night(day=day, host=host))
    pin = pin_of(night(day=1, host=HERE), {}, "as measured", "2026-10-01")
    pins.write(pin, pins.file_of(pin))
    planned = plan(root, 1)
    assert planned.spared == (
        (folders[1], "pinned"),
        (folders[3], f"anchor of the machine of {folders[6].name}"),
        (folders[4], f"baseline of {folders[6].name}"),
    )
    assert planned.goes == (folders[2], folders[5]) and planned.newest == 1
    # Negative control: without a pin both machines have one.
    pins.file_of(pin).unlink()
    assert [why for _, why in plan(root, 1).spared] == [
        f"anchor of the machine of {folders[5].name}",
        f"anchor of the machine of {folders[6].name}",
        f"baseline of {folders[6].name}",
    ]


def test_a_level_that_the_pinned_run_lacks_is_compared_with_the_anchor(
    tmp_path: Path, pinned
) -> None:
    """A pin of this machine would otherwise let a new case drift without limit."""
    root = tmp_path / "runs"
    pin = pin_of(night(host=HERE), {}, "as measured", "2026-10-01")
    pins.write(pin, pins.file_of(pin))

    def grown(day: int, value: float) -> Path:
        return write_run(root, night(1e-6, day, measurement(case="added", value=value), host=HERE))

    first = grown(2, 1e-6)
    worse = judge_stored(grown(3, 2.5e-6)).decision
    assert worse.word is Word.REGRESSED and worse.counts.worse == 1
    assert [each.pin.run for each in worse.comparisons] == [pin.run, first.name]
    assert {drift.group[0] for drift in worse.comparisons[1].compared} == {"added"}
    # The other level stays held to the pinned run alone, which was looked at.
    assert {drift.group[0] for drift in worse.comparisons[0].compared} == {"baseline"}
    # Negative control: at the level of the anchor it passes.
    assert judge_stored(grown(4, 1.1e-6)).decision.exit_code is ExitCode.PASS
    # The night that anchors the new level is not pruned, although the machine has a pinned run.
    last = grown(5, 1.1e-6)
    assert (first, f"anchor of the machine of {last.name}") in plan(root, 1).spared


def test_a_night_with_further_gates_of_a_level_is_no_anchor_of_it(tmp_path: Path) -> None:
    """Its level is one of other gates; the oldest night of the same gates is the anchor."""
    more = measurement(quantity="more")
    nights = [night(1e-6, 1, more), night(day=2), night(day=3)]
    for made in nights:
        write_run(tmp_path, made)
    [anchor] = anchors_of(tmp_path, night(day=4), Pins())
    assert anchor.id == nights[1].id


def test_a_night_of_a_few_cases_is_no_anchor(tmp_path: Path) -> None:
    """Its levels would anchor the machine although nobody saw the rest of that night."""
    root = tmp_path / "runs"
    write_run(root, night(day=1, host=HERE, selected=["baseline"]))
    whole = write_run(root, night(day=2, host=HERE))
    [anchor] = anchors_of(root, night(day=3, host=HERE), Pins())
    assert anchor.id == whole.name


def test_no_night_is_compared_with_itself_or_a_later_one(tmp_path: Path) -> None:
    nights = [night(day=day, host=HERE) for day in (2, 3, 4)]
    for made in nights:
        write_run(tmp_path, made)
    assert anchors_of(tmp_path, nights[0], Pins()) == ()
    # Negative control: for the last one, the first is.
    [anchor] = anchors_of(tmp_path, nights[2], Pins())
    assert anchor.id == nights[0].id


def test_a_pin_of_another_machine_leaves_a_machine_its_anchor(tmp_path: Path, pinned) -> None:
    """An anchor is asked for although somebody pinned a run, and not where it was of this one."""
    root = tmp_path / "runs"
    pin = pin_of(night(host=THERE), {}, "as measured", "2026-10-01")
    pins.write(pin, pins.file_of(pin))
    write_run(root, night(1e-6, 1))
    tonight = write_run(root, night(1.5e-6, 2))
    far = judge_stored(tonight).decision
    assert far.word is Word.REGRESSED
    assert "the oldest healthy run on this machine" in far.against[0]
    own = pin_of(night(1.5e-6), {}, "looked at", "2026-10-02")
    pins.write(own, pins.file_of(own))
    judged = judge_stored(tonight).decision
    assert not any("oldest healthy" in text for text in judged.against)


def test_a_known_difference_that_was_not_measured_does_not_hold() -> None:
    assert not any("holds" in entry for entry in known_differences([measurement()]))
    name = KNOWN_DIFFERENCES[0].id
    rows = {
        verdict: measurement(quantity=name, kind=Kind.KNOWN_DIFFERENCE, verdict=verdict)
        for verdict in (Verdict.PASS, Verdict.FAIL, Verdict.NOT_COMPARABLE)
    }
    for verdict, row in rows.items():
        entry = known_differences([row])[0]
        assert entry["holds"] is (verdict is Verdict.PASS)
