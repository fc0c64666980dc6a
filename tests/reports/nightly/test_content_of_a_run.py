"""What a night stores and says of what its suites measured, field by field."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from parity.engine.measure.contract import Gate, contract_of
from parity.engine.measure.measurement import Verdict
from parity.executors.pace import duration
from reports.nightly import run as module
from reports.nightly.expected import FIRST
from reports.nightly.run import Options, nightly
from reports.nightly.shards import Shard
from reports.store.manifest import CheckpointInfo, Time
from reports.store.runs import read_run
from reports.store.schema import RunKind
from reports.subjects.megalodon import suites as megalodon_suites
from reports.suite_run import SuiteRun
from reports.verdict.decide import Word
from tests.reports.nightly.world import World
from tests.reports.nights import described, explained, failing, finding, measurement

CASES = ("plain", "length_c")
ASKED = (*CASES, "mxfp8")


@pytest.fixture
def world(tmp_path: Path) -> World:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "weights").write_bytes(b"one")
    return World(tmp_path / "mine")


def parity(cases: Collection[Any], reference: Any, report: Any, at: Any) -> SuiteRun:
    """Two cases, one of which fails with all that is kept of a failure."""
    suite = SuiteRun("parity", len(cases), seconds=1.23456)
    for turn, case in enumerate(cases):
        at(turn)
        row = measurement(case=case.name, identity=case.name)
        bad = failing(case=case.name, identity=case.name, quantity="bad")
        suite.contract += [Gate.of(row), Gate.of(bad)]
        suite.measurements += [row, bad]
        suite.times[case.name, "jax32:oracle"] = 0.98765 + turn
        suite.responses[case.name, "rel_l2"] = {"logits": (1e-7, 2e-7), "bad": (1e-7, 4e-7)}
        suite.executed += 1
    for deviation in described([failing(case=CASES[0])]):
        suite.tensors.found.append(deviation)
    suite.explanations.append(explained(CASES[0]))
    return suite


def products(reference: Any, report: Any, only: Collection[str]) -> SuiteRun:
    rows = [measurement(case=name, edge="products", suite="products") for name in only]
    planned = [Gate.of(row) for row in rows]
    return SuiteRun("products", 1, len(rows), seconds=2.0, contract=planned, measurements=rows)


def probes(checkpoint: Any, model: Any, report: Any) -> SuiteRun:
    suite = SuiteRun("stability", 1, 1, seconds=3.0, findings=[finding()], shown={"poles": [1.0]})
    suite.times["values", ""] = 0.5
    return suite


def controls(reference: Any, report: Any) -> SuiteRun:
    return SuiteRun("controls", 2, 2, seconds=4.0)


def made(world: World, options: Options, steps: list[Any], lines: list[str]) -> Any:
    """The outcome of a night of these suites, each of which says whether a bug is planted."""

    def told(suite: Any) -> Any:
        def measured(*arguments: Any) -> SuiteRun:
            lines.append(f"{suite.__name__}: {'with' if world.planted else 'without'} a bug")
            return suite(*arguments)

        return measured

    suites = {"run_parity": parity, "run_stability": probes, "run_controls": controls}
    patches = {name: told(suite) for name, suite in suites.items()}
    with world.in_place(world.checkpoint.parent / "pins"):
        for name, suite in patches.items():
            mock.patch.object(megalodon_suites, name, suite).start()
        try:
            functions = {**module.measured(), "(products)": told(products)}
            with mock.patch.object(module, "measured", lambda: functions):
                return nightly(options, lines.append, lambda *told: steps.append(told))
        finally:
            mock.patch.stopall()


def test_a_run_holds_what_each_suite_measured(world: World, tmp_path: Path) -> None:
    options = Options(tmp_path / "runs", ASKED, "recorded", world.checkpoint)
    steps, lines = list[Any](), list[str]()
    outcome = made(world, options, steps, lines)
    stored = read_run(outcome.folder)
    manifest = stored.manifest
    assert outcome.decision.word is Word.REGRESSED and manifest.kind is RunKind.NIGHTLY
    rows = [(m.case, m.quantity, m.verdict) for m in stored.measurements]
    assert rows == [
        *((case, q, v) for case in CASES for q, v in (("logits", Verdict.PASS), ("bad", "fail"))),
        ("mxfp8", "logits", Verdict.PASS),
    ]
    assert stored.findings == (finding(),)
    assert [t.case for t in stored.tensors] == [CASES[0]]
    assert stored.explanations == (explained(CASES[0]),)
    assert (manifest.plan, manifest.selected) == ((*CASES, "(products)", "(probes)"), ASKED)
    suites = [(s.name, s.planned, s.executed, s.status) for s in manifest.suites]
    assert suites == [
        ("parity", 2, 2, "ran"),
        ("products", 1, 1, "ran"),
        ("stability", 1, 1, "ran"),
    ]
    # Seconds are stored in milliseconds.
    assert manifest.durations == {"parity": 1.235, "products": 2.0, "stability": 3.0}
    assert manifest.times == (
        Time("parity", "plain", "jax32:oracle", 0.988),
        Time("parity", "length_c", "jax32:oracle", 1.988),
        Time("stability", "values", "", 0.5),
    )
    assert manifest.contract == contract_of([Gate.of(m) for m in stored.measurements])
    assert manifest.stability == {"poles": [1.0]}
    assert set(manifest.spreads) == {f"{c} | jax32:oracle | logits | rel_l2" for c in CASES}
    assert [case.name for case in manifest.cases] == list(CASES)
    assert manifest.environment.reference.kind == "recorded"
    assert (manifest.fault, manifest.shard, manifest.shards) == (None, None, ())
    probed = manifest.checkpoint
    assert isinstance(probed, CheckpointInfo) and probed.content
    assert (probed.name, probed.folder) == ("mine", str(world.checkpoint))
    assert (probed.config, probed.training, probed.parameters) == ({}, None, 3)
    assert lines[0] == "comparing JAX with the oracle and megalodon-hf (recorded), cases: 2"
    # A bug would be planted while cases and other suites are measured, not while weights are.
    assert lines[1:4] == [f"{name}: without a bug" for name in ("parity", "products", "probes")]
    planted = replace(options, out=tmp_path / "other", fault="rope")
    made(world, planted, [], lines := [])
    assert lines[1:5] == [
        "planted on purpose: rope",
        "parity: with a bug",
        "products: with a bug",
        "probes: without a bug",
    ]


def test_each_part_of_a_night_is_a_step(world: World, tmp_path: Path) -> None:
    """Each is told before it begins, with the seconds that the parts from it on will take."""
    plan = (*CASES, "(products)", "(probes)")
    expected = {part: FIRST[part] for part in plan}
    options = Options(tmp_path / "runs", ASKED, "recorded", world.checkpoint)
    steps: list[Any] = []
    made(world, options, steps, [])
    assert [(done, of) for done, of, _ in steps] == [(i, len(plan)) for i in range(len(plan) + 1)]
    low, high = (duration(sum(expected.values()) * factor) for factor in (0.5, 2))
    assert steps[0][2] == f"{low} to {high} left" and steps[-1][2] == ""


def test_a_shard_of_a_night_is_its_part_of_the_plan(world: World, tmp_path: Path) -> None:
    """The second of two shards has the second case and the probes, with a planted bug."""
    options = Options(tmp_path / "runs", ASKED, "recorded", world.checkpoint)
    lines, steps = list[str](), list[Any]()
    shard = replace(options, shard=Shard(2, 2), fault="rope")
    outcome = made(world, shard, steps, lines)
    assert [(done, of) for done, of, _ in steps] == [(0, 2), (1, 2), (2, 2)]
    manifest = read_run(outcome.folder).manifest
    assert outcome.decision is None and manifest.kind is RunKind.SHARD
    assert manifest.id.endswith("-shard-2-of-2") and manifest.shard == {"index": 2, "count": 2}
    assert manifest.plan == (*CASES, "(products)", "(probes)")
    assert [case.name for case in manifest.cases] == [CASES[1]]
    assert [suite.name for suite in manifest.suites] == ["parity", "stability"]
    assert manifest.fault == "rope" and "planted on purpose: rope" in lines


def test_a_whole_night_ends_with_its_controls(world: World, tmp_path: Path) -> None:
    """Parts without a suite here measure nothing; the order is that of the plan."""
    empty = {part: lambda *_: SuiteRun("seams", 0) for part in module.measured()}
    with mock.patch.object(module, "measured", lambda: empty):
        outcome = made(world, Options(tmp_path / "runs", reference="recorded"), steps := [], [])
    names = [suite.name for suite in outcome.run.manifest.suites]
    assert names[0] == "parity" and names[-2:] == ["stability", "controls"]
    assert [done for done, *_ in steps] == list(range(len(outcome.run.manifest.plan) + 1))
    probed = outcome.run.manifest.checkpoint
    assert probed is not None and (probed.folder, probed.content) == ("", "")
