"""A small part of the simulated hosts: a healthy night on another one, and a loss that is found."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

from parity.engine.measurement import Kind, Measurement, Verdict
from reports.nightly.run import Options, nightly
from reports.verdict.decide import Word
from tools import simulated_hosts

SSE = next(host for host in simulated_hosts.HOSTS if host.name == "SSE4.2, 1 thread")


def test_a_night_on_another_processor_is_green_and_says_where_it_is(tmp_path: Path) -> None:
    """Instructions and threads that nothing was pinned on: only rounding differs."""
    command = [*("nightly", "--case", "plain", "--reference", "recorded", "--json"), "--out"]
    result = subprocess.run(
        simulated_hosts.pinned(
            SSE, [simulated_hosts.sys.executable, "-m", "reports.cli", *command, str(tmp_path)]
        ),
        cwd=simulated_hosts.ROOT,
        env=SSE.environment(),
        capture_output=True,
        text=True,
    )
    words = json.loads(result.stdout)
    assert (result.returncode, words["verdict"]) == (0, "PASS"), result.stderr
    assert any("--xla_cpu_max_isa=SSE4_2" in line for line in words["against"])
    assert "rounding explains up to" in words["sentence"]


def test_a_true_loss_of_accuracy_is_found_on_another_machine(tmp_path: Path) -> None:
    """The negative control: every gate holds, and the levels do not."""
    with simulated_hosts.lost_accuracy():
        options = Options(tmp_path, cases=("plain",), reference="recorded")
        decision = nightly(options, lambda line: None).decision
    assert decision is not None
    assert (decision.word, decision.counts.passed) == (Word.REGRESSED, decision.counts.gates)
    comparison = decision.comparisons[0]
    assert not comparison.same
    # A true loss of about half: not a bug that any tolerance would have found.
    assert comparison.drifts and all(1.2 < drift.ratio < 2.5 for drift in comparison.drifts)


def test_a_bound_is_counted_where_it_is_what_was_applied() -> None:
    row = next(
        r for r in simulated_hosts.rules() if r.edge == "jax32:oracle" and r.absolute == 3e-7
    )
    m = Measurement(
        "plain", row.edge, "logits", Kind.LOGITS, 1, "rel_l2", 1e-7, 3e-7, Verdict.PASS,
        "float32", "cpu", "same",
    )  # fmt: skip
    assert simulated_hosts.is_of(row, m)
    assert not simulated_hosts.is_of(row, replace(m, tolerance=9e-7))
    assert not simulated_hosts.is_of(row, replace(m, kind=Kind.GRADIENT))
