"""The commands of gpu.yml where no GPU is: nothing is green that did not run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from reports.store.runs import Run, write_run
from tests.helpers import ROOT, cli
from tests.reports.nights import measurement, on_gpu, run

WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "gpu.yml").read_text(encoding="utf-8"))
STEPS = WORKFLOW["jobs"]["tests"]["steps"]


def command(words: str) -> list[str]:
    """The arguments of the one command that runs `words`."""
    [line] = [step["run"] for step in STEPS if words in step.get("run", "")]
    return shlex.split(line)


def session(runs: Path) -> Any:
    """The workflow's own pytest command on this processor, with this folder of runs."""
    python, *arguments = command("-m pytest")
    assert python == ".venv/bin/python"
    arguments[arguments.index("--numerics-run") + 1] = str(runs)
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    call = [sys.executable, *arguments, "-p", "no:cacheprovider"]
    return subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.sweep
def test_tests_of_a_gpu_are_not_run_where_none_is_and_that_is_not_green(tmp_path: Path) -> None:
    done = session(tmp_path / "runs")
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout
    assert "cuda: 0 ran: no CUDA device" in done.stdout
    assert "NOT GREEN: cuda: 0 ran, 1 required" in done.stdout
    assert "NOT GREEN: no test recorded a measurement, and nothing was stored" in done.stdout
    assert " passed" not in done.stdout
    nothing = gate(tmp_path / "runs")
    assert (nothing.exit_code, "no run 'latest'" in nothing.output) == (2, True)


def gate(runs: Path) -> Any:
    program, *arguments = command("gate latest")
    assert program == ".venv/bin/megalodon-numerics"
    arguments[arguments.index("--out") + 1] = str(runs)
    return cli(*arguments)


def stored(runs: Path, hours: float) -> Path:
    """A green run of a GPU that began so many hours ago."""
    began = datetime.now(UTC) - timedelta(hours=hours)
    made: Run = run(
        measurement(),
        id=f"{began:%Y-%m-%dT%H-%M-%SZ}-1a2b3c4-pytest",
        created=began.isoformat(),
        kind="pytest",
        suites=[{"name": "pytest", "status": "ran", "planned": 1, "executed": 1, "reason": ""}],
    )
    return write_run(runs, on_gpu(made))


def test_the_gate_is_not_green_by_what_ran_last_week(tmp_path: Path) -> None:
    last_week = stored(tmp_path, hours=168.0)
    refused = gate(tmp_path)
    assert refused.exit_code == 2
    for words in (
        "at most 2 hours ago",
        last_week.name,
        "168.0 hours old",
        "no newer run was stored",
    ):
        assert words in refused.output
    # The control: what began in this job is judged, and passes.
    stored(tmp_path, hours=0.5)
    judged = gate(tmp_path)
    assert (judged.exit_code, "PASS" in judged.output) == (0, True), judged.output


def test_no_step_of_the_workflow_may_fail_unseen() -> None:
    assert not any("continue-on-error" in part for part in (*STEPS, *WORKFLOW["jobs"].values()))
    judges = [step for step in STEPS if "gate" in step.get("run", "")]
    # After a failed test too, but never instead of it.
    assert [step["if"] for step in judges] == [
        "${{ !cancelled() && steps.pytest.outcome != 'skipped' }}"
    ]
