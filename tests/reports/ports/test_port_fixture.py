"""`port_report` and `pytest.mark.ports`: ports in a person's own test suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from reports.store.runs import list_runs, read_run
from reports.store.schema import RunKind
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
