"""Machines: what identifies one, and what a run is held against on its own and on another."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parity.engine.measure.measurement import Kind
from parity.engine.measure.metrics import POOLED
from parity.executors import machine
from parity.tolerances import DRIFT_DEVIATIONS, DRIFT_TYPICAL
from reports.page.sections.marks import of_sections
from reports.provenance.host import FIELDS, UNKNOWN, differences, fingerprint
from reports.registry.listing import summarise_runs
from reports.registry.lookup import change_lines, comparison_lines, judge_stored
from reports.registry.retention import plan
from reports.store.runs import Run, list_runs, write_run
from reports.store.schema import SCHEMA, StoreError
from reports.verdict import anchors, levels, pins
from reports.verdict.anchors import anchor_pins, find_anchors
from reports.verdict.changes import What
from reports.verdict.completeness import FIRST_SCHEMA
from reports.verdict.decide import Word, decide
from reports.verdict.drift import compare_with_pins, levels_of, limit
from reports.verdict.history import Past
from reports.verdict.pins import pin_of
from stability.core.findings import Severity
from tests.reports.nights import failing, finding, measurement, reseal, run

SUITES = [{"name": "parity", "status": "ran", "planned": 1, "executed": 1, "reason": ""}]
HERE = dict.fromkeys(FIELDS, "known")
THERE = HERE | {"model": "another"}
GROUP = "baseline | jax32:oracle | logits | rel_l2"


def night(value: float = 1e-6, day: int = 1, **changes: Any) -> Run:
    row = measurement(value=value, **changes.pop("row", {}))
    name = f"2026-11-{day:02d}T21-30-00Z-0000000"
    created = f"2026-11-{day:02d}T21:30:00+00:00"
    return run(row, **{"id": name, "created": created, "suites": SUITES, **changes})


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """Pin runs in an empty folder of pinned baselines."""
    folder = tmp_path / "pinned"
    folder.mkdir()
    monkeypatch.setattr(pins, "FOLDER", folder)

    def pin(made: Run) -> None:
        pin = pin_of(made, {}, "as measured", "2026-11-01")
        pins.write(pin, pins.file_of(pin))

    return pin


AMD = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC
stepping\t: 1
flags\t\t: fpu sse sse2 avx avx2 fma ibpb
"""
ARM = """processor\t: 0
BogoMIPS\t: 50.00
Features\t: fp asimd sve
CPU implementer\t: 0x41
CPU architecture: 8
CPU part\t: 0xd4f
CPU revision\t: 1
"""


@pytest.mark.parametrize(("text", "vendor"), [(AMD, "AuthenticAMD"), (ARM, "0x41")])
def test_a_processor_is_more_than_its_name(tmp_path: Path, monkeypatch, text, vendor) -> None:
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")

    def read(content: str) -> dict[str, str]:
        (tmp_path / "cpuinfo").write_text(f"{content}\n{content}", encoding="utf-8")
        return machine.host()

    names = read(text)
    assert names["vendor"] == vendor
    assert UNKNOWN not in names.values()
    # A kernel that knows of another mitigation computes as before; another vector unit does not.
    assert read(text.replace("ibpb", "ibpb ibrs")) == names
    wider = read(text.replace(" avx2", " avx2 avx512f").replace(" sve", " sve sve2"))
    assert {n for n in FIELDS if wider[n] != names[n]} == {"instructions"}


def test_a_processor_that_cannot_be_read_equals_none(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "none")
    monkeypatch.setattr(machine.subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(OSError()))
    assert {machine.host()[name] for name in FIELDS} == {UNKNOWN}
    unknown = night(host={})
    assert fingerprint(unknown.manifest.environment) is None
    [comparison] = compare_with_pins(unknown, levels_of(unknown, {}), [pin_of(unknown, {})])
    assert not comparison.same
    assert "cannot be identified" in decide(unknown, None).sentence


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"host": THERE}, "processor x86_64"),
        ({"threads": 1}, "threads 2 → 1"),
        ({"flags": {"ATEN_CPU_CAPABILITY": "default"}}, "ATEN_CPU_CAPABILITY none → default"),
        ({"versions": {"jax": "0.11"}}, "jax 0.10.1 → 0.11"),
        ({"reference": {"kind": "live", "capability": "AVX2"}}, "reference kind recorded → live"),
    ],
    ids=["processor", "threads", "flags", "versions", "reference"],
)
def test_whatever_chooses_kernels_is_another_machine_and_is_named(changes, said) -> None:
    one, other = night(), night(**changes)
    assert fingerprint(one.manifest.environment) == fingerprint(night().manifest.environment)
    assert fingerprint(one.manifest.environment) != fingerprint(other.manifest.environment)
    assert any(
        said in line for line in differences(other.manifest.environment, one.manifest.environment)
    )


def test_levels_of_another_machine_may_differ_as_far_as_rounding_scatters_them() -> None:
    """The limit is four deviations of a difference of two draws, and never under that of here."""
    spreads = {GROUP: [0.15, 0.15]}
    allowed = limit(DRIFT_TYPICAL, 0.15, same=False)
    assert allowed == pytest.approx(math.exp(DRIFT_DEVIATIONS * math.sqrt(2) * 0.15))
    assert limit(DRIFT_TYPICAL, 0.0, same=False) == limit(DRIFT_TYPICAL, 0.15, same=True)
    pin = pin_of(night(spreads=spreads), {}, "as measured", "2026-11-01")

    def word(value: float, **changes: Any) -> Word:
        return decide(night(value, spreads=spreads, **changes), None, {}, [pin]).word

    inside, outside = 1e-6 * allowed * 0.99, 1e-6 * allowed * 1.02
    assert (word(inside, host=THERE), word(outside, host=THERE)) == (Word.PASS, Word.REGRESSED)
    # The same night on the pinned baseline's own machine has drifted.
    assert (word(inside), word(1.29e-6)) == (Word.REGRESSED, Word.PASS)
    # Nothing is explained by rounding where nothing was calibrated.
    still = pin_of(night(), {}, "as measured", "2026-11-01")
    uncalibrated = decide(night(1.31e-6, host=THERE), None, {}, [still])
    assert uncalibrated.word is Word.REGRESSED


def test_a_change_beyond_rounding_names_both_machines_the_furthest_first() -> None:
    rows = [measurement(), measurement(case="slow", value=1e-6)]
    pin = pin_of(run(*rows), {}, "as measured", "2026-11-01")
    now = [replace(rows[0], value=1.4e-6), replace(rows[1], value=1.9e-6)]
    result = decide(run(*now, host=THERE, reference={"kind": "live"}), None, {}, [pin])
    assert [c.case for c in result.changes] == ["slow", "baseline"]
    assert "slow" in result.sentence
    [line, _] = change_lines(result.changes)
    assert "1.90 times that of run" in line
    # Both machines and both kinds of reference.
    assert "reference recorded" in line and "here x86_64" in line and "reference live" in line
    assert "model another" in line and "rounding between them explains" in line


def test_the_first_night_on_a_machine_passes_and_says_what_it_is(tmp_path: Path, pinned) -> None:
    root = tmp_path / "runs"
    pinned(night(spreads={GROUP: [0.1, 0.1]}))
    folder = write_run(root, night(1.5e-6, host=THERE, spreads={GROUP: [0.1, 0.1]}))
    result = judge_stored(folder)
    assert result.decision.word is Word.PASS
    for text in ("First night on this machine: it becomes", "ratio 1.50", "limit 1.76"):
        assert text in result.decision.sentence
    assert "1 of 1 level comparable" in comparison_lines(result)[0]
    # The next one has an anchor, and is held to it as closely as ever.
    later = [night(value, day, host=THERE) for day, value in ((2, 1.7e-6), (3, 2.0e-6))]
    near, far = (judge_stored(write_run(root, made)).decision for made in later)
    assert "First night" not in near.sentence
    assert (near.word, far.word) == (Word.CHANGED, Word.REGRESSED)
    assert "the oldest healthy run on this machine" in far.against[0]


def test_nothing_to_compare_with_is_said(tmp_path: Path, pinned) -> None:
    result = judge_stored(write_run(tmp_path / "runs", night()))
    assert result.decision.word is Word.PASS
    assert "no levels were compared: there is no pinned run" in result.decision.sentence
    pinned(night(row={"identity": "other work"}))
    result = judge_stored(write_run(tmp_path / "runs", night(host=THERE, day=2)))
    assert "no levels were compared" in result.decision.sentence
    (pins.FOLDER / "cpu.json").write_text(json.dumps({"schema": 2}), encoding="utf-8")
    result = judge_stored(write_run(tmp_path / "runs", night(day=3)))
    assert any(
        "cpu.json is not used: expected a pinned baseline of schema" in s
        for s in comparison_lines(result)
    )


def test_the_anchor_is_the_oldest_healthy_night_and_does_not_follow(tmp_path: Path, pinned) -> None:
    """One percent a night is found in four weeks where nobody pinned anything."""
    root = tmp_path / "runs"
    unfit = [
        night(5e-6, 1),  # Breaks its tolerance.
        night(5e-7, 2, fault="conjugate"),
        night(5e-7, 3, selected=["plain"]),
        night(5e-7, 4, suites=[{**SUITES[0], "executed": 0}]),
        night(5e-7, 5, threads=1),
        night(5e-7, 0, kind="pytest"),
    ]
    for made in unfit:
        write_run(root, made)
    folders = [write_run(root, night(1e-6 * 1.06**n, 6 + n)) for n in range(6)]
    words = [judge_stored(folder).decision.word for folder in folders]
    assert words == [Word.CHANGED] * 5 + [Word.REGRESSED]
    result = judge_stored(folders[-1]).decision
    assert folders[0].name in result.against[0]
    # An anchor is never pruned, also that of another machine.
    spared = {folder.name[:10]: why for folder, why in plan(root, 1).spared}
    assert spared["2026-11-06"].startswith("anchor of the machine of 2026-11-11")
    assert spared["2026-11-05"].startswith("anchor")
    assert "2026-11-02" not in spared


@pytest.mark.parametrize("schema", [SCHEMA, FIRST_SCHEMA - 1])
def test_a_night_from_before_contracts_anchors_levels_and_passes_nothing(
    schema: int, tmp_path: Path, pinned
) -> None:
    """Nobody knows which gates it should have had; those that it has are levels all the same."""
    root = tmp_path / "runs"
    old = reseal(write_run(root, night()), schema=schema)
    assert (judge_stored(old).decision.word is Word.PASS) is (schema == SCHEMA)
    later = judge_stored(write_run(root, night(1.9e-6, 2))).decision
    assert later.word is Word.REGRESSED and old.name in later.against[0]
    # Negative control: one that breaks its tolerance anchors none, whatever its schema.
    root = tmp_path / "others"
    reseal(write_run(root, night(5e-6)), schema=schema)
    assert judge_stored(write_run(root, night(1.9e-6, 2))).decision.against == ()


def test_the_baseline_is_of_the_same_machine_where_there_is_one(tmp_path: Path, pinned) -> None:
    root = tmp_path / "runs"
    for day, where in ((1, HERE), (2, THERE)):
        write_run(root, night(day=day, host=where))
    decision = judge_stored(write_run(root, night(1.01e-6, day=3))).decision
    assert (decision.word, decision.baseline_id[:10]) == (Word.CHANGED, "2026-11-01")


def test_a_list_shows_what_was_said_of_each_run(tmp_path: Path) -> None:
    write_run(tmp_path, night(verdict="REGRESSED"))
    assert summarise_runs(tmp_path)[0][0].verdict == "REGRESSED"


def test_red_sections_are_marked() -> None:
    port = {"case": "mla-moe moe", "edge": "port32:port64", "suite": "mla-moe"}
    drifted = [measurement(**port), measurement(kind=Kind.STATE)]
    pin = pin_of(run(*drifted), {}, "as measured", "2026-11-01")
    rows = [replace(m, value=3e-6) for m in drifted[:1]] + drifted[1:]
    errors = [finding(probe="survival", severity=Severity.ERROR)]
    decision = decide(run(*rows), None, {}, [pin])
    assert of_sections(rows, errors, decision).keys() == {
        *("architectures", "changes", "records", "underflow"),
    }
    healthy = decide(run(*drifted), None, {}, [pin])
    warned = [finding(probe="survival", severity=Severity.WARNING)]
    assert of_sections(drifted, warned, healthy) == {}
    narrow = [failing(edge="jaxbf16:oracle")]
    assert "precision" in of_sections(narrow, [], decide(run(*narrow), None))


def test_the_spread_of_a_level_is_that_of_repeating_it() -> None:
    """Both estimates agree with drawing levels again, for gates that move together."""
    rng = np.random.default_rng(0)

    def draw(draws: int) -> np.ndarray:
        shared, own = rng.normal(size=(1, draws)), rng.normal(size=(8, draws))
        return np.exp(0.3 * shared + 0.1 * own)

    expected = math.hypot(0.3, 0.1 / math.sqrt(8))
    seeds = (
        np.mean([levels.spread_over_seeds(draw(10).tolist())[0] ** 2 for _ in range(400)]) ** 0.5
    )
    draws = (
        np.mean([levels.spread_by_jackknife(draw(16).tolist())[0] ** 2 for _ in range(400)]) ** 0.5
    )
    sampling = 4 / math.sqrt(2 * 9 * 400)  # Relative error of a deviation, four times.
    assert abs(seeds / expected - 1) < sampling
    assert abs(draws * 4 / expected - 1) < sampling
    # Gates as independent numbers would be said to scatter three times less than they do.
    assert expected > 2 * math.hypot(0.3, 0.1) / math.sqrt(8)


def test_what_was_pooled_has_its_level_there() -> None:
    rows = [measurement(edge="port32:port64", metric=metric) for metric in ("rel_l2", POOLED)] + [
        measurement(edge="port32:original32")
    ]
    assert [(e, metric) for _, e, _, metric in levels.group_gates(rows)] == [
        ("port32:original32", "rel_l2"),
        ("port32:port64", POOLED),
    ]


@pytest.mark.parametrize("old", [False, True], ids=["pin", "pin without tolerances"])
def test_a_loosened_tolerance_is_no_drift(old: bool) -> None:
    # Far below its tolerance, a level is a share of it; further up it is the error itself.
    low, high = 1e-9, 1e-6
    for value, says in ((low, True), (high, False)):
        then, now = night(value), night(value, 2, row={"tolerance": 15e-6})
        pin = pin_of(then, {}, "as measured", "2026-11-01")
        if old:
            names = {g: replace(it, tolerance=0.0, floored=0) for g, it in pin.groups.items()}
            pin = replace(pin, groups=names)
        decision = decide(now, then, pins=[pin])
        assert decision.word is Word.PASS, decision.sentence
        notes = [c.note for c in decision.changes if "tolerance changed from 4.0e-06" in c.note]
        assert bool(notes) is says
        assert decision.comparisons[0].comparable == (0 if says else 1)


def test_a_level_that_rested_on_another_tolerance_has_no_ratio() -> None:
    """The pinned one was a share of its tolerance and that of today is the error itself, or the
    reverse: a tolerance that is loosened lifts the level above the error."""
    for was, value, tolerance in ((1e-9, 1e-6, 15e-6), (1e-7, 1e-7, 1e-4)):
        then, now = night(was), night(value, 2, row={"tolerance": tolerance})
        decision = decide(now, None, pins=[pin_of(then, {}, "as measured", "2026-11-01")])
        assert decision.comparisons[0].comparable == 0
        assert len(decision.comparisons[0].rescaled) == 1
        assert decision.word is Word.PASS


def test_a_level_that_rests_on_its_tolerance_may_still_rise_above_it() -> None:
    then, now = night(1e-9), night(2e-6, 2)
    pin = pin_of(then, {}, "as measured", "2026-11-01")
    decision = decide(now, None, pins=[pin])
    assert decision.word is Word.REGRESSED
    assert [c.what for c in decision.changes] == [What.DRIFTED]


KEY = ("baseline", "jax32:oracle", "logits", "rel_l2")
LEVEL = tuple(GROUP.split(" | "))


def test_one_unknown_field_makes_a_processor_unknown() -> None:
    assert fingerprint(night(host=HERE | {"stepping": UNKNOWN}).manifest.environment) is None
    assert fingerprint(night().manifest.environment) is not None


def test_of_other_machines_one_with_the_same_reference_is_preferred_then_the_newest() -> None:
    run_here = night(reference={"kind": "live"})

    def pinned(name: str, kind: str) -> pins.Pin:
        return pin_of(night(id=name, host=THERE, reference={"kind": kind}), {}, "", "2026-11-01")

    candidates = [pinned("newest", "recorded"), pinned("newer", "live"), pinned("old", "live")]
    [comparison] = compare_with_pins(run_here, levels_of(run_here, {}), candidates)
    assert (comparison.pin.run, comparison.same) == ("newer", False)
    [comparison] = compare_with_pins(run_here, levels_of(run_here, {}), candidates[:1])
    assert comparison.pin.run == "newest"


def test_pins_are_read_newest_first_and_a_new_one_replaces_its_machine_s(pinned) -> None:
    for day, where in (("2026-11-02", HERE), ("2026-11-03", THERE)):
        pin = pin_of(night(id=f"of-{day}", host=where), {}, "as measured", day)
        pins.write(pin, pins.file_of(pin))
    assert [g.run for g in pins.load("cpu").pins] == ["of-2026-11-03", "of-2026-11-02"]
    # An update of a library is the same machine.
    updated = pin_of(night(versions={"jax": "0.11"}), {}, "updated", "2026-11-04")
    assert pins.file_of(updated) == pins.file_of(pin_of(night(), {}))


def test_a_pin_of_another_schema_is_named_and_not_used(pinned) -> None:
    """It may mean something else by the same words, whatever it holds."""
    pin = pin_of(night(), {}, "as measured", "2026-11-01")
    path = pins.file_of(pin)
    pins.write(pin, path)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(f'"schema": {pins.SCHEMA}', '"schema": 2'), encoding="utf-8")
    names = pins.load("cpu")
    assert (names.pins, len(names.unusable)) == ((), 1)
    assert f"expected a pinned baseline of schema {pins.SCHEMA}" in names.unusable[0]


def test_a_spread_that_one_side_lacks_is_the_others() -> None:
    spreads = {GROUP: [0.15, 0.15]}
    inside = 1e-6 * limit(DRIFT_TYPICAL, 0.15, same=False) * 0.99
    for then, now in (({}, spreads), (spreads, {}), (spreads, spreads)):
        pin = pin_of(night(spreads=then), {}, "as measured", "2026-11-01")
        decision = decide(night(inside, host=THERE, spreads=now), None, {}, [pin])
        assert decision.word is Word.PASS


def test_what_does_not_repeat_counts_with_its_newest_values_and_is_pinned_at_its_largest() -> None:
    row = measurement(value=3e-6, deterministic=False)
    past = {KEY: Past((1e-6,) * 7 + (3.5e-6,) + (3e-6,) * 6, True)}
    assert levels.levels([row], past)[LEVEL].typical == 3e-6
    assert pin_of(run(row), past).groups[LEVEL].typical == 3e-6
    jumped = {KEY: Past((1e-6, 3.9e-6, 1e-6), True)}
    assert pin_of(run(row), jumped).groups[LEVEL].typical == 3.9e-6


def test_a_level_is_a_geometric_mean_and_the_worst_of_its_gates() -> None:
    """An arithmetic one would be what its worst gate is: decades lie between gates of a group."""
    values = (1e-7, 1e-6, 4e-6)
    rows = [measurement(quantity=f"layers.{i}", value=v) for i, v in enumerate(values)]
    level = levels.levels(rows, {})[LEVEL]
    # A level is kept with three digits.
    assert f"{level.typical:.2e}" == f"{math.prod(values) ** (1 / 3):.2e}"
    assert (level.worst, level.gates) == (4e-6, 3)


def test_a_group_that_was_calibrated_in_part_has_no_spread() -> None:
    rows = [measurement(quantity=name, kind=Kind.BLOCK) for name in ("one", "two")]
    responses = {"one": [1e-7, 2e-7, 3e-7], "two": [2e-7, 3e-7, 1e-7]}
    names = {("baseline", "rel_l2"): responses}
    assert len(levels.spreads_of(rows, names)) == 1
    del responses["two"]
    assert levels.spreads_of(rows, names) == {}


MESHES = ("mesh net data=8", "mesh net data=2 tensor=4", "mesh net data=1 tensor=8")


def on_meshes(*values: float, host: Any = HERE, day: int = 1, spread: float = 0.15) -> Run:
    """A night of one gate on each mesh, and one of another subject."""
    cases = zip((*MESHES, "mesh other data=8"), (*values, 1e-6), strict=True)
    gate = {"edge": "mesh32:one32", "tolerance": 1e-4, "suite": "parity"}
    rows = [measurement(case=case, value=value, **gate) for case, value in cases]
    spreads = {f"{m.case} | {m.edge} | logits | rel_l2": (spread, spread) for m in rows}
    whole = night(day=day, host=host).manifest
    created = {"id": whole.id, "created": whole.created}
    return run(*rows, **created, suites=SUITES, host=host, spreads=spreads)


@pytest.mark.parametrize(
    ("host", "values", "cases"),
    [
        # Of another machine one partition tells nothing, and all of them together do.
        (THERE, (8e-6, 2e-6, 1e-6), ()),
        (THERE, (8e-6, 8e-6, 8e-6), ("mesh net",)),
        # On one machine each repeats.
        (HERE, (8e-6, 2e-6, 1e-6), MESHES[:1]),
    ],
)
def test_meshes_are_compared_together_with_another_machine(
    host: Any, values: tuple[float, ...], cases: tuple[str, ...]
) -> None:
    pin = pin_of(on_meshes(2e-6, 2e-6, 2e-6, host=host), {}, "as measured", "2026-11-01")
    decision = decide(on_meshes(*values, day=2), None, pins=[pin])
    assert tuple(c.case for c in decision.changes if c.what is What.DRIFTED) == cases
    assert decision.word is (Word.REGRESSED if cases else Word.PASS)
    [comparison] = decision.comparisons
    # The mesh of a subject that has no other is compared as it is.
    assert comparison.comparable == (2 if host == THERE else 4)
    assert comparison.covered == comparison.levels == 4


def test_meshes_that_were_compared_together_are_not_compared_with_the_next_machine() -> None:
    """An older pin of a third machine would find the same levels a second time."""
    third = HERE | {"model": "a third"}
    near, far = (
        pin_of(on_meshes(*(level,) * 3, host=host), {}, "as measured", "2026-11-01")
        for host, level in ((THERE, 2e-6), (third, 2e-8))
    )
    decision = decide(on_meshes(2e-6, 2e-6, 2e-6, day=2), None, pins=[near, far])
    [comparison] = decision.comparisons
    assert comparison.pin == near and comparison.comparable == 2
    assert decision.word is Word.PASS


def test_meshes_that_a_machine_has_measured_are_comparable_already() -> None:
    """Where one draw tells nothing of another machine, an earlier run of this one does."""
    level = (2e-6, 2e-6, 2e-6)
    own, other = (
        pin_of(on_meshes(*level, host=host), {}, "as measured", "2026-11-01")
        for host in (HERE, THERE)
    )
    now = on_meshes(*level, day=2, spread=0.5)
    [first] = decide(now, None, pins=[other]).comparisons
    assert {d.group[0] for d in first.not_yet} == {"mesh net", "mesh other data=8"}
    _, second = decide(now, None, pins=[own, other]).comparisons
    assert second.not_yet == ()


def test_meshes_are_comparable_already_only_if_this_machine_has_measured_all_of_them() -> None:
    """What is compared with another machine is their common level."""
    own, other = (
        pin_of(on_meshes(2e-6, 2e-6, 2e-6, host=host), {}, "as measured", "2026-11-01")
        for host in (HERE, THERE)
    )
    one = [group for group in own.groups if group[0] == MESHES[0]]
    assert one
    own = replace(own, groups={group: own.groups[group] for group in one})
    now = on_meshes(2e-6, 2e-6, 2e-6, day=2, spread=0.5)
    _, second = decide(now, None, pins=[own, other]).comparisons
    assert "mesh net" in {d.group[0] for d in second.not_yet}


def test_a_pooled_level_is_that_of_all_gates() -> None:
    """Weighted by their numbers, as the level of all of them in one group would be."""
    many = {MESHES[0]: (1e-6, 2e-6, 4e-6), MESHES[1]: (1e-9,)}
    rows = [
        measurement(
            case=case, quantity=f"q{n}", identity=f"{case}{n}", value=v, edge="mesh32:one32"
        )
        for case, values in many.items()
        for n, v in enumerate(values)
    ]
    own = levels.levels(rows, {}, {f"{MESHES[1]} | mesh32:one32 | logits | rel_l2": (0.1, 0.4)})
    [(common, members)] = levels.over_meshes(own).items()
    assert common == ("mesh net", "mesh32:one32", "logits", "rel_l2")
    found = levels.pooled([own[group] for group in members])
    [alone] = levels.levels([replace(m, case="mesh net") for m in rows], {}).values()
    # Each typical level is kept with three digits.
    assert found.typical == pytest.approx(alone.typical, rel=0.01)
    assert (found.gates, found.floored) == (4, alone.floored)
    worst = math.prod(own[group].worst ** own[group].gates for group in members) ** (1 / 4)
    assert found.worst == pytest.approx(worst, rel=0.01) != own[members[0]].worst
    assert found.tolerance == alone.tolerance and found.spread == (0.1, 0.4)
    # A case that has "=" in its name and is on no mesh is not pooled, and one mesh is no pool.
    other = [replace(m, edge="jax32:oracle") for m in rows] + rows[:1]
    assert levels.over_meshes(levels.levels(other, {})) == {}


def test_an_anchor_measured_all_gates_of_its_level(tmp_path: Path) -> None:
    rows = [measurement(quantity=name, kind=Kind.BLOCK) for name in ("one", "two")]

    def made(day: int, *measured: Any) -> Run:
        whole = night(day=day)
        return Run(whole.manifest, measured)

    write_run(tmp_path, made(1, rows[0]))
    write_run(tmp_path, made(2, *rows))
    [anchor] = find_anchors(tmp_path, made(3, *rows), lambda old: True)
    assert anchor.id.startswith("2026-11-02")
    assert find_anchors(tmp_path, made(3, *rows), lambda old: False) == ()


def test_an_anchor_of_more_gates_than_a_level_has_is_none_of_it(tmp_path: Path) -> None:
    """A gate that is retired makes another level: the first night without it is its anchor.

    The older nights measured all of its gates, and their level, of one gate more, is compared with
    nothing: it would have gone unjudged on this machine for ever.
    """
    rows = [measurement(quantity=name, kind=Kind.BLOCK) for name in ("one", "two")]
    other = measurement(quantity="logits")

    def made(day: int, *measured: Any) -> Run:
        return Run(night(day=day).manifest, measured)

    # The oldest is an anchor for its other level, and hides nothing of the newer one's.
    write_run(tmp_path, made(1, other, *rows))
    write_run(tmp_path, made(2, rows[0]))
    write_run(tmp_path, made(3, replace(rows[0], value=2e-6)))
    today = made(4, other, replace(rows[0], value=3e-6))
    found = find_anchors(tmp_path, today, lambda old: True)
    assert [anchor.id[:10] for anchor in found] == ["2026-11-01", "2026-11-02"]
    decision = decide(today, None, {}, anchor_pins(found, today))
    assert {c.kind: c.before for c in decision.changes} == {"block": rows[0].value}
    assert decision.comparisons[0].comparable == 2


def test_a_night_is_an_anchor_only_for_a_level_that_no_older_one_has(tmp_path: Path) -> None:
    """The second measured a gate more of one level, and the other level has its anchor already."""
    one, two = (measurement(quantity=name, kind=Kind.BLOCK) for name in ("one", "two"))
    other = measurement(quantity="logits")

    def made(day: int, rows: list[Any]) -> Run:
        # Nights of one code measure other gates where a case or an edge is left out.
        return Run(replace(night(day=day).manifest, code="1a2b"), tuple(rows))

    for day, rows in ((1, [other]), (2, [other, one, two]), (3, [other, one])):
        write_run(tmp_path, made(day, rows))
    found = find_anchors(tmp_path, made(4, [other, one]), lambda old: True)
    assert [anchor.id[:10] for anchor in found] == ["2026-11-01", "2026-11-03"]


def test_as_many_anchors_are_found_as_levels_need(tmp_path: Path) -> None:
    """Each night adds a level, and measures gates more of those that the nights before it had."""
    rows: list[Any] = []
    for day, kind in enumerate(levels.KINDS, 1):
        earlier = [replace(m, quantity=f"{m.quantity} {day}") for m in rows]
        rows.append(measurement(quantity=kind.value, kind=kind))
        write_run(tmp_path, Run(night(day=day).manifest, (rows[-1], *rows[:-1], *earlier)))
    today = Run(night(day=day + 1).manifest, tuple(rows))
    found = find_anchors(tmp_path, today, lambda old: True)
    assert [anchor.id for anchor in found] == [night(day=n).id for n in range(1, day + 1)]


def test_what_is_told_of_a_reference_makes_no_other_machine(tmp_path: Path) -> None:
    """Nor does an empty variable, which older runs do not store."""
    told = {"kind": "recorded", "commit": "082db4b", "detail": "recordings of another day"}
    write_run(tmp_path, night(day=1, reference=told, flags={}))
    [anchor] = find_anchors(tmp_path, night(day=2), lambda old: True)
    assert anchor.id == night(day=1).id


def test_a_machine_that_cannot_be_identified_has_no_anchor(tmp_path: Path) -> None:
    """Not even a night of the same environment: it may have been made anywhere."""
    write_run(tmp_path, night(day=1, host={}))
    assert find_anchors(tmp_path, night(day=2, host={}), lambda old: True) == ()


def test_a_night_that_broke_meanwhile_is_no_anchor_and_hides_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [write_run(tmp_path, night(day=day)) for day in (1, 2)]
    read = anchors.read_run

    def damaged(folder: Path) -> Run:
        if folder == folders[0]:
            raise StoreError("damaged meanwhile")
        return read(folder)

    monkeypatch.setattr(anchors, "read_run", damaged)
    [anchor] = find_anchors(tmp_path, night(day=3), lambda old: True)
    assert anchor.id == folders[1].name


def test_a_run_whose_work_is_unknown_is_asked_for_its_own_levels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for day, identity in ((1, "other"), (2, "same")):
        write_run(tmp_path, night(day=day, row={"identity": identity}))
    listed = [replace(info, work="") for info in list_runs(tmp_path)[0]]
    assert len(listed) == 2
    monkeypatch.setattr(anchors, "list_runs", lambda root: (listed, []))
    [anchor] = find_anchors(tmp_path, night(day=3), lambda old: True)
    assert anchor.id == night(day=2).id


def test_a_level_that_several_anchors_measured_is_that_of_the_oldest() -> None:
    """The newer ones hold what the oldest did not measure, and nothing else."""
    one, two = (measurement(quantity=name, kind=kind) for name, kind in KINDS.items())

    def made(day: int, *rows: Any) -> Run:
        return Run(night(day=day).manifest, rows)

    def levels_at(value: float) -> dict[Any, float]:
        rows = (replace(one, value=value), replace(two, value=value))
        return {g: level.typical for g, level in levels.levels(rows, {}).items()}

    old, newer = made(1, one), made(2, replace(one, value=2e-6), replace(two, value=2e-6))
    [group] = levels.levels([one], {})
    today = made(4, one, two)
    [pin] = anchor_pins([old, newer], today)
    assert pin.run == old.id
    found = {g: level.typical for g, level in pin.groups.items()}
    assert found == {**levels_at(2e-6), group: levels_at(one.value)[group]}
    # Of anchors that measured the same, the oldest alone speaks.
    [pin] = anchor_pins([newer, made(3, one, two)], today)
    assert {g: level.typical for g, level in pin.groups.items()} == levels_at(2e-6)
    assert anchor_pins([], today) == ()


KINDS = {"logits": Kind.LOGITS, "layers.0": Kind.BLOCK}
