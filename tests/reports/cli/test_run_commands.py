"""Commands about stored runs, and the doctor."""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from pathlib import Path

import pytest

from parity.recordings import RecordingError
from reports.cli import doctor as doctor_module
from reports.cli.doctor import examine
from reports.store.runs import write_run
from reports.verdict.decide import Word
from tests.helpers import cli
from tests.reports.nights import bench, earlier, failing, measurement, run, stored_below

GATE = {"identity": "one"}
SUITES = [{"name": "parity", "status": "ran", "planned": 1, "executed": 1, "reason": ""}]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A good night, and one with a failure and a bench after it."""
    root = tmp_path / "runs"
    write_run(root, earlier(measurement(**GATE), suites=SUITES, day=18), lambda night: "<p>old</p>")
    write_run(root, bench(day=19))
    write_run(root, run(failing(**GATE), suites=SUITES), lambda night: "<p>new</p>")
    return root


def test_the_list_tells_kinds_gates_and_failures(runs: Path) -> None:
    words = json.loads(cli("list", "--out", runs, "--json").stdout)
    assert [(r["kind"], r["gates"], r["broken"]) for r in words["runs"]] == [
        ("nightly", 1, 0),
        ("bench", 0, 0),
        ("nightly", 1, 1),
    ]
    assert words["unreadable"] == []
    heads, *lines = cli("list", "--out", runs).output.splitlines()
    assert [line.split()[0] for line in lines] == [r["id"] for r in words["runs"]]
    # Every cell begins below its head, however long the ones before it are.
    assert [line[heads.index("kind") :].split()[0] for line in lines] == [
        r["kind"] for r in words["runs"]
    ]


def test_the_list_names_what_it_cannot_read(runs: Path) -> None:
    broken = sorted(stored_below(runs))[0]
    (broken / "measurements.parquet").write_bytes(b"PAR1")
    words = json.loads(cli("list", "--out", runs, "--json").stdout)
    assert len(words["runs"]) == 2
    assert words["unreadable"][0]["folder"] == str(broken)
    assert "truncated" in words["unreadable"][0]["why"]


def test_an_empty_folder_has_no_runs(tmp_path: Path) -> None:
    assert "no runs in" in cli("list", "--out", tmp_path).output


def test_a_gate_judges_again_with_the_codes_of_the_night(runs: Path) -> None:
    result = cli("gate", "latest", "--out", runs)
    assert result.exit_code == 1
    assert result.stdout.startswith("REGRESSED: 1 new failure.")
    assert cli("gate", "2026-11-18", "--out", runs).exit_code == 0
    newest = sorted(stored_below(runs))[-1]
    copy = newest.parent / newest.name.replace("2026-11-20", "2026-11-21")
    shutil.copytree(newest, copy)
    persisting = cli("gate", newest.name, "--against", copy, "--out", runs)
    assert "1 persisting failure" in persisting.stdout
    # A run against itself is always equal.
    for itself in (newest.name, newest):
        refused = cli("gate", newest.name, "--against", itself, "--out", runs)
        assert (refused.exit_code, "equal to itself" in refused.output) == (2, True)


def test_a_gate_names_the_newest_runs_of_other_subjects_that_are_red(runs: Path) -> None:
    """The newest run may be that of a port, stored in between by somebody else."""
    night = sorted(stored_below(runs))[-1].name
    suites = [{"name": "mlp", "status": "ran", "planned": 1, "executed": 1, "reason": ""}]
    rows = [measurement(case="mlp", suite="mlp")]
    date = "2026-11-25T21-30-00Z"
    port = run(*rows, kind="port", suites=suites, id=date, created="2026-11-25T21:30:00+00:00")
    write_run(runs, port)
    told = cli("gate", "latest", "--out", runs)
    assert told.exit_code == 0
    assert f"of another subject, not judged here: {night}: not judged" in told.output
    # A run that was asked for by name is what was asked for.
    assert "another subject" not in cli("gate", date, "--out", runs).output


def test_a_gate_names_no_old_red_run_of_a_subject_whose_newest_is_healthy(tmp_path: Path) -> None:
    def port(name: str, day: int, verdict: Word) -> str:
        suites = [{"name": name, "status": "ran", "planned": 1, "executed": 1, "reason": ""}]
        when = {"id": f"2026-11-{day}T21-30-00Z", "created": f"2026-11-{day}T21:30:00+00:00"}
        rows = [measurement(case=name, suite=name)]
        write_run(tmp_path, run(*rows, kind="port", suites=suites, verdict=verdict, **when))
        return when["id"]

    repaired = port("conv", 20, Word.REGRESSED)
    port("conv", 21, Word.PASS)
    port("gru", 22, Word.PASS)
    broken = port("gru", 23, Word.REGRESSED)
    port("mlp", 24, Word.PASS)
    told = cli("gate", "latest", "--out", tmp_path).output
    assert f"not judged here: {broken}: REGRESSED" in told
    assert repaired not in told


def test_two_runs_are_compared_by_what_changed(runs: Path) -> None:
    result = cli("compare", "2026-11-18", "latest", "--out", runs)
    assert result.exit_code == 1
    assert "new failure: logits in baseline (JAX float32 vs oracle): relative L2" in result.stdout
    back = cli("compare", "latest", "2026-11-18", "--out", runs)
    assert back.exit_code == 0
    assert "fixed: logits in baseline" in back.stdout
    document = json.loads(cli("compare", "2026-11-18", "latest", "--out", runs, "--json").stdout)
    assert document["changes"][0]["what"] == "new failure"
    assert document["exit_code"] == 1


def test_a_page_is_drawn_again_beside_the_run_and_not_in_it(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "again.html"
    assert cli("report", "latest", "--out", runs, "--page", page).exit_code == 0
    assert "REGRESSED" in page.read_text(encoding="utf-8")
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["again.html"]
    stored = next(p for p in runs.iterdir() if p.name.startswith("2026-11-20"))
    assert (stored / "report.html").read_text(encoding="utf-8") == "<p>new</p>"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("gate", "2027"), "no run '2027'"),
        (("gate", "2026-11"), "several runs begin with '2026-11'"),
        (
            ("gate", "2026-11-19"),
            "expected a night, or a run of ports, but 2026-11-19T12",
        ),
        (("compare", "latest", "nothing"), "no run 'nothing'"),
    ],
)
def test_a_run_that_cannot_be_meant_is_a_usage_error(runs: Path, arguments, said: str) -> None:
    result = cli(*arguments, "--out", runs)
    assert result.exit_code == 2
    assert said in result.output


def test_a_run_is_found_by_its_folder_too(runs: Path, tmp_path: Path) -> None:
    folder = next(p for p in runs.iterdir() if p.name.startswith("2026-11-18"))
    assert cli("gate", folder, "--out", tmp_path / "elsewhere").exit_code == 0


def test_the_page_is_opened(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    monkeypatch.setattr("click.launch", opened.append)
    assert cli("open", "--out", runs).exit_code == 0
    assert opened[0].startswith("file://")
    assert opened[0].endswith("report.html")


def test_the_doctor_tells_what_changes_numbers(tmp_path: Path) -> None:
    words = {
        line["topic"]: line
        for line in json.loads(cli("doctor", "--out", tmp_path, "--json").stdout)
    }
    for topic in ("jax", "device", "threads", "matmul precision", "x64", "TF32", "XLA_FLAGS"):
        assert topic in words
    assert "megalodon-hf, recorded" in words
    assert "jax" in cli("doctor", "--out", tmp_path).output


def test_the_doctor_creates_nothing_and_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Path
) -> None:
    before = sorted(runs.rglob("*"))
    there = {line.topic: line for line in examine(runs)}
    assert there["folder of runs"].value.endswith("3 runs")
    assert sorted(runs.rglob("*")) == before
    assert not there["folder of runs"].advice
    examine(tmp_path / "new" / "runs")
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(doctor_module, "_installed", lambda name: name != "playwright")
    monkeypatch.setattr(doctor_module.shutil, "which", lambda name: f"/usr/bin/{name}")
    advice = {line.topic: line for line in examine(tmp_path)}["browser tests"]
    assert advice.value == "no playwright"
    assert advice.advice.endswith("`pip install playwright`")


def test_the_doctor_names_a_damaged_run_and_does_not_count_it(tmp_path: Path) -> None:
    write_run(tmp_path, run(measurement(), id="good"))
    (write_run(tmp_path, run(measurement(), id="bad")) / "run.json").write_text(
        "{", encoding="utf-8"
    )
    before = sorted(tmp_path.rglob("*"))
    there = {line.topic: line for line in examine(tmp_path)}["folder of runs"]
    assert there.value == f"{tmp_path}: 1 run" and there.advice == "unreadable: bad"
    assert sorted(tmp_path.rglob("*")) == before, "an examination writes no index"


@pytest.mark.parametrize(("package", "told"), [("torch", "[torch]"), ("optax", "brings it")])
def test_the_doctor_names_a_package_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, told: str
) -> None:
    version = metadata.version

    def without(name: str) -> str:
        if name == package:
            raise metadata.PackageNotFoundError(name)
        return version(name)

    assert {line.topic: line for line in examine(tmp_path)}[package].advice == ""
    monkeypatch.setattr(metadata, "version", without)
    doctor_module._environment.cache_clear()
    line = {line.topic: line for line in examine(tmp_path)}[package]
    assert (line.value, told in line.advice) == ("not installed", True)
    doctor_module._environment.cache_clear()


@pytest.mark.parametrize(
    ("name", "value", "topic"),
    [
        ("NVIDIA_TF32_OVERRIDE", "1", "TF32"),
        ("XLA_FLAGS", "--xla_cpu_enable_fast_math=true", "XLA_FLAGS"),
    ],
)
def test_the_doctor_advises_against_what_spoils_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, topic: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    healthy = {line.topic: line.advice for line in examine(tmp_path)}
    monkeypatch.setenv(name, value)
    advice = {line.topic: line.advice for line in examine(tmp_path)}
    assert healthy[topic] == ""
    assert advice[topic]


def test_the_doctor_survives_what_it_is_called_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(path: Path, renew: str) -> None:
        raise RecordingError("plain.safetensors is not a readable recording")

    monkeypatch.setattr(doctor_module, "read_provenance", unreadable)
    blocked = tmp_path / "file"
    blocked.write_text("not a folder", encoding="utf-8")
    advice = {line.topic: line.advice for line in examine(blocked)}
    assert "not a readable recording" in advice["megalodon-hf, recorded"]
    assert advice["folder of runs"]


@pytest.mark.parametrize(
    ("module", "code", "told"),
    [
        ("optax.contrib", 2, "error: optax is not installed"),
        ("parity.nothing", 6, "internal error"),
    ],
)
def test_a_package_that_is_missing_is_no_bug_of_ours(tmp_path, monkeypatch, module, code, told):
    def broken(*_: object) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(doctor_module, "examine", broken)
    result = cli("doctor", "--out", tmp_path)
    assert (result.exit_code, told in result.output) == (code, True)
