"""What tests measure becomes a run: the same with and without xdist, and never a false green."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from parity.engine.measurement import Verdict
from reports.registry.lookup import judge_stored
from reports.store.runs import list_runs, read_run
from reports.verdict.decide import Word
from tests.helpers import ROOT

TESTS = """
import pytest
from parity.engine.measurement import Kind, Measurement, Verdict


def row(case, value):
    verdict = Verdict.PASS if value <= 4e-6 else Verdict.FAIL
    return Measurement(case, "jax32:oracle", "logits", Kind.LOGITS, 1, "rel_l2", value, 4e-6,
                       verdict, "float32", "cpu", "same")


@pytest.mark.parametrize("n", range(4))
def test_good(n, numerics):
    rows = numerics(row(f"case{n}", v) for v in [1e-6 * (n + 1)])
    assert [m.value for m in rows] == [1e-6 * (n + 1)]


def test_bad(numerics):
    assert numerics([row("bad", float("nan"))])[0].value < 1


@pytest.mark.skip(reason="no device")
def test_skipped(numerics):
    pass


def test_silent():
    pass
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_tiny.py").write_text(TESTS, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "reports.nightly.pytest_plugin", "--numerics-run", "runs", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    # As this project's own conftest has it; torch would be most of the time.
    option = (
        'def pytest_addoption(parser):\n    parser.addoption("--reference", default="recorded")\n'
    )
    (folder / "conftest.py").write_text(option, encoding="utf-8")
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """Everything under two workers, and what succeeds alone without xdist: folder and output."""
    workers, alone = tmp_path_factory.mktemp("workers"), tmp_path_factory.mktemp("alone")
    return {
        "workers": (workers, run(workers, "-n", "2").stdout),
        "alone": (alone, run(alone, "-n", "0", "-k", "good").stdout),
    }


def only(folder: Path):
    [stored], unreadable = list_runs(folder / "runs")
    assert (unreadable, stored.kind) == ([], "pytest")
    return read_run(stored.folder)


def test_the_same_records_come_out_with_and_without_workers(sessions) -> None:
    both = {name: only(folder) for name, (folder, _) in sessions.items()}
    assert both["alone"].measurements == both["workers"].measurements[1:]
    assert [m.case for m in both["alone"].measurements] == [f"case{n}" for n in range(4)]
    for folder, text in sessions.values():
        assert "measurements of" in text
        assert "compared with the float64 oracle and megalodon-hf" in text
        assert str(next((folder / "runs").iterdir()).name) in text


def test_a_session_without_failures_passes_and_can_be_judged_again(sessions) -> None:
    folder = next((sessions["alone"][0] / "runs").iterdir())
    result = judge_stored(folder)
    assert result.decision.word is Word.PASS
    assert result.run.manifest.suites[0].executed == 4


def test_a_failed_test_and_a_value_that_is_none_are_failures(sessions) -> None:
    result = judge_stored(next((sessions["workers"][0] / "runs").iterdir()))
    assert result.decision.word is Word.REGRESSED
    assert [m.case for m in result.run.measurements if m.verdict is not Verdict.PASS] == ["bad"]
    assert [f.subject.partition("::")[2] for f in result.run.findings] == ["test_bad"]
    # What was skipped was planned, and a test that records nothing is no part of the run.
    suite = result.run.manifest.suites[0]
    assert (suite.planned, suite.executed, suite.status) == (6, 5, "failed")
    assert "test_skipped" in suite.reason


def test_a_session_that_recorded_nothing_is_not_green(tmp_path: Path) -> None:
    result = run(tmp_path, "-n", "0", "-k", "silent")
    assert "1 passed" in result.stdout
    assert "NOT GREEN: no test recorded a measurement" in result.stdout
    assert result.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert list((tmp_path / "runs").iterdir()) == []
