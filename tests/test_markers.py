"""Markers that cannot turn a run green without running."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from megalodon_jax.checks import checked
from tests.helpers import ROOT
from tests.sweeps import DAYS, Sweeps, day_of, is_sweep, mark_rest

TRIANGLE = "tests/parity/megalodon/test_triangle.py"


def run(*arguments):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "cuda"],
        pytest.param(["--require-run", "cuda:1", "-k", "gpu"], marks=pytest.mark.sweep),
    ],
)
def test_cuda_without_a_device_is_not_green(arguments):
    result = run(*arguments, TRIANGLE)
    assert "cuda: 0 ran: no CUDA device" in result.stdout
    assert result.returncode == 5


def test_what_can_select_only_tests_that_cannot_run_collects_nothing():
    # All of tests/: importing them would take most of a minute.
    result = run("-m", "cuda and not sweep")
    assert "NOT GREEN: cuda: 0 ran, 1 required" in result.stdout
    assert "no tests ran" in result.stdout
    assert "deselected" not in result.stdout
    assert result.returncode == 5


@pytest.mark.sweep
def test_another_marker_of_the_expression_is_run_without_a_device():
    result = run("-m", "cuda or traced_checks", "tests/test_markers.py", "-k", "marked_test")
    assert "1 passed" in result.stdout
    assert "NOT GREEN: cuda: 0 ran, 1 required" in result.stdout
    assert result.returncode == 5


@pytest.mark.parametrize(
    "workers",
    [(), pytest.param(("-n", "1"), marks=pytest.mark.sweep)],
    ids=["alone", "with a worker"],
)
def test_too_few_torch_ref_tests_are_not_green_and_sweeps_left_out_are_told(workers):
    # An expression that excludes a marker does not ask for it.
    arguments = ("-m", "not (sweep or cuda)", "--require-run", "torch_ref:1")
    tests = ("test_a_case_that_changed_loses_its_tolerances", "test_triangle[length_c_minus_1]")
    result = run(*workers, *arguments, *(f"{TRIANGLE}::{test}" for test in tests))
    assert "1 passed" in result.stdout
    assert "NOT GREEN: torch_ref: 0 ran, 1 required" in result.stdout
    assert "NOT GREEN: cuda" not in result.stdout
    assert "sweep: 1 not run; make test-all runs them" in result.stdout
    assert result.returncode == 5


@pytest.mark.sweep
def test_the_requirement_itself_is_checked():
    result = run("--require-run", "torch:1", TRIANGLE)
    assert "expected MARKER:N" in result.stderr
    assert result.returncode == 4


@eqx.filter_jit
def not_negative(x):
    return checked(x, x < 0, "a negative number")


def test_a_program_has_checks_only_where_all_are_asked_for(request):
    if request.config.getoption("--traced-checks") == "always":
        with pytest.raises(eqx.EquinoxRuntimeError, match="a negative number"):
            not_negative(jnp.asarray(-1))
    else:
        assert not_negative(jnp.asarray(-1)) == -1


@pytest.mark.traced_checks
def test_a_marked_test_has_checks_though_the_program_was_traced_without():
    with pytest.raises(eqx.EquinoxRuntimeError, match="a negative number"):
        not_negative(jnp.asarray(-1))


OPTIMISES_LITTLE = "jax_disable_most_optimizations"


@pytest.mark.optimised
def test_what_is_marked_is_compiled_with_all_optimisations():
    assert not jax.config.values[OPTIMISES_LITTLE]


def test_and_nothing_else_is():
    asked = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "1"
    assert jax.config.values[OPTIMISES_LITTLE] == asked


def test_each_day_of_the_week_has_about_a_seventh_of_the_sweeps():
    days = [day_of(f"tests/test_file.py::test_of_a_sweep[{k}]") for k in range(7_000)]
    spread = 5 * (7_000 * 1 / 7 * 6 / 7) ** 0.5  # five standard deviations of a binomial draw
    assert all(abs(days.count(day) - 1_000) < spread for day in DAYS)


@pytest.mark.sweep
def test_a_sweep_runs_on_its_day_alone_and_others_are_told():
    mine = "tests/test_markers.py::test_cuda_without_a_device_is_not_green[arguments1]"
    theirs = next(day for day in DAYS if day != day_of(mine))
    arguments = ("--collect-only", "tests/test_markers.py", "-k", "cuda_without_a_device")
    here, elsewhere = (run(*arguments, "--sweep-day", day) for day in (day_of(mine), theirs))
    assert mine in here.stdout and "of other days" not in here.stdout
    assert mine not in elsewhere.stdout and "[arguments0]" in elsewhere.stdout
    assert "sweep: 1 of other days not run; make test-all runs them" in elsewhere.stdout


class Parameter:
    """An item of pytest, as far as its marks go."""

    def __init__(self, nodeid, *marks):
        self.nodeid, self.marks = nodeid, [*marks]

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark):
        self.marks.append(mark.mark)


def test_the_first_parameters_of_a_few_run_and_the_others_are_sweeps():
    few, sweep = pytest.mark.few(2).mark, pytest.mark.sweep.mark
    items = [Parameter(f"a.py::test_a[{k}]", few, *([sweep] if k == 1 else [])) for k in range(5)]
    items += [Parameter(f"a.py::test_b[{k}]", few) for k in range(3)]
    items += [Parameter(f"a.py::test_c[{k}]") for k in range(4)]
    mark_rest(items)
    assert [item.nodeid for item in items if not is_sweep(item)] == [
        *("a.py::test_a[0]", "a.py::test_a[2]", "a.py::test_b[0]", "a.py::test_b[1]"),
        *(f"a.py::test_c[{k}]" for k in range(4)),
    ]


def test_what_testmon_leaves_out_without_collecting_it_is_no_sweep(request):
    """Its stand-ins have a name alone: `make check` ended with an AttributeError."""
    sweeps = Sweeps(request.config)
    sweeps.pytest_deselected([object(), request.node])
    assert (sweeps.left, sweeps.long) == (0, 0)


def test_ci_asks_for_the_sweeps_of_today():
    made = subprocess.run(["make", "-n", "test-day"], cwd=ROOT, capture_output=True, text=True)
    assert re.search(rf"--sweep-day ({'|'.join(DAYS)}) ", made.stdout), made.stdout + made.stderr
