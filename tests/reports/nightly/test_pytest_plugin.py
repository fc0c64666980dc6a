"""What tests measure becomes a run: the same with and without xdist, and never a false green."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from parity.engine.measure.measurement import Verdict
from reports.registry.lookup import judge_stored
from reports.store.runs import list_runs, read_run
from reports.verdict.decide import ExitCode, Word
from tests.helpers import ROOT
from tests.reports.nights import stored_below

TESTS = """
import pytest
from parity.engine.measure.measurement import Kind, Measurement, Verdict


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


def run(folder: Path, *arguments: str, tests: str = TESTS) -> subprocess.CompletedProcess[str]:
    (folder / "test_tiny.py").write_text(tests, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--numerics-run", "runs", *arguments]
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


ROW = TESTS[: TESTS.index("@pytest")]


def judged(folder: Path, *arguments: str, tests: str, before: str = ROW):
    """The session's exit status and output, and the run it stored with its verdict."""
    result = run(folder, *arguments, tests=before + tests)
    return result, judge_stored(next(stored_below(folder / "runs")))


def only(folder: Path):
    [stored], unreadable = list_runs(folder / "runs")
    assert (unreadable, stored.kind) == ([], "pytest")
    return read_run(stored.folder)


@pytest.mark.sweep
def test_the_same_records_come_out_with_and_without_workers(sessions) -> None:
    both = {name: only(folder) for name, (folder, _) in sessions.items()}
    assert both["alone"].measurements == both["workers"].measurements[1:]
    assert [m.case for m in both["alone"].measurements] == [f"case{n}" for n in range(4)]
    for folder, text in sessions.values():
        assert "measurements of" in text
        assert "compared with the float64 oracle and megalodon-hf" in text
        assert str(next(stored_below(folder / "runs")).name) in text


def test_a_session_without_failures_passes_and_can_be_judged_again(sessions) -> None:
    folder = next(stored_below(sessions["alone"][0] / "runs"))
    result = judge_stored(folder)
    assert result.decision.word is Word.PASS
    assert result.run.manifest.suites[0].executed == 4


def test_a_failed_test_and_a_value_that_is_none_are_failures(sessions) -> None:
    result = judge_stored(next(stored_below(sessions["workers"][0] / "runs")))
    assert result.decision.word is Word.REGRESSED
    assert [m.case for m in result.run.measurements if m.verdict is not Verdict.PASS] == ["bad"]
    assert [f.subject.partition("::")[2] for f in result.run.findings] == ["test_bad"]
    # What was skipped was planned, and a test that records nothing is no part of the run.
    suite = result.run.manifest.suites[0]
    assert (suite.planned, suite.executed, suite.status) == (6, 5, "failed")
    assert suite.reason == "skipped: test_tiny.py::test_skipped"


def test_a_session_that_recorded_nothing_is_not_green(tmp_path: Path) -> None:
    result = run(tmp_path, "-n", "0", "-k", "silent")
    assert "1 passed" in result.stdout
    assert "NOT GREEN: no test recorded a measurement" in result.stdout
    assert result.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.sweep
def test_what_is_no_measurement_fails_its_own_test_alone(tmp_path: Path) -> None:
    """It ended the whole session with an internal error, and nothing was stored."""
    tests = TESTS + "\n\ndef test_wrong(numerics):\n    numerics({'y': 1.0})\n"
    result = run(tmp_path, "-n", "0", "-k", "good or wrong", tests=tests)
    assert "4 passed" in result.stdout and "1 failed" in result.stdout
    assert "expected measurements" in result.stdout and "got 'y'" in result.stdout
    assert "INTERNALERROR" not in result.stdout + result.stderr
    assert (
        result.returncode == ExitCode.REGRESSION and len(list((tmp_path / "runs").glob("2*"))) == 1
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("asked", ["verdict", "pytest"])
def test_a_module_that_stops_the_session_is_incomplete_and_named(tmp_path: Path, asked) -> None:
    """pytest runs no test where a module does not import; its 2 would be wrong usage."""
    (tmp_path / "test_broken.py").write_text("import no_such_module", encoding="utf-8")
    result = run(tmp_path, "-n", "0", "--numerics-exit", asked)
    assert "NOT GREEN: no test recorded a measurement" in result.stdout
    assert "test_broken.py was not collected: fix it, or" in result.stdout
    expected = ExitCode.INCOMPLETE if asked == "verdict" else pytest.ExitCode.INTERRUPTED
    assert result.returncode == expected


TWICE = """
def test_a(numerics):
    numerics([row("one", 1e-6), row("two", 1e-6)])


def test_b(numerics):
    numerics([row("one", 9e-6)])
    numerics([row("one", 2e-6)])
"""


KEPT = {
    "one": 1e-6,
    "two": 1e-6,
    "one [test_tiny.py::test_b]": 9e-6,
    "one [test_tiny.py::test_b #2]": 2e-6,
}


def test_a_key_that_two_tests_measure_is_kept_from_both(tmp_path: Path) -> None:
    result, stored = judged(tmp_path, "-n", "2", tests=TWICE)
    assert {m.case: m.value for m in stored.run.measurements} == KEPT
    assert stored.decision.word is Word.REGRESSED
    # All tests passed: the session's exit status is the verdict's.
    assert "2 passed" in result.stdout
    assert "exit status 1 is the verdict's, not pytest's" in result.stdout
    assert result.returncode == ExitCode.REGRESSION


@pytest.mark.sweep
def test_the_exit_status_is_pytest_s_where_that_is_asked_for(tmp_path: Path) -> None:
    result, stored = judged(tmp_path, "-n", "0", "--numerics-exit", "pytest", tests=TWICE)
    assert {m.case: m.value for m in stored.run.measurements} == KEPT
    assert stored.decision.word is Word.REGRESSED
    assert (result.returncode, "exit status" in result.stdout) == (0, False)
    assert "REGRESSED" in result.stdout and "runs" in result.stdout


@pytest.mark.sweep
def test_a_verdict_that_passes_leaves_a_failed_session_red(tmp_path: Path) -> None:
    """A plugin may fail a session in which all tests passed, such as one that measures coverage."""
    hook = """

import pytest


def pytest_sessionfinish(session):
    session.exitstatus = 7
"""
    tests = ROW + "def test_a(numerics):\n    numerics([row('one', 1e-6)])\n"
    (tmp_path / "lines_run.py").write_text(hook, encoding="utf-8")
    result = run(tmp_path, "-n", "0", "-p", "lines_run", tests=tests)
    assert "PASS" in result.stdout
    assert result.returncode == 7


ONE = "def test_one(numerics):\n    numerics([row('one', 1e-6)])\n\n\n"
INCOMPLETE = {
    "a module that does not import": (
        {"test_broken.py": "import no_such_module"},
        ONE,
        ("--continue-on-collection-errors",),
        "test_broken.py was not collected",
    ),
    "a module that skips itself": (
        {"test_broken.py": "import pytest\npytest.importorskip('no_such_module')"},
        ONE,
        (),
        "test_broken.py skipped itself",
    ),
    "a session that a test ends": (
        {},
        f"{ONE}def test_two(numerics):\n    pytest.exit('enough', returncode=0)\n",
        (),
        "did not run: test_tiny.py::test_two",
    ),
    "a test that recorded nothing": (
        {},
        f"{ONE}def test_two(numerics):\n    numerics([])\n",
        (),
        "recorded nothing: test_tiny.py::test_two",
    ),
    "a test of ports that does not use the fixture": (
        {},
        f"{ONE}import pytest\nfrom parity import FunctionSide, Port\n\n\n"
        "def made():\n"
        "    sides = (FunctionSide(lambda w, x: w * x, 2.0, 3.0) for _ in range(2))\n"
        "    return Port('p', *sides)\n\n\n"
        "@pytest.mark.ports(of=made)\ndef test_two(port):\n    assert port\n",
        (),
        "recorded nothing: test_tiny.py::test_two[p]",
    ),
    "a subtest that is skipped": (
        {},
        f"{ONE}def test_two(numerics, subtests):\n"
        "    numerics([row('two', 1e-6)])\n"
        "    with subtests.test('three'):\n"
        "        pytest.skip('not today')\n",
        (),
        "skipped: test_tiny.py::test_two",
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("what", "workers"),
    [(what, "0") for what in INCOMPLETE] + [(what, "1") for what in list(INCOMPLETE)[:2]],
)
def test_what_was_planned_and_not_measured_is_incomplete(
    tmp_path: Path, what: str, workers: str
) -> None:
    files, tests, options, reason = INCOMPLETE[what]
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    result, stored = judged(tmp_path, "-n", workers, *options, tests=tests)
    assert stored.decision.word is Word.INCOMPLETE, result.stdout
    suite = stored.run.manifest.suites[0]
    assert (suite.reason, suite.executed, suite.planned) == (reason, 1, 2)
    assert result.returncode == ExitCode.INCOMPLETE


DEATH = (
    ONE
    + """def test_two(numerics):
    import ctypes
    ctypes.CDLL(None)._exit(0)


def test_three(numerics):
    numerics([row("three", 1e-6)])
"""
)


@pytest.mark.sweep
def test_a_worker_that_dies_loses_its_test_and_is_red(tmp_path: Path) -> None:
    result, stored = judged(tmp_path, "-n", "1", "--max-worker-restart", "0", tests=DEATH)
    assert stored.decision.word is Word.REGRESSED
    suite = stored.run.manifest.suites[0]
    # Nobody was left to say which of the tests measure, so each of them was planned.
    assert (suite.planned, suite.executed, suite.status) == (3, 1, "failed")
    assert suite.reason.startswith("did not run: ")
    assert {"test_tiny.py::test_two", "test_tiny.py::test_three"} <= set(
        re.findall(r"[\w.]+::\w+", suite.reason)
    )
    assert result.returncode == ExitCode.REGRESSION


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("where", "workers"), [("test", "0"), ("test", "1"), ("fixture", "0"), ("module", "0")]
)
def test_os_exit_ends_no_session(tmp_path: Path, where: str, workers: str) -> None:
    """Status 0, nothing stored: such a session once looked like a success."""
    text = {
        "test": "def test_two(numerics):\n    os._exit(0)\n",
        "fixture": "@pytest.fixture\ndef two():\n    os._exit(0)\n\n\n"
        "def test_two(two, numerics):\n    pass\n",
        "module": "os._exit(0)\n",
    }[where]
    (tmp_path / "test_exit.py").write_text(f"import os\nimport pytest\n\n\n{text}", "utf-8")
    options = ("-n", workers, "--continue-on-collection-errors", "test_tiny.py", "test_exit.py")
    result, stored = judged(tmp_path, *options, tests=ONE)
    assert result.returncode in (ExitCode.REGRESSION, ExitCode.INCOMPLETE), result.stdout
    assert stored.decision.word in (Word.REGRESSED, Word.INCOMPLETE)
    assert len(stored.run.measurements) == 1


@pytest.mark.sweep
def test_what_a_fixture_recorded_before_it_failed_is_kept(tmp_path: Path) -> None:
    tests = """
@pytest.fixture
def early(numerics):
    numerics([row("early", 1e-6)])
    raise ValueError("broken")


def test_one(early):
    pass


def test_two(request):
    request.getfixturevalue("numerics")([row("late", 2e-6)])
"""
    _, stored = judged(tmp_path, "-n", "0", tests=tests)
    assert {m.case for m in stored.run.measurements} == {"early", "late"}
    assert stored.decision.word is Word.REGRESSED


def test_a_selection_is_the_plan_and_the_run_says_so(sessions) -> None:
    stored = only(sessions["alone"][0])
    assert stored.manifest.selected == ("-k good",)
    assert stored.manifest.suites[0].planned == 4
