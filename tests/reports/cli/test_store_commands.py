"""Commands about many runs: history over gaps and damage, pinning, and pruning."""

from __future__ import annotations

import json
import math
import shutil
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from parity.engine.measure.measurement import Kind, Verdict
from reports.registry import lookback
from reports.registry.lookback import look_back, sparkline
from reports.registry.lookup import comparison_lines, judge_stored
from reports.registry.pin import pin_run
from reports.store.runs import write_run
from reports.store.schema import StoreError
from reports.store.seal import text_of
from reports.verdict import pins
from reports.verdict.decide import Word
from reports.verdict.levels import levels
from tests.helpers import cli
from tests.reports.nights import bench, earlier, explained, failing, measurement, reseal, run

SUITES = [{"name": "parity", "status": "ran", "planned": 1, "executed": 1, "reason": ""}]


def nights(root: Path, *values: float) -> list[Path]:
    """One healthy run per value, a day apart from the first of November on."""
    return [
        write_run(root, earlier(measurement(value=v), day=day, suites=SUITES))
        for day, v in enumerate(values, 1)
    ]


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Seven nights: one truncated, one of a newer schema, one copied, one with a fault; a bench."""
    root = tmp_path / "runs"
    folders = nights(root, *(1e-7 * n for n in range(1, 8)))
    path = folders[1] / "measurements.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    newer = json.loads((folders[2] / "run.json").read_text(encoding="utf-8")) | {"schema": 99}
    (folders[2] / "run.json").write_text(text_of(newer), encoding="utf-8")
    shutil.copytree(folders[3], root / "0-copy")
    planted = json.loads((folders[4] / "run.json").read_text(encoding="utf-8")) | {
        "fault": "conjugate"
    }
    (folders[4] / "run.json").write_text(text_of(planted), encoding="utf-8")
    # Its footer is whole, so only reading the rows finds this one out.
    path = folders[5] / "measurements.parquet"
    middle = bytearray(path.read_bytes())
    middle[4:120] = bytes(116)
    path.write_bytes(bytes(middle))
    write_run(root, bench(day=8))
    return root


@pytest.mark.parametrize("pattern", [False, True])
def test_history_shows_what_is_readable_and_names_the_rest(damaged: Path, pattern: bool) -> None:
    before = {p: p.read_bytes() for p in damaged.rglob("*") if p.is_file()}
    place = f"{damaged}/*" if pattern else str(damaged)
    result = cli("history", "baseline", "logits", "--out", place, "--json")
    assert result.exit_code == 0
    words = json.loads(result.stdout)
    assert [row["value"] for row in words["rows"]] == pytest.approx([1e-7, 4e-7, 7e-7])
    missing = {Path(item["folder"]).name: item["why"] for item in words["unreadable"]}
    for day, why in (("03", "schema 99, newer"), ("0-copy", "a copy of run")):
        assert any(day in folder and why in text for folder, text in missing.items())
    assert len(words["unreadable"]) == 4
    # Nothing is lost: everything is where it was, as it was.
    assert {p: p.read_bytes() for p in before} == before


def test_list_and_gate_survive_the_same_damage(damaged: Path) -> None:
    words = json.loads(cli("list", "--out", damaged, "--json").stdout)
    # What is damaged inside is found by its checksum.
    assert (len(words["runs"]), len(words["unreadable"])) == (5, 4)
    # The newest run is a bench, which has no verdict.
    words = cli("gate", "latest", "--out", damaged)
    assert (words.exit_code, "7.00 times that of run 2026-11-01" in words.output) == (1, True)
    result = judge_stored(next(p for p in damaged.iterdir() if p.name.startswith("2026-11-07")))
    assert result.decision.baseline_id is not None
    assert result.decision.baseline_id.startswith("2026-11-04")
    assert len(result.history.unreadable) == 4


def test_history_lists_the_gates_that_use_most_of_their_tolerance_first(tmp_path: Path) -> None:
    rows = measurement(value=1e-6), measurement(quantity="loss", kind=Kind.LOSS, value=3e-6)
    for day in (1, 2):
        write_run(tmp_path, earlier(*rows, day=day))
    write_run(tmp_path, earlier(*(replace(m, identity="other") for m in rows), day=3))
    result = look_back(str(tmp_path))
    assert [row["quantity"] for row in result.rows] == ["loss", "logits"]
    # Other work starts anew.
    assert [row["runs"] for row in result.rows] == [1, 1]
    assert [row["quantity"] for row in look_back(str(tmp_path), most=1).rows] == ["loss"]
    # What has no tolerance is no gate.
    info = measurement(metric="max_abs", tolerance=math.nan, verdict=Verdict.INFO)
    write_run(tmp_path, earlier(*rows, info, day=4))
    words = look_back(str(tmp_path), "baseline", "logits").rows
    assert [row["metric"] for row in words] == ["rel_l2"] * 4
    with pytest.raises(ValueError, match="expected the case of the quantity 'logits'"):
        look_back(str(tmp_path), quantity="logits")
    shown = cli("history", "--out", tmp_path)
    assert shown.output.index("loss") < shown.output.index("logits")
    assert "75 %" in shown.output


@pytest.mark.parametrize(
    ("kinds", "asked"),
    [
        ("nightly", "nightly"),
        ("nightly port", "nightly"),
        ("port nightly pytest", "nightly"),
        ("pytest port", "port"),
        ("port pytest", "pytest"),
        ("port pytest pytest port", "port"),
        ("bench", "nightly"),
        ("port bench shard", "port"),
    ],
)
def test_a_question_that_names_no_kind_is_about_nights_or_else_the_newest_runs(
    kinds: str, asked: str, tmp_path: Path
) -> None:
    count = {kind: kinds.split().count(kind) for kind in kinds.split()}
    for day, kind in enumerate(kinds.split(), start=1):
        rows = () if kind == "bench" else (measurement(case=kind),)
        suites = [{"name": "parity"}] if kind == "port" else SUITES
        write_run(tmp_path, earlier(*rows, day=day, kind=kind, suites=suites))
    found = look_back(str(tmp_path))
    assert [(row["case"], row["runs"]) for row in found.rows] == (
        [(asked, count[asked])] if asked in count else []
    )


def test_a_gate_is_listed_while_one_of_the_newest_runs_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookback, "LATEST", 2)
    # By the days on which each was measured, of four.
    gates = {"first": (1,), "early": (1, 2), "late": (1, 3), "last": (4,), "ever": (1, 2, 3, 4)}
    for day in range(1, 5):
        rows = [measurement(quantity=name) for name, days in gates.items() if day in days]
        write_run(tmp_path, earlier(*rows, day=day))
    found = {row["quantity"]: row["runs"] for row in look_back(str(tmp_path)).rows}
    assert found == {name: len(days) for name, days in gates.items() if max(days) > 2}


def test_history_says_what_it_does_not_find(tmp_path: Path) -> None:
    assert "no gates in 0 runs" in cli("history", "--out", tmp_path).output
    nights(tmp_path, 1e-6)
    missed = cli("history", "baseline", "logit", "--out", tmp_path)
    assert (missed.exit_code, "no gate of logit" in missed.output) == (2, True)
    nowhere = cli("history", "--out", f"{tmp_path}/none/*")
    assert (nowhere.exit_code, "nothing matches" in nowhere.output) == (2, True)
    unknown = cli("history", "--out", "nothing://runs")
    assert (unknown.exit_code, "installed package that reads nothing://runs" in unknown.output) == (
        2,
        True,
    )


def test_a_year_of_history_is_gathered_once(tmp_path: Path) -> None:
    rows = [measurement(quantity=f"q{i}", identity=str(i)) for i in range(500)]
    first = write_run(tmp_path, earlier(*rows, day=1))
    text = json.loads((first / "run.json").read_text(encoding="utf-8"))
    for n in range(1, 365):
        folder = tmp_path / f"r{n}"
        folder.mkdir()
        for name in ("measurements.parquet", "findings.parquet"):
            (folder / name).hardlink_to(first / name)
        created = (datetime(2025, 1, 1, tzinfo=UTC) + timedelta(days=n)).isoformat()
        (folder / "run.json").write_text(
            text_of(text | {"id": folder.name, "created": created}), encoding="utf-8"
        )
    seconds = []
    for _ in range(2):
        start = time.process_time()
        result = look_back(str(tmp_path), "baseline", "q7")
        seconds.append(time.process_time() - start)
        assert (result.runs, len(result.rows)) == (365, 365)
    # 1.3 and 0.08 s on an idle machine. Seconds alone would tell how busy the machine is.
    first_time, again = seconds
    assert 4 * again < first_time


def test_a_sparkline_marks_what_is_no_number() -> None:
    assert sparkline([1.0, 2.0, 3.0, float("nan"), float("inf")]) == "▁▅█!!"
    assert sparkline([float("nan")]) == "?"
    assert sparkline([2.0, 2.0]) == "▁▁"


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout without uncommitted changes."""
    monkeypatch.setattr("reports.registry.pin.git_state", lambda *_: ("1a2b3c4", False))


def test_pinning_pins_a_run_as_a_diff_of_one_line_per_group(tmp_path: Path, clean: None) -> None:
    folder = tmp_path / "pinned"
    good, better = nights(tmp_path / "runs", 1e-6, 2e-6)
    first = pin_run(good, "as measured", folder)
    assert first.lines()[0] == "0 levels moved, 1 are new, 0 were removed"
    before = first.path.read_text(encoding="utf-8").splitlines()
    assert pins.load("cpu", folder).pins == (first.pin,)
    second = pin_run(better, "twice as large, because", folder)
    assert "1.0e-06 → 2.0e-06, 2.00 times" in second.lines()[1]
    changed = set(second.path.read_text(encoding="utf-8").splitlines()) - set(before)
    assert sum('"typical"' in line for line in changed) == 1
    assert any("twice as large, because" in line for line in changed)
    assert pins.pinned_ids(folder) == {second.pin.run}
    assert list(folder.iterdir()) == [second.path]


def test_a_pin_accepts_what_was_seen_of_a_gate_that_does_not_repeat(
    tmp_path: Path, clean: None
) -> None:
    """The larger of two modes of an earlier night, although today's value is the smaller one."""
    _, today = (
        write_run(
            tmp_path / "runs",
            earlier(measurement(value=value, deterministic=False), day=day, suites=SUITES),
        )
        for day, value in ((1, 3e-6), (2, 1e-6))
    )
    [level] = pin_run(today, "as measured", tmp_path / "pinned").pin.groups.values()
    assert level.typical == level.worst == 3e-6


def test_the_diff_of_a_pin_lists_the_largest_move_first_up_or_down(
    tmp_path: Path, clean: None
) -> None:
    def pinned(day: int, rose: float, fell: float) -> list[str]:
        rows = measurement(value=rose), measurement(value=fell, case="fell")
        night = write_run(tmp_path / "runs", earlier(*rows, day=day, suites=SUITES))
        return pin_run(night, "as measured", tmp_path / "pinned").lines()

    pinned(1, 1e-6, 3e-6)
    head, first, second = pinned(2, 2e-6, 0.5e-6)
    assert head.startswith("2 levels moved")
    assert first.startswith("  fell |") and first.endswith("0.17 times")
    assert second.endswith("2.00 times")


def test_the_diff_of_a_pin_lists_a_level_of_which_only_the_largest_value_moved(
    tmp_path: Path, clean: None
) -> None:
    def pinned(day: int, *values: float) -> list[str]:
        rows = [measurement(value=x, quantity=f"q{i}") for i, x in enumerate(values)]
        night = write_run(tmp_path / "runs", earlier(*rows, day=day, suites=SUITES))
        return pin_run(night, "as measured", tmp_path / "pinned").lines()

    pinned(1, 2e-6, 2e-6)
    head, line = pinned(2, 1e-6, 4e-6)
    assert head.startswith("1 levels moved")
    assert line.endswith(": largest value 2.0e-06 → 4.0e-06, 2.00 times")


@pytest.mark.parametrize(
    ("night", "said"),
    [
        (run(failing(), suites=SUITES), "is REGRESSED"),
        (run(measurement(), suites=[{"name": "parity", "planned": 2}]), "is INCOMPLETE"),
        (run(measurement(), suites=SUITES, dirty=True), "uncommitted changes"),
        (run(measurement(), suites=SUITES, fault="conjugate"), "planted fault conjugate"),
        (run(measurement(), suites=SUITES, selected=["plain"]), "ran only some cases"),
        (run(measurement(), suites=SUITES, kind="pytest"), "is a run of kind pytest"),
    ],
    ids=["broken", "incomplete", "dirty", "fault", "selected", "pytest"],
)
def test_only_a_whole_healthy_night_is_pinned(
    tmp_path: Path, clean: None, night: Any, said: str
) -> None:
    folder = write_run(tmp_path / "runs", night)
    with pytest.raises(StoreError, match=said):
        pin_run(folder, "because", tmp_path / "pinned")
    assert not (tmp_path / "pinned").exists()


def test_a_dirty_tree_and_an_empty_reason_are_refused(tmp_path: Path, monkeypatch) -> None:
    nights(tmp_path, 1e-6)
    monkeypatch.setattr("reports.registry.pin.git_state", lambda *_: ("1a2b3c4", True))
    dirty = cli("pin", "latest", "--reason", "because", "--out", tmp_path)
    assert (dirty.exit_code, "commit or stash first" in dirty.output) == (2, True)
    empty = cli("pin", "latest", "--reason", " ", "--out", tmp_path)
    assert (empty.exit_code, "expected a reason" in empty.output) == (2, True)


def test_a_slow_drift_is_found_against_the_pinned_run(
    tmp_path: Path, clean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pinned"
    monkeypatch.setattr(pins, "FOLDER", folder)
    drifting = nights(tmp_path / "runs", *(1e-6 * 1.01**n for n in range(29)))
    pin = pin_run(drifting[0], "the first night", folder).pin
    words = [judge_stored(night).decision.word for night in drifting]
    # Each night differs from the one before; the 28th is 1.3 times the pinned one.
    assert words == [Word.PASS] + [Word.CHANGED] * 26 + [Word.REGRESSED] * 2
    told = cli("gate", "latest", "--out", tmp_path / "runs")
    assert told.exit_code == 1
    assert f"levels compared with run {pin.run}" in told.output
    # Against one other run nothing else counts, and the pinned one has a name.
    told = cli("gate", "latest", "--against", "pinned", "--out", tmp_path / "runs", "--json")
    assert json.loads(told.stdout)["baseline"] == pin.run


def test_a_ratio_of_errors_has_no_level_of_its_own() -> None:
    rows = [measurement(), measurement(metric="error_over_reference", value=0.7, tolerance=1.5)]
    assert [metric for *_, metric in levels(rows, {})] == ["rel_l2"]


def test_what_was_renamed_answers_with_its_name(tmp_path: Path) -> None:
    renamed = cli("bless", "latest", "--reason", "because", "--out", tmp_path)
    assert (renamed.exit_code, "'bless' is now 'pin'" in renamed.stderr) == (2, True)
    renamed = cli("subject", "record")
    assert "'subject record' is now 'parity record --subject mla-moe'" in renamed.stderr
    renamed = cli("drill", "--steps", 3)
    assert "'drill' is now 'python -m tools.experiments drill'" in renamed.stderr
    renamed = cli("gate", "blessed", "--out", tmp_path)
    assert (renamed.exit_code, "now named 'pinned'" in renamed.stderr) == (2, True)


def test_a_damaged_pin_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "FOLDER", tmp_path)
    (tmp_path / "cpu-1-live.json").write_text("{", encoding="utf-8")
    [night] = nights(tmp_path / "runs", 1e-6)
    [text] = comparison_lines(judge_stored(night))
    assert text.startswith("cpu-1-live.json is not used") and "restore it with git" in text


def test_a_verdict_is_explained_by_the_account_of_its_own_case(tmp_path: Path) -> None:
    cases = ("baseline", "other")
    night = run(failing(), failing(case="other", value=2e-5), suites=SUITES)
    accounts = tuple(replace(explained(case), meaning=f"wrong in {case}") for case in cases)
    folder = write_run(tmp_path, replace(night, explanations=accounts))
    judged = judge_stored(folder)
    case = judged.decision.starts[0].case
    lines = [line for line in comparison_lines(judged) if line.startswith("explained: ")]
    assert len(lines) == 1 and f" is wrong in {case};" in lines[0]


def test_a_full_disk_leaves_the_pin_as_it_was(
    tmp_path: Path, clean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = nights(tmp_path / "runs", 1e-6, 2e-6)
    path = pin_run(first, "first", tmp_path / "pinned").path
    before = path.read_bytes()

    def full(self: Path, text: str, **_: object) -> None:
        self.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(StoreError, match="No space left on device; nothing was pinned"):
        pin_run(second, "second", tmp_path / "pinned")
    assert (path.read_bytes(), [p.name for p in path.parent.iterdir()]) == (before, [path.name])


def test_pruning_spares_what_others_are_held_against(
    tmp_path: Path, clean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "runs"
    monkeypatch.setattr(pins, "FOLDER", tmp_path / "pinned")
    folders = nights(root, *([1e-6] * 6))
    # The newest run's work was last seen on the second day.
    for folder in (folders[1], folders[5]):
        path = folder / "measurements.parquet"
        table = pq.read_table(path).to_pylist()
        rows = [{**row, "identity": "rare"} for row in table]
        pq.write_table(type(pq.read_table(path)).from_pylist(rows, pq.read_schema(path)), path)
        reseal(folder)
    pin_run(folders[0], "first")
    (folders[2] / "run.json").write_text("{", encoding="utf-8")
    write_run(root, bench(day=1))
    asked = cli("prune", "--keep", 1, "--out", root, "--json")
    words = json.loads(asked.stdout)
    assert [Path(p).name[:10] for p in words["goes"]] == ["2026-11-04", "2026-11-05"]
    why = {Path(p).name[:10]: text for p, text in words["spared"].items()}
    assert why["2026-11-01"] == "pinned"
    # The pinned run of this machine did other work, so the second day is the anchor of the sixth.
    assert why["2026-11-02"].startswith("anchor of the machine of 2026-11-06")
    assert "2026-11-03" in why
    assert len(list(root.glob("2026*"))) == 7
    cli("prune", "--keep", 1, "--delete", "--out", root)
    left = {p.name[:10] for p in root.glob("2026*")}
    assert left == {f"2026-11-0{day}" for day in (1, 2, 3, 6)}
    assert "nothing to delete" in cli("prune", "--keep", 1, "--out", root).output
