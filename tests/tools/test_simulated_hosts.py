"""A small part of the simulated hosts: a healthy night on another one, and a loss that is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.executors.item import Item
from parity.executors.sweep import collect, open_executor
from reports.nightly.run import Options, nightly
from reports.store.runs import read_run
from reports.verdict.decide import Word
from tests.helpers import double
from tests.reports.nights import stored_below
from tools import simulated_hosts

SSE = next(host for host in simulated_hosts.HOSTS if host.name == "SSE4.2, 1 thread")


@pytest.mark.sweep
def test_a_night_on_another_processor_is_green_and_says_where_it_is(tmp_path: Path) -> None:
    """Instructions and threads that nothing was pinned on: only rounding differs."""
    night = ("nightly", "--case", "plain", "--reference", "recorded", "--json", "--quiet")
    command = [sys.executable, "-m", "reports.cli", *night, "--out", str(tmp_path / "runs")]
    arguments = {"command": command, "log": str(tmp_path / "log")}
    item = Item("night", "tools.simulated_hosts:run_on", arguments, SSE.needs_of())
    [answer] = collect([item], open_executor("local:1"))
    log = (tmp_path / "log").read_text(encoding="utf-8")
    words = json.loads(log.strip().splitlines()[-1])
    assert (answer.value, words["verdict"]) == (0, "PASS"), log
    assert read_run(next(stored_below(tmp_path / "runs"))).manifest.environment.threads == 1
    assert any("--xla_cpu_max_isa=SSE4_2" in line for line in words["against"])
    assert "largest ratio" in words["sentence"]


PRODUCT = """
import jax, jax.numpy as jnp
x = jnp.ones((64, 64), jnp.float32)
compiled = jax.jit(lambda a, b: a @ b + b @ a).lower(x, x).compile()
assert (compiled(x, x) == 128).all()
print(compiled.as_text())
"""
"""Runs it: jaxlib can make one oneDNN fusion of the sum, which ends the process."""


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("AVX2, 2 threads", "__ynn"),
        ("AVX2 by Eigen, 2 threads", ""),
        ("AVX2 by oneDNN, 2 threads", "__onednn"),
    ],
)
def test_a_host_takes_its_products_by_the_library_of_its_name(name: str, library: str) -> None:
    """A flag that jaxlib renames would leave every host on one library."""
    limits = next(host.limits for host in simulated_hosts.HOSTS if host.name == name)
    command = [sys.executable, "-c", PRODUCT]
    environment = os.environ | limits | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [n for n in ("__ynn", "__onednn") if n in done.stdout] == [n for n in (library,) if n]


@pytest.mark.parametrize(
    ("code", "log", "told"),
    [
        ("0", "...\n==== 3 passed, 1 skipped in 2.10s ====\n", "3 passed, 1 skipped"),
        ("1", "...\n1 failed, 3 passed in 2.10s\n", "exit 1: 1 failed, 3 passed"),
        ("2", "...\n1 error in 0.10s\n", "exit 2: 1 error"),
        ("-4", "....\nExtension modules: numpy in one\n", "exit -4: no counts, see its log"),
        ("-9", "", "exit -9: no counts, see its log"),
        (None, "....", "not run"),
    ],
)
def test_tests_that_died_are_not_taken_for_tests_that_passed(
    tmp_path: Path, code: str | None, log: str, told: str
) -> None:
    if code is not None:
        (tmp_path / "exit").write_text(code, encoding="utf-8")
    (tmp_path / "log").write_text(log, encoding="utf-8")
    assert simulated_hosts.tests_of(tmp_path) == told


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, True),
        ({"tests": "not run"}, False),
        ({"tests": "exit -4: no counts, see its log"}, False),
        ({"tests": "exit 1: 1 failed, 3 passed"}, False),
        ({"verdicts": ("PASS", "PASS", "missed")}, False),
        ({"verdicts": ("PASS", "not run", "REGRESSED")}, False),
    ],
)
def test_a_host_holds_where_its_nights_and_tests_ran_and_are_good(changes, holds: bool) -> None:
    good = {"tests": "3 passed, 1 skipped", "verdicts": ("PASS", "PASS", "REGRESSED")}
    row = double(simulated_hosts.Row, **good | changes)
    assert simulated_hosts.holds(row, tests=True) == holds
    # Nights alone were asked for.
    assert simulated_hosts.holds(row, tests=False) == ("verdicts" not in changes)


@pytest.mark.sweep
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
