"""The bench: a run of the store like any other, on the page, and never a nightly's baseline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from megalodon_jax.checks import checks_enabled
from parity.megalodon.reference import why_unavailable
from reports.bench import run as module
from reports.bench import variants, workloads
from reports.bench.figures import GOALS, Times, identity, memory_timings, timings
from reports.bench.workloads import (
    DECODE_STEPS,
    inputs,
    jax_workloads,
    reference_workloads,
    seconds,
)
from reports.page import svg
from reports.page.render import render
from reports.page.sections.speed import markdown
from reports.store import writer
from reports.store.manifest import Device, Environment
from reports.store.runs import Run, RunKind, StoreError, list_runs, read_run, write_run
from reports.verdict.decide import decide
from reports.verdict.history import History, load_history
from tests.helpers import cli
from tests.reports.bench.small import SHARED, TINY
from tests.reports.nights import (
    altered,
    bench,
    earlier,
    measurement,
    realistic,
    reseal,
    run,
    stored_below,
)

ABSENT = "megalodon is not installed"


def quiet(line: str) -> None:
    pass


def speed_of(night: Run, history: History) -> str:
    page = render(night, decide(night, history.baseline), history)
    return page[page.index('<section id="speed"') : page.index('<section id="tolerances"')]


def shown(root: Path) -> str:
    night = run(measurement())
    return speed_of(night, load_history(root, night))


# -- the rows


def test_medians_and_ratios_follow_from_the_rounds() -> None:
    times = Times(5.0, (1.0, 2.0, 4.0), (12.0, 10.0, 16.0), (0.5, 0.5, 0.25))
    rows = {t.metric: t for t in timings("forward", times, "", SHARED)}
    assert {k: t.value for k, t in rows.items()} == {
        "jax_seconds": 2.0,
        "reference_seconds": 12.0,
        "floor_seconds": 0.5,
        "ratio": 6.0,
        "floor_ratio": 4.0,
        "compile_seconds": 3.0,
    }
    for metric in ("jax_seconds", "reference_seconds", "floor_seconds"):
        assert statistics.median(rows[metric].rounds) == rows[metric].value
    assert rows["ratio"].rounds == (12.0, 5.0, 4.0)
    assert rows["ratio"].repeats == 3


@pytest.mark.parametrize(("work", "metric"), GOALS)
def test_a_goal_is_reached_from_its_ratio_on(work: str, metric: str) -> None:
    goal = GOALS[work, metric]

    def reached(ratio: float) -> bool | None:
        if metric == "peak_ratio":
            rows = memory_timings({"jax": 8.0, "reference": 8.0 * ratio}, SHARED)
        else:
            rows = timings(work, Times(9.0, (8.0,), (8.0 * ratio,), (1.0,)), "", SHARED)
        return next(t.reached for t in rows if t.metric == metric)

    assert reached(goal) is True
    assert reached(goal - 0.01) is False
    assert reached(math.nan) is None


def test_without_the_reference_its_rows_say_not_run() -> None:
    rows = {(t.work, t.metric): t for t in bench(missing=ABSENT).timings}
    without = {key for key, t in rows.items() if t.note}
    assert without == {key for key, t in rows.items() if math.isnan(t.value)}
    assert {metric for _, metric in without} == {
        *("reference_seconds", "ratio", "reference_peak_bytes", "peak_ratio")
    }
    assert all(rows[key].rounds == () for key in without)
    text = markdown(bench(missing=ABSENT))
    assert "| forward | not run | 6: not run | 200.0 ms | not run |" in text
    assert "| train step, peak memory | not run | 2: not run | 1.25 GiB | not run |" in text
    assert text.count(ABSENT) == 1
    assert "nan" not in text


def test_the_table_holds_each_work_to_its_goal() -> None:
    text = markdown(bench(speedup=6.5))
    assert "| 6.50 | 6: reached |" in text
    assert "| 6.50 | 7: missed |" in text
    assert "| train step, peak memory | 2.48 | 2: reached | 1.25 GiB | 3.10 GiB |" in text
    assert text.count("not run") == 0


def test_the_identity_is_that_of_the_work_and_the_machine() -> None:
    machine = Environment(device=Device("cpu", "a"), threads=2)
    same = identity(TINY, 8, machine)
    assert identity(TINY, 8, replace(machine, flags={"XLA_FLAGS": "any"})) == same
    assert identity(TINY, 9, machine) != same
    assert identity(TINY, 8, replace(machine, threads=4)) != same
    # Of one name, with other vector units; and work that something else decides, too.
    assert identity(TINY, 8, replace(machine, host={"instructions": "avx512f"})) != same
    assert identity(TINY, 8, machine, "0.2.2") != same
    assert identity(TINY, 8, replace(machine, device=Device("cpu", "b"))) != same


# -- measuring


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "CONFIG", TINY)
    monkeypatch.setattr(module, "LENGTH", 8)
    monkeypatch.setattr(module, "DECODE_STEPS", 2)
    # Compiling them takes longer than all else; that they take turns is another test.
    monkeypatch.setattr(variants, "FORMATS", ())
    # Set here so that what the command sets is taken back.
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "1")
    # optax mixes integers with floats.
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(model: object, ids: object) -> None:
        raise RuntimeError(ABSENT)

    monkeypatch.setattr(module, "reference_workloads", absent)
    monkeypatch.setattr(module, "why_unavailable", lambda: ABSENT)


@pytest.mark.sweep
@pytest.mark.usefixtures("tiny", "alone")
def test_the_command_stores_a_run_that_the_next_page_shows(tmp_path: Path) -> None:
    arguments = ["bench", "--out", str(tmp_path), "--repeats", "2", "--no-memory"]
    result = cli(*arguments)
    assert result.exit_code == 0, result.output
    [folder] = stored_below(tmp_path)
    assert {p.name for p in folder.iterdir()} == {"run.json", "timings.parquet"}
    assert str(folder) in result.output
    stored = read_run(folder)
    assert stored.manifest.kind is RunKind.BENCH
    assert stored.manifest.environment.reference.detail == ABSENT
    rows = {(t.work, t.metric): t for t in stored.timings}
    for work in ("forward", "train_step", "prefill", "decode"):
        assert rows[work, "jax_seconds"].repeats == 2
        assert rows[work, "floor_ratio"].value > 0
        assert math.isnan(rows[work, "ratio"].value)
    assert math.isnan(rows["train_step", "jax_peak_bytes"].value)
    one, three = (rows[work, "floor_seconds"].rounds for work in ("forward", "train_step"))
    assert three == tuple(3 * t for t in one)
    night = run(measurement(), created="2999-01-01T00:00:00+00:00")
    page = speed_of(night, load_history(tmp_path, night))
    assert folder.name in page.replace("<wbr>", "")
    assert "not run" in page
    assert "JAX alone" in page


def test_the_floor_of_the_products_takes_no_fresh_memory() -> None:
    """A page of it that is touched first costs as much as many a product: docs/speed.md."""
    others = {id(x) for x in jax.live_arrays()}
    products = workloads.gemm_floor(TINY, 8)

    def places() -> set[int]:
        jax.effects_barrier()
        arrays = (x for x in jax.live_arrays() if id(x) not in others)
        return {x.unsafe_buffer_pointer() for x in arrays if not x.is_deleted()}

    products(1)
    before = places()
    products(2)
    assert places() == before
    anew = jax.jit(lambda x: x + 1.0)(next(x for x in jax.live_arrays() if id(x) not in others))
    assert anew.unsafe_buffer_pointer() not in before, "the control: a result in memory of its own"


@pytest.mark.traced_checks
def test_programs_are_traced_without_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """megalodon-hf has none, and one calls back to Python at every token."""
    seen: list[bool] = []

    def measured(*_: object) -> None:
        seen.append(checks_enabled())
        raise RuntimeError("measured")

    monkeypatch.setattr(module, "measure", measured)
    with pytest.raises(RuntimeError, match="measured"):
        module.bench(module.Options(memory=False), print)
    assert (checks_enabled(), seen) == (True, [False])


def test_backends_take_turns_with_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def workloads(model, ids):
        return {"train_step": lambda count: calls.append(model)}

    monkeypatch.setattr(variants, "inputs", lambda config, length: (config.gemm_backend, None))
    monkeypatch.setattr(variants, "jax_workloads", workloads)
    rows = variants.bench_backends(TINY, 8, 2, SHARED, quiet)
    works = [f"train_step on {name}" for name in variants.FORMATS]
    assert [(t.work, t.metric, t.repeats) for t in rows] == [
        (work, metric, 2) for work in works for metric in ("jax_seconds", "default_ratio")
    ]
    # Once each to compile, then two rounds.
    assert calls == ["default", "mxfp8"] * 3 + ["default", "nvfp4"] * 3


def test_the_two_sides_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    def side(name: str):
        return lambda model, ids: {"decode": lambda count: calls.append((name, count))}

    monkeypatch.setattr(module, "jax_workloads", side("jax"))
    monkeypatch.setattr(module, "reference_workloads", side("reference"))
    monkeypatch.setattr(module, "_floors", lambda model, length, repeats: {"decode": (1.0,)})
    times, missing = module.measure(TINY, 8, 3, quiet)
    # Once each to warm up, then three rounds.
    assert calls == [("jax", DECODE_STEPS), ("reference", DECODE_STEPS)] * 4
    assert missing == ""
    assert len(times["decode"].jax) == len(times["decode"].reference) == 3


@pytest.mark.torch_ref
def test_the_reference_does_the_same_work() -> None:
    if reason := why_unavailable():
        pytest.skip(reason)
    model, ids = inputs(TINY, 8)
    theirs = reference_workloads(model, ids)
    assert set(theirs) == set(jax_workloads(model, ids)) == {work for work, _ in GOALS}
    assert all(seconds(work) > 0 for work in theirs.values())
    autocast = reference_workloads(model, ids, autocast=True)
    assert seconds(autocast["train_step"]) > 0


def test_goals_are_those_of_two_cores() -> None:
    on_gpu = timings(
        "forward", Times(1.0, (1.0,), (7.0,), (0.5,)), "", {**SHARED, "device": "cuda"}
    )
    assert all(math.isnan(t.goal) for t in on_gpu)


@pytest.mark.parametrize("copy", [workloads._host_copy, workloads._device_copy])
def test_a_copy_is_made_where_asked(copy) -> None:
    assert seconds(copy(1 << 20)) > 0


@pytest.mark.parametrize("kind, many", [("cpu", False), ("cuda", True)])
def test_a_copy_of_a_gpu_is_one_of_many(kind, many, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single copy there is over before the host has seen it start and end."""
    started: list[int] = []

    def copy(size: int):
        assert size == 3 << 20
        return started.append

    monkeypatch.setattr(workloads, "device_kind", lambda: kind)
    monkeypatch.setattr(workloads, "_device_copy" if many else "_host_copy", copy)
    monkeypatch.setattr(workloads, "seconds", lambda work, count=1: work(count) or 2.0 * count)
    # Each copy takes two seconds, and twice the size twice as long.
    assert workloads.copy_floor(6 << 20, 4, megabytes=3) == (4.0,) * 4
    assert started[0] == 1 and len(started) == 5
    assert all((count >= 32) == many for count in started[1:])


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("cpu", marks=pytest.mark.sweep),  # others here ask it of the pieces
        pytest.param("cuda", marks=pytest.mark.cuda, id="gpu"),
    ],
)
@pytest.mark.usefixtures("tiny", "alone")
def test_a_bench_runs_on_each_device(tmp_path: Path, kind: str) -> None:
    # Peak memory has a process and a size of its own, which a processor takes a minute for.
    options = ["--no-memory"] if kind == "cpu" else []
    result = cli("bench", "--out", tmp_path, "--repeats", "1", *options)
    assert result.exit_code == 0, result.output
    [folder] = stored_below(tmp_path)
    stored = read_run(folder)
    assert {t.device for t in stored.timings} == {kind}
    assert all(t.value > 0 for t in stored.timings if t.metric == "jax_seconds")


def test_peak_memory_that_fails_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(side: str) -> float:
        raise RuntimeError("the process ended with -9: it said nothing")

    monkeypatch.setattr(module, "peak_memory", killed)
    why = module._peak("jax", True, quiet)
    rows = memory_timings({"jax": why, "reference": 2.0**30}, SHARED)
    assert [t.note for t in rows] == [why, "", why]
    assert rows[2].reached is None


# -- the store


@pytest.mark.parametrize("missing", ["", ABSENT])
def test_a_bench_survives_the_round_trip(tmp_path: Path, missing: str) -> None:
    night = bench(missing=missing)
    back = read_run(write_run(tmp_path, night))
    # A run that was read knows the checksums of its files. repr, because NaN is unequal to itself.
    back = replace(back, manifest=replace(back.manifest, files=None))
    assert repr(back) == repr(night)
    assert [run.folder for run in list_runs(tmp_path)[0]] == [tmp_path / night.id]


def test_an_interrupted_bench_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(table: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(writer.pq, "write_table", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_run(tmp_path, bench())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "wrong",
    [
        Run(bench().manifest, (measurement(),), timings=bench().timings),
        Run(run().manifest, timings=bench().timings),
    ],
    ids=["a bench with measurements", "a nightly with timings"],
)
def test_rows_of_another_kind_are_refused(tmp_path: Path, wrong: Run) -> None:
    with pytest.raises(StoreError, match=r"expected a run of kind .* received rows for"):
        write_run(tmp_path, wrong)
    assert list(tmp_path.iterdir()) == []


def set_kind(folder: Path, kind: str | None) -> None:
    reseal(folder, kind=kind)


def test_a_kind_of_a_newer_version_is_named_and_skipped(tmp_path: Path) -> None:
    folder = write_run(tmp_path, earlier(measurement()))
    set_kind(folder, "survey")
    history = load_history(tmp_path, run(measurement()))
    assert history.baseline is None
    [(named, why)] = history.unreadable
    assert named == folder
    assert "'survey'; update megalodon-numerics" in why


# -- history and page


def test_a_bench_is_never_a_baseline(tmp_path: Path) -> None:
    night = run(measurement())
    # The worst case: a bench that also holds rows comparable with the night's.
    write_run(tmp_path / "aside", bench())
    folder = write_run(tmp_path / "runs", earlier(measurement()))
    timed = next((tmp_path / "aside").glob("*/timings.parquet"))
    (folder / timed.name).write_bytes(timed.read_bytes())
    set_kind(folder, "bench")
    history = load_history(tmp_path / "runs", night)
    assert (history.baseline, history.runs, history.unreadable) == (None, (), ())
    assert [r.id for r in history.benches] == [folder.name]
    # Negative control: nothing but the kind keeps it from being one.
    set_kind(folder, "nightly")
    history = load_history(tmp_path / "runs", night)
    assert history.baseline is not None
    assert history.benches == ()


def test_a_newer_bench_leaves_the_baseline_and_the_trends_alone(tmp_path: Path) -> None:
    write_run(tmp_path, earlier(measurement(), day=17))
    before = load_history(tmp_path, run(measurement()))
    write_run(tmp_path, bench(day=19))
    after = load_history(tmp_path, run(measurement()))
    assert after.baseline == before.baseline is not None
    assert (after.runs, after.series) == (before.runs, before.series)


def test_the_page_shows_the_newest_bench_with_its_day_and_machine(tmp_path: Path) -> None:
    write_run(tmp_path, bench(day=16, speedup=3.0, identity="another machine"))
    write_run(tmp_path, bench(day=18, speedup=6.5))
    text = shown(tmp_path)
    for words in (
        *("2026-11-18 12:00 UTC", "the bench&#39;s processor", "1a2b3c4d5e6f", "torch 2.6.0"),
        *("6.50", "6.50 to 7.09", "reached", "missed", "3.10 GiB", "2048"),
    ):
        assert words in text
    assert "3.00" not in text
    assert "<svg" not in text
    assert text.count("no history yet") == 5


def test_two_benches_of_one_identity_make_a_trend(tmp_path: Path) -> None:
    write_run(tmp_path, bench(day=16, speedup=5.0))
    write_run(tmp_path, bench(day=17, speedup=9.0, identity="another machine"))
    write_run(tmp_path, bench(day=18, speedup=6.5))
    text = shown(tmp_path)
    assert "2 runs: 5.00 to 6.50, now 6.50, goal 6" in text
    assert text.count('<svg class="spark"') == 5
    assert "9.00" not in text


def test_a_bench_without_the_reference_is_a_gap_in_the_trend(tmp_path: Path) -> None:
    for day, speedup in ((14, 5.0), (15, 6.5)):
        write_run(tmp_path, bench(day=day, speedup=speedup))
    write_run(tmp_path, bench(day=16, missing=ABSENT))
    text = shown(tmp_path)
    assert "2 runs: 5.00 to 6.50, now not run, goal 6" in text
    assert "nan" not in text.lower()


def test_without_a_bench_the_page_says_how_to_get_one(tmp_path: Path) -> None:
    assert "megalodon-numerics bench</code> times both" in shown(tmp_path)


def test_a_damaged_bench_is_named_and_skipped(tmp_path: Path) -> None:
    write_run(tmp_path, bench(day=16))
    damaged = write_run(tmp_path, bench(day=17))
    (damaged / "timings.parquet").write_bytes(b"PAR1")
    history = load_history(tmp_path, run(measurement()))
    assert [folder for folder, _ in history.unreadable] == [damaged]
    assert [r.id for r in history.benches] == [bench(day=16).id]


def test_names_in_a_bench_are_data() -> None:
    name = "</script><img src=x onerror=alert(1)>\u202e"
    parts = {
        "device": {"kind": name, "name": name},
        "host": {"model": name},
        "flags": {name: name},
        "versions": {name: name},
        "reference": {"kind": name, "commit": name, "versions": {name: name}, "detail": name},
        "workload": {name: name, "config": {name: name}},
    }
    hostile = altered(bench(missing=name), **parts)
    times = Times(2.0, (1.0,), (), (0.5,))
    rows = timings(name, times, name, SHARED | {"device": name})
    history = History(benches=(replace(hostile, timings=rows),))
    text = speed_of(realistic(), history)
    assert "<img" not in text
    assert "\u202e" not in text


@pytest.mark.parametrize("goal", [math.nan, 0.0, 6.0])
def test_a_trend_marks_what_is_below_its_goal(goal: float) -> None:
    text = svg.trend((5.0, None, 7.0), goal)
    assert text.count('class="cross"') == (goal == 6.0)
    assert svg.trend((None, 7.0), goal) == svg.trend((7.0,), goal) == svg.trend((), goal)
