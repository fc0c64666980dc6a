"""Steps, drifts, losses and baselines: each is named as what it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from parity.engine.measure.measurement import Measurement
from reports.store.manifest import PartInfo
from reports.store.runs import Run, write_run
from reports.verdict import pins
from reports.verdict.changes import What
from reports.verdict.decide import Word, decide
from reports.verdict.history import Past, load_history
from reports.verdict.pins import pin_of
from tests.reports.nights import earlier, failing, measurement, run

KEY = ("baseline", "jax32:oracle", "logits", "rel_l2")


def noisy(value: float) -> Measurement:
    return measurement(value=value, deterministic=False)


@pytest.mark.parametrize(
    ("value", "what", "word"),
    [(1.5e-6, What.WORSE, Word.REGRESSED), (0.5e-6, What.BETTER, Word.PASS)],
)
def test_a_step_is_worse_or_better(value: float, what: What, word: Word) -> None:
    decision = decide(run(noisy(value)), None, {KEY: Past((1e-6,) * 10, True)})
    assert ([c.what for c in decision.changes], decision.word) == ([what], word)
    assert decision.counts.worse == (what is What.WORSE)


@pytest.mark.parametrize(
    ("value", "what", "word"),
    [(1.5e-6, What.DRIFTED, Word.REGRESSED), (0.5e-6, What.BETTER, Word.PASS)],
)
def test_a_level_of_the_same_machine_drifts_or_gets_better(
    value: float, what: What, word: Word
) -> None:
    pin = pin_of(run(measurement()), {}, "as measured", "2026-11-01")
    decision = decide(run(measurement(value=value)), None, {}, [pin])
    assert ([c.what for c in decision.changes], decision.word) == ([what], word)


def test_of_values_beyond_their_past_the_furthest_is_named_first() -> None:
    """Though another is of a sharper edge, and another of an earlier stage."""
    growth = {("jax64:oracle", 1): 1.5, ("jax32:oracle", 3): 3.0, ("jax32:oracle", 2): 2.0}
    rows = [
        measurement(
            edge=edge, stage=stage, quantity=f"q{stage}", value=1e-6 * times, deterministic=False
        )
        for (edge, stage), times in growth.items()
    ]
    decision = decide(run(*rows), None, {m.key: Past((1e-6,) * 10, True) for m in rows})
    assert [c.quantity for c in decision.changes] == ["q3", "q2", "q1"]
    assert "The worst is q3 in case" in decision.sentence


def test_whatever_was_gated_and_is_not_measured_is_gone() -> None:
    decision = decide(run(measurement(case="other")), earlier(failing()))
    assert [c.what for c in decision.changes] == [What.GONE]


def test_whole_suites_leave_nothing_not_run() -> None:
    counts = decide(run(measurement()), None).counts
    assert (counts.not_run, counts.skipped) == (0, 0)


def test_a_case_that_no_part_names_was_measured_nobody_knows_where() -> None:
    parts = (PartInfo("a", "n1", "x", cases=("a",)), PartInfo("b", "n2", "y", cases=("b",)))

    def made(value: float, **changes: object) -> Run:
        whole = run(measurement(case="c", value=value), **changes)
        return replace(whole, manifest=replace(whole.manifest, parts=parts))

    before = made(2e-6, id="before", created="2026-10-01T21:30:00+00:00")
    assert decide(made(1e-6), before).counts.changed == 0


def test_every_level_that_was_written_is_read(tmp_path: Path) -> None:
    cases = ("one", "two", "a | name | with bars")
    rows = [measurement(case=case) for case in cases]
    pin = pin_of(run(*rows), {}, "as measured", "2026-11-01")
    pins.write(pin, pins.file_of(pin, tmp_path))
    [read] = pins.load("cpu", tmp_path).pins
    assert read.groups == pin.groups
    assert {group[0] for group in read.groups} == set(cases)


def test_a_damaged_baseline_gives_way_to_the_run_before(tmp_path: Path) -> None:
    kept = write_run(tmp_path, earlier(measurement(), day=17))
    damaged = write_run(tmp_path, earlier(measurement(), day=18))
    (damaged / "findings.parquet").write_bytes(b"PAR1")
    history = load_history(tmp_path, run(measurement()))
    assert history.baseline is not None and history.baseline.id == kept.name
    assert [folder for folder, _ in history.unreadable] == [damaged]


def test_a_gate_that_varied_once_has_varied(tmp_path: Path) -> None:
    for day, repeats in ((17, True), (18, False), (19, True)):
        write_run(tmp_path, earlier(measurement(deterministic=repeats), day=day))
    assert load_history(tmp_path, run(measurement())).past[KEY].varied
