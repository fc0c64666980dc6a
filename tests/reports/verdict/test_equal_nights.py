"""Two runs asked for by name: what is equal is called equal, and nothing else is."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest

from parity.engine.measure.measurement import Measurement, Verdict
from reports.page import side_by_side
from reports.store.runs import Run, write_run
from reports.verdict.agreement import Agreement, agreement
from reports.verdict.decide import Word, decide
from stability.core.findings import Severity
from tests.helpers import cli
from tests.reports.nights import earlier, failing, finding, measurement, realistic, regressed, run

SUITES = [{"name": "parity", "status": "ran", "planned": 1, "executed": 1, "reason": ""}]
DAY = {"id": "2026-11-19T21-30-00Z-0000000", "created": "2026-11-19T21:30:00+00:00"}
FIRST = "First night"
SUSPECTED = "so the environment"


@pytest.fixture(scope="module")
def nights() -> tuple[Run, Run]:
    """Two whole nights of one commit with the same values."""
    return realistic(**DAY), realistic()


def stored(root: Path, *runs: Run) -> Path:
    for night in runs:
        write_run(root, night)
    return root


def page_of(before: Run, after: Run) -> str:
    then, now = decide(before, None), decide(after, before, alone=True)
    return side_by_side.render(before, then, after, now, ("../a", "../b"))


def moved(night: Run) -> Run:
    """The night with one value changed, which still holds."""
    first, *others = night.measurements
    return replace(night, measurements=(replace(first, value=first.value / 2), *others))


def test_two_equal_nights_are_called_equal(nights, tmp_path: Path) -> None:
    root, page = stored(tmp_path / "runs", *nights), tmp_path / "both.html"
    gates = sum(m.verdict is not Verdict.INFO for m in nights[0].measurements)
    result = cli("compare", "2026-11-19", "2026-11-20", "--out", root, "--html", page)
    assert result.exit_code == 0
    said = f"Equal: all {gates:,} gates and {len(nights[0].findings):,} findings are the same"
    assert result.stdout.startswith(f"PASS: {said}")
    for text in (result.stdout, page.read_text(encoding="utf-8")):
        assert said in text
        assert FIRST not in text and SUSPECTED not in text
    assert "commits: none, both runs are of 1a2b3c4d5e\n" in result.stdout


def test_one_changed_value_is_not_called_equal(nights) -> None:
    before, after = nights[0], moved(nights[1])
    decision = decide(after, before, alone=True)
    assert decision.word is Word.CHANGED
    text = page_of(before, after)
    assert "Equal" not in text and "of them equal" in text
    assert SUSPECTED in text, "one commit, another value: that is what remains to suspect"


def test_a_value_that_need_not_repeat_is_counted_and_suspects_nothing(nights) -> None:
    noisy = [
        replace(n, measurements=tuple(replace(m, deterministic=None) for m in n.measurements))
        for n in (nights[0], moved(nights[1]))
    ]
    decision = decide(noisy[1], noisy[0], alone=True)
    found = agreement(*noisy)
    assert (decision.word, found.equal, found.compared - found.same) == (Word.PASS, False, 1)
    assert found.sentence() in decision.sentence
    assert FIRST not in decision.sentence
    assert FIRST in decide(noisy[1], noisy[0]).sentence, "control: a night judged by its history"
    assert SUSPECTED not in page_of(*noisy)


def test_two_runs_that_share_no_gate_were_not_compared() -> None:
    """Nothing that was measured in both held: that is no pass."""
    before = earlier(measurement())
    for later, other in (
        (run(measurement(case="stream")), "none of the 1 gate of this run."),
        (run(measurement(identity="other")), "of this run, 1 of them of other work."),
    ):
        decision = decide(later, before, alone=True)
        assert (decision.word, decision.exit_code) == (Word.NOT_COMPARABLE, 4)
        assert f"Nothing was compared: run {before.id} measured" in decision.sentence
        assert other in decision.sentence
    one = run(measurement(), measurement(case="stream"))
    assert decide(one, before, alone=True).word is Word.PASS
    # A failure of the later run is worse than that it was not compared.
    assert decide(run(failing(case="stream")), before, alone=True).word is Word.REGRESSED


def test_two_equal_red_nights_stay_red_and_are_equal(nights, tmp_path: Path) -> None:
    before, after = map(regressed, nights)
    result = cli("compare", DAY["id"], "2026-11-20", "--out", stored(tmp_path, before, after))
    assert result.exit_code == 1
    assert result.stdout.startswith("REGRESSED")
    assert "compared: Equal: all" in result.stdout
    assert SUSPECTED not in result.stdout
    assert "Equal: all" in page_of(before, after)


@pytest.mark.parametrize(
    ("later", "said"),
    [
        (measurement(identity="other"), "0 gates compared, 0 of them equal; 1 of other work."),
        (measurement(quantity="x"), "1 only in the first run; 1 only in the second."),
        (measurement(tolerance=5e-6), "1 gate compared, 0 of them equal."),
        (failing(), "1 gate compared, 0 of them equal."),
        (measurement(verdict=Verdict.NOT_COMPARABLE), "1 gate compared, 0 of them equal."),
    ],
)
def test_what_is_not_the_same_is_counted(later, said: str) -> None:
    found = agreement(earlier(measurement()), run(later))
    assert not found.equal
    assert found.sentence().endswith(said)


ALONE = {
    "a gate that one run has": ([measurement(), measurement(case="more")], [measurement()]),
    "a gate of other work": ([measurement()], [measurement(identity="other")]),
    "another value": ([measurement()], [measurement(value=2e-6)]),
    "a value that is no number": ([failing()], [failing(value=math.nan)]),
    "another tolerance": ([measurement()], [measurement(tolerance=5e-6)]),
    "another verdict": ([measurement()], [measurement(verdict=Verdict.NOT_COMPARABLE)]),
    "a finding that one run has": ([measurement(), finding()], [measurement()]),
    "another value of a finding": ([measurement(), finding()], [measurement(), finding(value=0.5)]),
    "another threshold": ([measurement(), finding()], [measurement(), finding(threshold=3.0)]),
    "another severity": (
        [measurement(), finding()],
        [measurement(), finding(severity=Severity.WARNING)],
    ),
}


@pytest.mark.parametrize("turned", [False, True], ids=["earlier", "later"])
@pytest.mark.parametrize("rows", ALONE.values(), ids=ALONE)
def test_one_difference_alone_on_either_side_makes_runs_unequal(rows, turned: bool) -> None:
    """Whichever it is and whichever run has it; beside a gate that both have alike."""
    both = measurement(quantity="loss")

    def made(side, make):
        gates = [m for m in side if isinstance(m, Measurement)]
        findings = tuple(f for f in side if not isinstance(f, Measurement))
        return make(both, *gates, findings=findings)

    one, other = reversed(rows) if turned else rows
    assert not agreement(made(one, earlier), made(other, run)).equal
    assert agreement(made(one, earlier), made(one, run)).equal


def test_no_difference_cancels_another() -> None:
    """Runs are equal where something was compared and no count of a difference is above 0."""
    for compared, differ, *counts in itertools.product(range(3), repeat=6):
        other, before, now, findings = counts
        found = Agreement(compared, compared - differ, other, before, now, 7, findings)
        assert found.equal is (compared > 0 and not (differ or any(counts))), found


def test_numbers_of_two_runs_are_shown_by_thousands() -> None:
    found = Agreement(9001, 1001, 1002, 1003, 1004, 1005, 1006, 1007)
    assert found.sentence() == (
        "9,001 gates compared, 1,001 of them equal; 1,002 of other work; 1,003 only in the first "
        "run; 1,004 only in the second; 1,006 findings differ; 1,007 findings in one run only."
    )


def test_nothing_measured_is_not_equal() -> None:
    assert not agreement(earlier(), run()).equal


def test_findings_that_differ_are_not_equal() -> None:
    runs = [
        make(measurement(), findings=(finding(value=v),))
        for make, v in ((earlier, 1.0), (run, 2.0))
    ]
    found = agreement(*runs)
    assert (found.same, found.findings_differ, found.equal) == (1, 1, False)
    # A run without the finding has not measured it, which is no difference of a value.
    found = agreement(runs[0], run(measurement()))
    assert (found.findings_differ, found.findings_alone, found.equal) == (0, 1, False)
    assert "1 finding in one run only" in found.sentence()


@pytest.mark.parametrize(("moved", "said"), [(1, "1 finding differs"), (2, "2 findings differ")])
def test_each_finding_is_compared_by_itself(moved: int, said: str) -> None:
    """Two metrics of one subject are two findings, and the later run's are counted."""
    before = [finding(metric=name) for name in ("max", "mean")]
    now = [replace(f, value=0.5) if i < moved else f for i, f in enumerate(before)]
    more = [finding(subject=f"more {n}") for n in range(3)]
    found = agreement(
        earlier(measurement(), findings=tuple(before)),
        run(measurement(), findings=(*now, *more)),
    )
    assert (found.findings, found.findings_differ, found.findings_alone) == (5, moved, 3)
    assert found.sentence() == (
        f"1 gate compared, 1 of them equal; {said}; 3 findings in one run only."
    )


def test_the_gate_against_one_run_speaks_of_no_first_night(nights, tmp_path: Path) -> None:
    root = stored(tmp_path, *nights)
    asked = cli("gate", "2026-11-20", "--against", "2026-11-19", "--out", root)
    assert FIRST not in asked.stdout and "Equal: all" in asked.stdout
    control = cli("gate", "2026-11-20", "--out", root)
    assert "Equal: all" not in control.stdout
