"""What is asked of many stored runs, beside the same question asked of plain lists.

Folders of a few small runs are drawn at random: of several kinds, ports, machines and references,
with planted bugs and selections among them. Each question is answered a second time by a loop over
the drawn runs, written from docs/verdicts.md and docs/reports.md.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from parity.engine.measure.measurement import Key, Kind, Measurement, Verdict
from parity.tolerances import NOISE_WINDOW
from reports.provenance.host import FIELDS
from reports.registry.gate_changes import GateChanges, follow_gates
from reports.registry.listing import summarise_runs
from reports.registry.lookback import LATEST, look_back, measured_names
from reports.registry.lookup import anchors_of, find_run, judge
from reports.registry.retention import plan
from reports.store.runs import Run, list_lines, list_runs, write_run
from reports.store.schema import RunKind, StoreError
from reports.verdict import pins
from reports.verdict.history import load_history
from reports.verdict.pins import Pins
from tests.reports.nights import measurement, run
from tests.reports.verdict import rules

SEEDS, STORES, RUNS = range(3), 3, 14
TOLERANCE = 1e-6
GATES = (
    ("a", "jax64:oracle", "x", Kind.LOGITS),
    ("a", "jax64:oracle", "y", Kind.LOGITS),
    ("a", "jax32:oracle", "x", Kind.BLOCK),
    ("b", "jax32:oracle", "z", Kind.GRADIENT),
    ("b", "jax32:oracle", "loss", Kind.LOSS),
)


@pytest.fixture(autouse=True)
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pinned anything."""
    monkeypatch.setattr(pins, "FOLDER", tmp_path / "pinned")


@dataclass(frozen=True)
class Stored:
    """A run, and what the questions are about."""

    run: Run
    port: frozenset[str]
    machine: str | None
    whole: bool

    @property
    def id(self) -> str:
        return self.run.id

    @property
    def kind(self) -> RunKind:
        return self.run.manifest.kind

    @property
    def device(self) -> str | None:
        return self.run.manifest.environment.device.kind

    def kin(self, other: Stored) -> bool:
        """Whether both are of one kind and about one subject."""
        shared = bool(self.port & other.port) or self.port == other.port
        return self.kind is other.kind and shared


def drawn_rows(rng: random.Random, wild: float, suite: str) -> tuple[Measurement, ...]:
    rows = []
    for case, edge, quantity, kind in GATES:
        if rng.random() < 0.2:
            continue
        value = rng.choice((0.1, 0.2, 0.25, 0.5)) * TOLERANCE
        made = measurement(
            case=case,
            edge=edge,
            quantity=quantity,
            kind=kind,
            tolerance=TOLERANCE,
            value=rng.choice((2.0, math.nan)) * TOLERANCE if rng.random() < wild else value,
            identity=f"{case} {edge} {quantity} {rng.choice('iiiij')}",
            deterministic=rng.choice((True, True, False, None)),
            suite=suite,
        )
        if rng.random() < 0.1:
            made = replace(made, verdict=Verdict.INFO, tolerance=math.nan)
        rows.append(made)
    return tuple(rows)


def drawn_store(rng: random.Random) -> list[Stored]:
    """Runs of a folder, oldest first; the last is a night."""
    wild, found = rng.choice((0.0, 0.05, 0.3)), []
    for turn in range(RUNS):
        last = turn == RUNS - 1
        kind = "nightly" if last or rng.random() < 0.7 else rng.choice(("pytest", "port", "port"))
        names = {"port": rng.choice((["p"], ["q"], ["p", "q"]))}.get(kind, ["parity"])
        rows = drawn_rows(rng, wild, names[0])
        if len(names) > 1:
            rows = tuple(replace(m, suite=names[i % 2]) for i, m in enumerate(rows))
        model, reference = rng.choice("aaab?"), rng.choice(("recorded", "recorded", "live"))
        threads = rng.choice((2, 2, 2, 4))
        device = "cuda" if rng.random() < 0.1 else "cpu"
        partial = rng.random() < wild / 2
        changes: dict[str, Any] = {
            "id": f"2026-11-{turn + 1:02d}T21-30-00Z-0000000",
            "created": f"2026-11-{turn + 1:02d}T21:30:00+00:00",
            "kind": kind,
            "host": {} if model == "?" else dict.fromkeys(FIELDS, "known") | {"model": model},
            "device": {"kind": device, "name": "x86_64"},
            "threads": threads,
            "reference": {"kind": reference, "commit": "082db4b"},
            "suites": [
                {"name": n, "status": "ran", "planned": 2, "executed": 2 - partial} for n in names
            ],
            "fault": "conjugate" if rng.random() < 0.1 and not last else None,
            "selected": ["a"] if rng.random() < 0.15 else [],
        }
        # Of a GPU without what identifies it nobody knows the machine.
        known = model != "?" and device == "cpu"
        machine = f"{model} {threads} {reference}" if known else None
        whole = not (partial or changes["fault"] or changes["selected"])
        made = Stored(run(*rows, **changes), frozenset(names * (kind == "port")), machine, whole)
        # As the file has it: rows of a port are named after their suites.
        found.append(replace(made, run=replace(made.run, measurements=rows)))
    return found


Stores = list[tuple[Path, list[Stored]]]


@pytest.fixture(scope="module", params=SEEDS)
def stores(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stores]:
    rng, found, place = random.Random(request.param), [], tmp_path_factory.mktemp("stores")
    for turn in range(STORES):
        stored = drawn_store(rng)
        # Written in another order than they were made in.
        for it in rng.sample(stored, len(stored)):
            write_run(place / str(turn), it.run)
        found.append((place / str(turn), stored))
    yield found


def gated(m: Measurement) -> bool:
    return not math.isnan(m.tolerance)


def keyed(it: Stored) -> dict[tuple[Key, str], Measurement]:
    return {(m.key, m.identity): m for m in it.run.measurements}


def history_of(now: Stored, earlier: list[Stored]) -> list[Stored]:
    """Earlier runs that a run may be compared with, oldest first."""
    return [it for it in earlier if it.kin(now) and not it.run.manifest.fault]


def test_the_baseline_is_the_newest_of_the_same_machine_that_shares_work(
    stores: Stores,
) -> None:
    elsewhere = 0
    for root, stored in stores:
        for place, now in enumerate(stored):
            near = history_of(now, stored[:place])
            alike = [it for it in near if keyed(it).keys() & keyed(now).keys()]
            own = [it for it in alike if it.machine and it.machine == now.machine]
            best = (own or alike or [None])[-1]
            history = load_history(root, now.run)
            assert (history.baseline and history.baseline.id) == (best and best.id)
            assert history.runs == tuple(it.id for it in near)
            assert tuple(m.id for m in history.manifests) == history.runs
            elsewhere += bool(alike) and not own
    assert elsewhere


def share(m: Measurement | None) -> float | None:
    return None if m is None else m.value / m.tolerance


def test_the_trend_of_a_gate_has_its_share_in_each_run_that_did_its_work(
    stores: Stores,
) -> None:
    for root, stored in stores:
        now = stored[-1]
        near = history_of(now, stored[:-1])
        expected = {}
        for m in now.run.measurements:
            rows = [keyed(it).get((m.key, m.identity)) for it in near]
            rows = [row if row is not None and gated(row) else None for row in rows]
            if any(row is not None for row in rows):
                expected[m.key] = [share(row) for row in rows]
        series = load_history(root, now.run).series
        assert series.keys() == expected.keys()
        for key, shares in expected.items():
            for told, model in zip(series[key], shares, strict=True):
                assert told == (model if model is None else pytest.approx(model, nan_ok=True))


def test_the_past_of_a_gate_that_does_not_repeat_is_what_its_machine_measured(
    stores: Stores,
) -> None:
    varied = 0
    for root, stored in stores:
        now = stored[-1]
        here = now.run.manifest.environment
        near = [
            it
            for it in history_of(now, stored[:-1])
            if it.run.manifest.environment.machine == here.machine
        ][-NOISE_WINDOW:]
        expected = {}
        for m in now.run.measurements:
            rows = [row for it in near if (row := keyed(it).get((m.key, m.identity))) is not None]
            other = any(row.deterministic is False for row in rows)
            if rows and gated(m) and (m.deterministic is not True or other):
                expected[m.key] = [row.value for row in rows], other
                varied += other
        past = load_history(root, now.run).past
        assert past.keys() == expected.keys()
        for key, (values, other) in expected.items():
            assert list(past[key].values) == pytest.approx(values, nan_ok=True)
            assert past[key].varied is other
    assert varied


def night_of(it: Stored, noisy: Any = None) -> rules.Night:
    """A stored run as the model of verdicts has it."""
    manifest = it.run.manifest
    bound = it.kind in (RunKind.NIGHTLY, RunKind.PORT)
    planned = tuple(
        (m.suite, m.case, m.edge, m.kind.value, m.quantity, m.metric)
        for m in it.run.measurements
        if rules.word_of(m) is not Verdict.INFO
    )
    reference, host = manifest.environment.reference.kind or "", manifest.environment.host
    return rules.Night(
        it.run.measurements,
        suites=tuple((s.name, s.planned, s.executed, s.status) for s in manifest.suites),
        machine=it.machine,
        reference=reference,
        setting=f"{manifest.environment.device} {sorted(host.items())} "
        f"{manifest.environment.threads} {reference}",
        planned=planned if bound else None,
        fault=manifest.fault,
        selected=manifest.selected,
        port=it.kind is RunKind.PORT,
        noisy=noisy,
    )


def works(it: Stored) -> dict[tuple[str, ...], tuple[str, ...]]:
    """What each level of a run is of."""
    return {name: group.work for name, group in rules.levels(night_of(it), max).items()}


def anchors(now: Stored, earlier: list[Stored]) -> list[Stored]:
    """For each level the oldest healthy run of the machine that measured it alike, oldest first."""
    missing, found = set(works(now).items()), []
    for it in earlier:
        alike = it.kin(now) and now.machine is not None and it.machine == now.machine
        held = missing & works(it).items()
        if alike and it.whole and held and rules.judge(night_of(it), None, []).code == 0:
            found.append(it)
            missing -= held
    return found


def test_what_is_listed_is_what_was_stored(stores: Stores) -> None:
    for root, stored in stores:
        runs, unreadable = summarise_runs(root)
        assert not unreadable and [it.id for it in runs] == [it.id for it in stored]
        for listed, it in zip(runs, stored, strict=True):
            words = [rules.word_of(m) for m in it.run.measurements]
            gates = [word for word in words if word is not Verdict.INFO]
            manifest = it.run.manifest
            reference = manifest.environment.reference
            assert (listed.gates, listed.broken) == (
                len(gates),
                sum(word is not Verdict.PASS for word in gates),
            )
            assert (listed.kind, listed.created) == (it.kind.value, manifest.created)
            assert (listed.device, listed.fault) == (it.device, manifest.fault or "")
            assert listed.reference == f"{reference.kind} {reference.commit}"
        # The index says the same once it is there, and read anew.
        assert summarise_runs(root)[0] == runs
        assert [it.folder.name for it in list_runs(root)[0]] == [it.id for it in stored]
        whole = [it.manifest.whole for it in list_runs(root)[0]]
        assert whole == [it.whole for it in stored]


def test_a_run_is_found_by_its_name(stores: Stores) -> None:
    for root, stored in stores:
        assert find_run(root, "latest") == root / stored[-1].id
        for it in stored:
            assert find_run(root, it.id[:10]) == find_run(root, it.id) == root / it.id
        for name in ("2026-11-0", "pinned", "none", "blessed"):
            with pytest.raises(StoreError):
                find_run(root, name)


def test_gates_begin_and_cease_to_fail_as_a_walk_through_the_runs_says(
    stores: Stores,
) -> None:
    changed = 0
    for root, stored in stores:
        lines, _ = list_lines(root)
        found = follow_gates(root, sorted(lines, key=lambda line: line.name))
        last: dict[Any, tuple[str, bool]] = {}
        failing: dict[Any, set[Any]] = {}
        ever = {
            (it.kind, key)
            for it in stored
            for key, m in keyed(it).items()
            if rules.word_of(m) not in (Verdict.PASS, Verdict.INFO)
        }
        for it in stored:
            rows = {
                (it.kind, key): rules.word_of(m) is not Verdict.PASS
                for key, m in keyed(it).items()
                if rules.word_of(m) is not Verdict.INFO
            }
            steps: dict[str, tuple[set[Key], set[Key]]] = {}
            first = 0
            for name, fails in rows.items():
                if name not in last:
                    first += fails
                elif last[name][1] is not fails:
                    pair = steps.setdefault(last[name][0], (set(), set()))
                    pair[not fails].add(name[1][0])
            stream, dropped = (it.kind, it.port, it.device), 0
            manifest = it.run.manifest
            if not manifest.fault:
                last |= {name: (it.id, fails) for name, fails in rows.items()}
                if not manifest.selected and rows:
                    dropped = len(failing.get(stream, set()) - rows.keys())
                    failing[stream] = {name for name, fails in rows.items() if fails}
            told = found.get(it.id, GateChanges())
            assert told.known and (told.first, told.dropped) == (first, dropped)
            assert [step.before for step in told.steps] == sorted(steps, reverse=True)
            for step in told.steps:
                names = [
                    {(g.case, g.edge, g.quantity, g.metric) for g in gates}
                    for gates in (step.began, step.ceased)
                ]
                assert tuple(names) == steps[step.before]
            changed += len(steps)
        assert ever or not found
    assert changed or not any(
        rules.word_of(m) is Verdict.FAIL for _, s in stores for it in s for m in it.run.measurements
    )


def test_a_look_back_has_the_newest_work_of_each_gate(
    stores: Stores,
) -> None:
    for root, stored in stores:
        asked = [it for it in stored if it.kind is RunKind.NIGHTLY and not it.run.manifest.fault]
        answer = look_back(str(root))
        assert (answer.runs, answer.unreadable) == (len(asked), [])
        newest: dict[Key, str] = {}
        for it in asked[-LATEST:]:
            for m in it.run.measurements:
                if rules.word_of(m) is not Verdict.INFO:
                    newest[m.key] = m.identity
        by_key = {(r["case"], r["edge"], r["quantity"], r["metric"]): r for r in answer.rows}
        assert by_key.keys() == newest.keys() and len(answer.rows) == len(newest)
        for key, identity in newest.items():
            rows = [m for it in asked if (m := keyed(it).get((key, identity))) and gated(m)]
            told = by_key[key]
            assert told["runs"] == len(rows)
            values = [m.value for m in rows]
            assert [told["first"], told["last"]] == pytest.approx(
                [values[0], values[-1]], nan_ok=True
            ) or any(map(math.isnan, values))
            assert list(told["recent"]) == pytest.approx(values, nan_ok=True)
            # NaN is no value: the newest that is known stands.
            for name, known in (
                ("tolerance", [m.tolerance for m in rows]),
                ("share", [m.fraction for m in rows]),
            ):
                if not math.isnan(known[-1]):
                    assert told[name] == pytest.approx(known[-1], nan_ok=True)
        names = list(by_key)
        for case in {key[0] for key in names}:
            only = look_back(str(root), case).rows
            told = [tuple(r[n] for n in ("case", "edge", "quantity", "metric")) for r in only]
            assert told == [key for key in names if key[0] == case]
        if names:
            [worst] = look_back(str(root), most=1).rows
            assert (worst["case"], worst["quantity"]) == (names[0][0], names[0][2])


def test_a_quantity_has_a_row_for_each_run_that_measured_it(
    stores: Stores,
) -> None:
    for root, stored in stores:
        for kind in (None, RunKind.PORT, RunKind.PYTEST):
            asked = [
                it
                for it in stored
                if it.kind is (kind or RunKind.NIGHTLY) and not it.run.manifest.fault
            ]
            expected = sorted(
                (m.edge, m.metric, it.run.manifest.created, it.id, m.identity)
                for it in asked
                for m in it.run.measurements
                if m.case == "a" and m.quantity == "x" and gated(m)
            )
            if not expected:
                continue
            answer = look_back(str(root), "a", "x", kind=kind)
            names = ("edge", "metric", "created", "id", "identity")
            assert [tuple(r[n] for n in names) for r in answer.rows] == expected
        every = [m for it in stored for m in it.run.measurements if gated(m)]
        assert measured_names(str(root)) == sorted({m.case for m in every})
        assert measured_names(str(root), "a") == sorted(
            {m.quantity for m in every if m.case == "a"}
        )
        with pytest.raises(StoreError, match="no gate of case c"):
            look_back(str(root), "c")


def test_what_goes_is_old_and_nothing_is_held_against_it(
    stores: Stores,
) -> None:
    gone = spared = 0
    for root, stored in stores[:1]:
        for keep in (1, 3):
            groups: dict[Any, list[Stored]] = {}
            for it in stored:
                groups.setdefault((it.kind, it.port, it.device), []).append(it)
            newest = {it.id for group in groups.values() for it in group[-keep:]}
            baselines = {
                history.baseline.id
                for group in groups.values()
                if (history := load_history(root, group[-1].run)).baseline is not None
            }
            ends: dict[Any, Stored] = {}
            for it in stored:
                if it.machine and it.whole:
                    ends[it.kind, it.port, it.machine] = it
            kept = {
                old.id
                for it in ends.values()
                for old in anchors_of(root, it.run, Pins()) or (it.run,)
            }
            found = plan(root, keep)
            goes = {it.id for it in stored} - newest - baselines - kept
            assert {folder.name for folder in found.goes} == goes
            assert {f.name for f, _ in found.spared} == (baselines | kept) - newest
            reasons = {f.name: why.split()[0] for f, why in found.spared}
            assert {n for n, why in reasons.items() if why == "anchor"} == kept - newest
            assert found.newest == len(newest) and not found.unreadable
            gone, spared = gone + len(goes), spared + len(found.spared)
    assert gone + spared


def test_a_run_is_judged_by_its_baseline_its_past_and_its_anchors(
    stores: Stores,
) -> None:
    held = lacked = 0
    for root, stored in stores:
        for place, now in list(enumerate(stored))[1::2]:
            history = load_history(root, now.run)
            baseline = history.baseline and history.baseline.id
            then = next((it for it in stored if it.id == baseline), None)
            past = {key: (past.values, past.varied) for key, past in history.past.items()}
            expected = anchors(now, stored[:place])
            found = anchors_of(root, now.run, Pins())
            assert [old.id for old in found] == [old.id for old in expected]
            judged = judge(root, now.run)
            assert judged.history.runs == history.runs
            reference = now.run.manifest.environment.reference.kind
            near = [
                night_of(it)
                for it in history_of(now, stored[:place])
                if it.whole
                and it.device == now.device
                and (now.port or it.run.manifest.environment.reference.kind == reference)
            ]
            answer = rules.judge(night_of(now, past), then and night_of(then), [], near)
            alone = rules.judge(night_of(now, past), then and night_of(then), [])
            lacked += answer.word != alone.word
            if not expected:
                assert judged.decision.comparisons == ()
                word = judged.decision.word
                assert (word, judged.decision.exit_code) == (answer.word, answer.code)
                continue
            held += 1
            [comparison] = judged.decision.comparisons
            assert comparison.same and comparison.pin.run == expected[0].id
            # Each level is that of the oldest anchor that measured it, and none is left out.
            before = {
                name: rules.levels(night_of(it), max)[name]
                for it in reversed(expected)
                for name, work in works(it).items()
                if works(now).get(name) == work
            }
            assert {drift.group for drift in comparison.compared} == before.keys()
            for drift in comparison.compared:
                assert drift.before == pytest.approx(getattr(before[drift.group], drift.what))
            if not judged.decision.counts.worse:
                assert judged.decision.word == answer.word
    assert held and lacked
