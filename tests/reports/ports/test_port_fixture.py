"""`port_report` and `pytest.mark.ports`: ports in a person's own test suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from reports.store.runs import list_runs, read_run
from reports.store.schema import RunKind
from reports.verdict.decide import ExitCode
from tests.helpers import ROOT
from tests.reports.ports.scripts import write_port

TESTS = """
import pytest
from my_port import one


def good():
    return one("good")


def both():
    return [one("right", approximate=False), one("wrong", approximate=True)]


def test_one(port_report):
    assert port_report(good()).holds


@pytest.mark.ports(of=both)
def test_each(port, port_report):
    assert port_report(port).holds
"""


def run(folder: Path, tests: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_mine.py").write_text(tests, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strict-markers"]
    paths = os.pathsep.join(map(str, (ROOT, folder)))
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.sweep
def test_a_test_of_a_port_fails_with_its_report_and_the_run_has_all(tmp_path: Path) -> None:
    write_port(tmp_path)
    ran = run(tmp_path, TESTS, "--numerics-run", "runs")
    shown = ran.stdout
    assert "1 failed, 2 passed" in shown, shown + ran.stderr
    assert "test_each[mlp/wrong]" in shown
    # The assertion names the report in one line, and the report follows whole.
    assert "<Report: mlp/wrong: diverges at down" in shown
    assert "my_port.py:17 (Twin.__call__)" in shown and "<- here" in shown
    # Negative control: nothing is shown of those that hold.
    assert "mlp/right: holds" not in shown
    ((stored,), _) = list_runs(tmp_path / "runs")
    assert stored.kind is RunKind.PYTEST
    found = read_run(stored.folder)
    assert [d["title"] for d in found.manifest.ports] == ["mlp/good", "mlp/right", "mlp/wrong"]
    assert {m.case for m in found.measurements} == {
        "mlp/good",
        "mlp/right",
        "mlp/wrong",
    }
    assert stored.manifest.environment.reference.kind == "torch"
    page = (stored.folder / "report.html").read_text(encoding="utf-8")
    assert "it starts here" in page
    assert "compared with its originals" in shown and "megalodon-hf" not in shown


NOTHING = """
import numpy as np
from parity import FunctionSide, Port


def nothing(factor):
    x = np.ones((2, 3), np.float32)
    params = {"w": np.arange(1, 4, dtype=np.float32)}
    sides = [FunctionSide(lambda p, x: factor * (x * p["w"]), params, x) for _ in range(2)]
    return Port("nothing", *sides, gradients=False, bfloat16=False)


def test_it(port_report):
    assert port_report(nothing(FACTOR)) is not None
"""
"""A port of a foreign project: two programs that return 0 agree whatever they compute."""


@pytest.mark.few(1)
@pytest.mark.parametrize("asked", ["verdict", "pytest"])
def test_a_foreign_project_is_told_what_a_verdict_of_4_means(tmp_path: Path, asked: str) -> None:
    arguments = ("--numerics-run", "runs", "--numerics-exit", asked)
    ran = run(tmp_path, NOTHING.replace("FACTOR", "0.0"), *arguments)
    shown = ran.stdout
    assert "1 passed" in shown, shown + ran.stderr
    assert "NOT COMPARABLE: " in shown
    told = "exit status 4 is the verdict's, not pytest's: nothing is wrong with the command; give"
    assert (told in shown) == (asked == "verdict")
    assert ran.returncode == (ExitCode.NOT_COMPARABLE if asked == "verdict" else 0)
    # The control: the same port with something to compare.
    ran = run(tmp_path, NOTHING.replace("FACTOR", "1.0"), *arguments)
    assert (ran.returncode, "exit status" in ran.stdout) == (0, False), ran.stdout


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("mark", "told"),
    [
        ("", "expected of=, a function that returns a parity.Port"),
        ("of=lambda: [1]", "returned a list of int: expected a parity.Port"),
    ],
)
def test_a_mark_that_names_no_port_says_what_was_expected(tmp_path: Path, mark, told) -> None:
    tests = f"import pytest\n\n\n@pytest.mark.ports({mark})\ndef test_each(port):\n    pass\n"
    ran = run(tmp_path, tests)
    assert ran.returncode == pytest.ExitCode.INTERRUPTED, ran.stdout
    assert told in ran.stdout
