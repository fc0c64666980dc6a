"""History: the newest earlier comparable run, and a trend that never joins different work."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest

from parity.engine.measure.measurement import Measurement, Verdict
from parity.tolerances import NOISE_WINDOW
from reports.provenance.host import FIELDS
from reports.store.runs import Run, list_runs, one_look, write_run
from reports.store.schema import MEASUREMENTS, StoreError
from reports.verdict import history as history_module
from reports.verdict.history import WINDOW, History, Past, load_history, worst_over
from reports.verdict.vanished import Seen
from tests.reports.nights import bench, earlier, failing, measurement, run

KEY = ("baseline", "jax32:oracle", "logits", "rel_l2")


def test_an_empty_root_has_no_baseline(tmp_path: Path) -> None:
    history = load_history(tmp_path / "runs", run(measurement()))
    assert history.baseline is None
    assert (history.runs, dict(history.series), history.unreadable) == ((), {}, ())


def test_the_baseline_is_the_newest_earlier_comparable_run(tmp_path: Path) -> None:
    for day in (17, 18):
        write_run(tmp_path, earlier(measurement(), day=day))
    write_run(tmp_path, earlier(measurement(identity="other"), day=19))
    write_run(tmp_path, earlier(measurement(), day=21))
    history = load_history(tmp_path, run(measurement()))
    assert history.baseline is not None
    assert history.baseline.id.startswith("2026-11-18")


def test_the_run_itself_is_not_its_baseline(tmp_path: Path) -> None:
    night = run(measurement())
    write_run(tmp_path, night)
    assert load_history(tmp_path, night).baseline is None


def test_a_run_with_a_planted_fault_is_no_baseline(tmp_path: Path) -> None:
    write_run(tmp_path, earlier(failing(), fault="conjugate"))
    history = load_history(tmp_path, run(measurement()))
    assert (history.baseline, history.runs) == (None, ())


def test_the_series_holds_worst_shares_and_gaps(tmp_path: Path) -> None:
    write_run(tmp_path, earlier(measurement(value=1e-6), day=16))
    write_run(tmp_path, earlier(measurement(identity="other"), day=17))
    write_run(tmp_path, earlier(failing(value=math.nan), day=18))
    write_run(tmp_path, earlier(measurement(value=2e-6), day=19))
    history = load_history(tmp_path, run(measurement()))
    first, gap, bad, last = history.series[KEY]
    assert first == measurement(value=1e-6).fraction
    assert gap is None
    assert bad is not None
    assert math.isnan(bad)
    assert last == measurement(value=2e-6).fraction
    series, _ = worst_over(history, {KEY}, 0.5)
    assert series[-1] == 0.5
    assert len(series) == len(history.runs) + 1


def test_the_worst_of_a_night_is_no_number_where_one_of_its_gates_is_none() -> None:
    """Of three gates, every way in which a night may have, lack or spoil each of them."""
    nights = list(itertools.product((None, 0.5, 2.0, math.nan), repeat=3))
    keys = [(*KEY[:2], f"layers.{n}", KEY[3]) for n in range(3)]
    columns = zip(*nights, strict=True)
    history = History(runs=tuple(map(str, nights)), series=dict(zip(keys, columns, strict=True)))
    series, _ = worst_over(history, set(keys), 1.0)
    assert len(series) == len(nights) + 1 and series[-1] == 1.0
    for worst, gates in zip(series, nights, strict=False):
        measured = [share for share in gates if share is not None]
        if not measured:
            assert worst is None
        elif any(map(math.isnan, measured)):
            assert worst is not None and math.isnan(worst)
        else:
            assert worst == max(measured)


def test_what_no_earlier_run_measured_has_the_names_of_the_runs_all_the_same() -> None:
    history = History(runs=("a", "b"), series={KEY: (0.5, None)})
    for keys in ({KEY}, {("new", *KEY[1:])}, set()):
        assert worst_over(history, keys, 0.25)[1] == ("a", "b")


def test_informative_metrics_have_no_series(tmp_path: Path) -> None:
    info = measurement(metric="max_abs", tolerance=math.nan)
    write_run(tmp_path, earlier(info))
    assert load_history(tmp_path, run(info)).series == {}


def test_an_unreadable_run_is_named_and_skipped(tmp_path: Path) -> None:
    write_run(tmp_path, earlier(measurement(), day=18))
    damaged = write_run(tmp_path, earlier(measurement(), day=19))
    (damaged / "measurements.parquet").write_bytes(b"PAR1")
    history = load_history(tmp_path, run(measurement()))
    assert [folder for folder, _ in history.unreadable] == [damaged]
    assert history.baseline is not None
    assert history.baseline.id.startswith("2026-11-18")


def test_a_root_with_glob_characters_is_a_plain_path(tmp_path: Path) -> None:
    root = tmp_path / "runs[1]*?"
    write_run(root, earlier(measurement()))
    assert load_history(root, run(measurement())).baseline is not None


def test_the_window_is_bounded(tmp_path: Path) -> None:
    for day in range(WINDOW + 5):
        created = f"2026-09-{1 + day % 28:02d}T{day // 28:02d}:00:00+00:00"
        write_run(tmp_path, earlier(measurement(), id=f"r{day}", created=created))
    assert len(load_history(tmp_path, run(measurement())).runs) == WINDOW - 1


def noisy(value: float) -> Measurement:
    return measurement(value=value, deterministic=False)


def test_the_past_of_a_noisy_gate_is_its_newest_runs_on_this_machine(tmp_path: Path) -> None:
    values = [1e-6 + 1e-9 * turn for turn in range(NOISE_WINDOW + 4)]
    for turn, value in enumerate(values):
        created = f"2026-11-01T{turn:02d}:00:00+00:00"
        write_run(tmp_path, earlier(noisy(value), id=f"r{turn}", created=created))
    elsewhere = {"id": "other", "created": "2026-11-02T00:00:00+00:00", "threads": 64}
    write_run(tmp_path, earlier(noisy(3e-6), **elsewhere))
    past = load_history(tmp_path, run(noisy(1e-6))).past[KEY]
    assert past == Past(tuple(values[-NOISE_WINDOW:]), True)
    # What every replay repeated has no past to be held against.
    assert not load_history(tmp_path / "none", run(measurement())).past


def test_what_a_gate_measured_before_an_update_is_its_past(tmp_path: Path) -> None:
    """A machine is its device, processor and threads, whatever is installed there."""
    write_run(tmp_path, earlier(noisy(2e-6), versions={"jax": "0.1"}, reference={"kind": "live"}))
    assert load_history(tmp_path, run(noisy(1e-6))).past == {KEY: Past((2e-6,), True)}


def test_what_varied_on_another_machine_or_long_ago_varied_elsewhere(tmp_path: Path) -> None:
    write_run(tmp_path / "there", earlier(measurement(), day=17))
    write_run(tmp_path / "there", earlier(noisy(2e-6), day=18, threads=64))
    assert load_history(tmp_path / "there", run(measurement())).past == {}
    # Of values that were never replayed since, none varied.
    for turn in range(NOISE_WINDOW + 1):
        row = measurement(deterministic=None if turn else False)
        created = f"2026-11-01T{turn:02d}:00:00+00:00"
        write_run(tmp_path / "then", earlier(row, id=f"r{turn}", created=created))
    past = load_history(tmp_path / "then", run(measurement(deterministic=None))).past
    assert past == {KEY: Past((1e-6,) * NOISE_WINDOW, False)}


@pytest.mark.parametrize(("varied", "noisy_now"), [(NOISE_WINDOW + 3, True), (0, False)])
def test_a_gate_is_noisy_if_it_varied_lately(tmp_path: Path, varied: int, noisy_now: bool) -> None:
    """What repeated bit by bit for two weeks repeats, whatever it did before."""
    for turn in range(NOISE_WINDOW + 4):
        row = measurement(deterministic=turn != varied)
        created = f"2026-11-01T{turn:02d}:00:00+00:00"
        write_run(tmp_path, earlier(row, id=f"r{turn}", created=created))
    past = load_history(tmp_path, run(measurement(deterministic=True))).past
    assert (KEY in past) is noisy_now


def test_a_case_that_broke_is_no_past_of_its_gates(tmp_path: Path) -> None:
    """A repaired run is not judged by the values of the bug, some of which held."""

    def at(turn: int, *rows: Measurement) -> None:
        created = f"2026-11-01T{turn:02d}:00:00+00:00"
        write_run(tmp_path, earlier(*rows, id=f"r{turn}", created=created))

    other = {"case": "other", "quantity": "y", "deterministic": False}
    broken = failing(quantity="z", deterministic=False)
    at(0, noisy(1e-6), measurement(value=1e-7, **other))
    at(1, noisy(3e-6), broken, measurement(value=2e-7, **other))
    at(2, noisy(4e-6), replace(broken, value=math.nan), measurement(value=3e-7, **other))
    at(3, noisy(2e-6), replace(broken, value=1e-9, verdict=Verdict.PASS))
    today = [noisy(1e-6), replace(broken, value=1e-9), measurement(value=1e-7, **other)]
    past = load_history(tmp_path, run(*today)).past
    assert past[KEY].values == (1e-6, 2e-6)
    assert past[today[1].key].values == (1e-9,)
    assert past[today[2].key].values == (1e-7, 2e-7, 3e-7)
    # Without the gate that broke, nothing of today's work did.
    assert load_history(tmp_path, run(noisy(1e-6))).past[KEY].values == (1e-6, 3e-6, 4e-6, 2e-6)


def test_a_baseline_is_older_than_a_window_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of the same work are asked again where those of the first window broke meanwhile."""
    names = [write_run(tmp_path, earlier(measurement(), day=day)).name for day in (11, 12, 13, 14)]
    read = history_module.read_run

    def damaged(folder: Path) -> Run:
        if folder.name in names[2:]:
            raise StoreError("damaged meanwhile")
        return read(folder)

    monkeypatch.setattr(history_module, "WINDOW", 3)
    monkeypatch.setattr(history_module, "read_run", damaged)
    found = load_history(tmp_path, run(measurement()))
    assert found.baseline is not None
    assert found.baseline.id == names[1]


def test_a_baseline_that_broke_meanwhile_gives_way_to_the_next_of_its_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged baseline is not the same as none."""
    older, newest = (write_run(tmp_path, earlier(measurement(), day=day)) for day in (11, 12))
    read = history_module.read_run

    def damaged(folder: Path) -> Run:
        if folder == newest:
            raise StoreError("damaged meanwhile")
        return read(folder)

    monkeypatch.setattr(history_module, "read_run", damaged)
    found = load_history(tmp_path, run(measurement()))
    assert found.baseline is not None
    assert found.baseline.id == older.name
    assert found.unreadable == ((newest, "damaged meanwhile"),)


def test_a_folder_is_no_pattern(tmp_path: Path) -> None:
    """What has a meaning in a pattern of DuckDB means itself in the name of a folder."""
    root = tmp_path / "runs [a-z] {x,y}"
    stored = write_run(root, earlier(measurement(), day=17))
    # What the name would match as a pattern is another folder.
    write_run(tmp_path / "runs b {x,y}", earlier(measurement(value=3e-6), day=17))
    history = load_history(root, run(measurement()))
    assert history.baseline is not None and history.baseline.id == stored.name
    assert history.series[KEY] == (measurement().fraction,) and not history.unreadable


def test_a_run_that_cannot_be_asked_says_nothing_of_others_that_did_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is damaged after the list was made costs the search that run alone."""
    monkeypatch.setattr(history_module, "WINDOW", 2)
    whole = write_run(tmp_path, earlier(measurement(), day=17))
    damaged = write_run(tmp_path, earlier(measurement(), day=18))
    with one_look():
        assert len(list_runs(tmp_path)[0]) == 2
        (damaged / MEASUREMENTS).write_bytes(b"nothing of it")
        history = load_history(tmp_path, run(measurement()))
    assert history.baseline is not None and history.baseline.id == whole.name
    assert [folder for folder, _ in history.unreadable] == [damaged]


def test_a_run_that_cannot_be_asked_is_named_however_old_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "WINDOW", 2)
    whole, damaged = (write_run(tmp_path, earlier(measurement(), day=day)) for day in (16, 17))
    write_run(tmp_path, earlier(measurement(identity="other"), day=18))
    with one_look():
        assert len(list_runs(tmp_path)[0]) == 3
        (damaged / MEASUREMENTS).write_bytes(b"nothing of it")
        history = load_history(tmp_path, run(measurement()))
    assert history.baseline is not None and history.baseline.id == whole.name
    assert [folder for folder, _ in history.unreadable] == [damaged]


def test_benches_are_the_newest_and_those_of_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to a window of them, oldest first; one that broke meanwhile is named."""
    for day, identity in ((1, "a"), (2, "a"), (3, "b"), (4, "a"), (5, "a"), (6, "a")):
        write_run(tmp_path, bench(day, identity=identity))
    names = {day: bench(day).id for day in range(1, 7)}

    def found() -> list[str]:
        return [it.id for it in load_history(tmp_path, run(measurement())).benches]

    assert found() == [names[day] for day in (1, 2, 4, 5, 6)]
    read = history_module.read_run

    def damaged(folder: Path) -> Run:
        if folder.name == names[5]:
            raise StoreError("damaged meanwhile")
        return read(folder)

    monkeypatch.setattr(history_module, "read_run", damaged)
    history = load_history(tmp_path, run(measurement()))
    assert [it.id for it in history.benches] == [names[day] for day in (1, 2, 4, 6)]
    assert history.unreadable == ((tmp_path / names[5], "damaged meanwhile"),)
    monkeypatch.setattr(history_module, "WINDOW", 2)
    assert found() == [names[day] for day in (4, 6)]


def test_runs_of_a_work_that_shares_nothing_are_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "WINDOW", 3)
    other = measurement(identity="other")
    write_run(tmp_path, earlier(measurement(), day=1))
    for day in range(2, 8):
        write_run(tmp_path, earlier(other, day=day))
    asked: list[int] = []
    table = history_module.Table
    monkeypatch.setattr(
        history_module, "Table", lambda files: (asked.append(len(files)), table(files))[1]
    )
    found = load_history(tmp_path, run(measurement()))
    assert found.baseline is not None and found.baseline.manifest.created[8:10] == "01"
    # The newest two; of the next windows only what may have done today's work; and at last the
    # newest two whole runs, whose work is expected again.
    assert asked == [2, 1, 2]


@pytest.mark.parametrize("damaged", [False, True])
def test_work_of_earlier_runs_is_known_with_the_newest_run_that_did_it(
    tmp_path: Path, damaged: bool
) -> None:
    """Of a damaged run by what it planned, which is the same."""
    only = measurement(case="b", edge="jax64:oracle", suite="seams")
    info = measurement(case="i", tolerance=math.nan, verdict=Verdict.INFO)
    suites = [
        {"name": n, "status": "ran", "planned": 1, "executed": 1} for n in ("seams", "parity")
    ]
    old = earlier(only, measurement(), info, day=11, suites=suites)
    nights = [earlier(measurement(), day=day, suites=suites[1:]) for day in (12, 13)]
    folders = [write_run(tmp_path, night) for night in (old, *nights)]
    if damaged:
        (folders[0] / MEASUREMENTS).write_bytes(b"damaged")
    first, newest = (Seen(night.id, night.manifest.created) for night in (old, nights[-1]))
    found = load_history(tmp_path, run(measurement())).earlier
    assert found.suites == {"seams": first, "parity": newest}
    assert found.groups == {
        ("b", "jax64:oracle", "logits"): replace(first, suite="seams"),
        ("baseline", "jax32:oracle", "logits"): replace(newest, suite="parity"),
    }
    selected = load_history(tmp_path, run(measurement(), selected=["baseline"])).earlier
    assert (selected.suites, selected.groups) == ({}, {})


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_group_of_gates_in_two_suites_is_of_the_last_by_name(tmp_path: Path, first: int) -> None:
    """In whatever order its gates are stored; a gate of no suite takes none from the others."""
    rows = [measurement(quantity=name, suite=name) for name in ("seams", "parity", "")]
    write_run(tmp_path, earlier(*rows[first:], *rows[:first], day=11))
    found = load_history(tmp_path, run(*rows)).earlier.groups
    assert [seen.suite for seen in found.values()] == ["seams"]


def test_work_of_every_damaged_run_is_known(tmp_path: Path) -> None:
    suites = [{"name": n, "status": "ran", "planned": 1, "executed": 1} for n in "abc"]
    nights = [earlier(measurement(), day=11 + n, suites=suites[n : n + 1]) for n in range(3)]
    for night in nights:
        (write_run(tmp_path, night) / MEASUREMENTS).write_bytes(b"damaged")
    found = load_history(tmp_path, run(measurement())).earlier
    seen = [Seen(night.id, night.manifest.created) for night in nights]
    assert found.suites == dict(zip("abc", seen, strict=True))


@pytest.mark.parametrize("damaged", [[], ["a"], ["b"], ["a", "b"]])
def test_of_runs_that_began_at_once_the_last_by_name_is_the_newest(
    tmp_path: Path, damaged: list[str]
) -> None:
    suites = [{"name": "parity", "status": "ran", "planned": 1, "executed": 1}]
    for name in "ab":
        folder = write_run(tmp_path, earlier(measurement(), day=12, id=name, suites=suites))
        if name in damaged:
            (folder / MEASUREMENTS).write_bytes(b"damaged")
    newest = Seen("b", earlier(day=12).manifest.created)
    found = load_history(tmp_path, run(measurement())).earlier
    assert found.suites == {"parity": newest}
    group = ("baseline", "jax32:oracle", "logits")
    assert found.groups == {group: replace(newest, suite="parity")}


def test_a_value_that_was_not_replayed_has_a_past_and_did_not_vary(tmp_path: Path) -> None:
    info = measurement(metric="cosine", tolerance=math.nan, verdict=Verdict.INFO)
    rows = [replace(m, deterministic=None) for m in (measurement(), info)]
    write_run(tmp_path, earlier(*rows, day=11))
    assert load_history(tmp_path, run(*rows)).past == {KEY: Past((1e-6,), False)}
    write_run(tmp_path, earlier(noisy(2e-6), day=12))
    write_run(tmp_path, earlier(*rows, day=13))
    assert load_history(tmp_path, run(*rows)).past == {KEY: Past((1e-6, 2e-6, 1e-6), True)}


@pytest.mark.parametrize(("known", "day"), [(True, 17), (False, 18)])
def test_the_baseline_is_of_this_machine_where_it_is_known(
    tmp_path: Path, known: bool, day: int
) -> None:
    """A machine that cannot be identified equals none, itself included."""
    here = {} if known else {"host": {}}
    write_run(tmp_path, earlier(measurement(), day=17, **here))
    write_run(tmp_path, earlier(measurement(), day=18, host=dict.fromkeys(FIELDS, "other")))
    baseline = load_history(tmp_path, run(measurement(), **here)).baseline
    assert baseline is not None and baseline.id == earlier(day=day).id


def test_runs_of_a_trend_are_named_by_their_folders_and_have_their_manifests(
    tmp_path: Path,
) -> None:
    ids = [write_run(tmp_path, earlier(measurement(), day=day)).name for day in (11, 12)]
    (tmp_path / ids[0]).rename(tmp_path / "copied")
    history = load_history(tmp_path, run(measurement()))
    assert history.runs == ("copied", ids[1])
    assert [manifest.id for manifest in history.manifests] == ids


def test_a_bench_that_timed_some_of_the_same_work_is_shown(tmp_path: Path) -> None:
    newest = bench(3)
    more = replace(newest.timings[0], identity="more")
    write_run(tmp_path, replace(newest, timings=(*newest.timings, more)))
    for day, identity in ((1, "same"), (2, "other")):
        write_run(tmp_path, bench(day, identity=identity))
    benches = load_history(tmp_path, run(measurement())).benches
    assert [it.id for it in benches] == [bench(1).id, newest.id]


def test_a_bench_that_timed_nothing_is_not_shown(tmp_path: Path) -> None:
    """Nor does it say what the newest one's work is."""
    for day in (1, 2, 3, 4):
        made = bench(day)
        write_run(tmp_path, made if day % 2 else replace(made, timings=()))
    benches = load_history(tmp_path, run(measurement())).benches
    assert [it.id for it in benches] == [bench(1).id, bench(3).id]


def test_benches_are_of_the_newest_one_s_work_and_not_of_one_another_s(tmp_path: Path) -> None:
    """The oldest timed some of the same work as the second, and none of the newest one's."""
    second, third = bench(2), bench(3)
    more = replace(second.timings[0], identity="more")
    write_run(tmp_path, bench(1, identity="more"))
    for made in (replace(second, timings=(*second.timings, more)), third):
        write_run(tmp_path, made)
    benches = load_history(tmp_path, run(measurement())).benches
    assert [it.id for it in benches] == [second.id, third.id]


def test_runs_whose_work_is_unknown_are_asked_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest one shares nothing with the judged run, which says nothing of the older one."""
    monkeypatch.setattr(history_module, "WINDOW", 2)
    for day, identity in ((17, "same"), (18, "other")):
        write_run(tmp_path, earlier(measurement(identity=identity), day=day))
    listed = [replace(info, work="") for info in list_runs(tmp_path)[0]]
    monkeypatch.setattr(history_module, "list_runs", lambda root: (listed, []))
    found = load_history(tmp_path, run(measurement())).baseline
    assert found is not None and found.id == earlier(day=17).id
