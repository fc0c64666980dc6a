"""Markers that cannot turn a run green without running."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRIANGLE = "tests/parity/test_parity_triangle.py"


def run(*arguments):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [["-m", "cuda"], ["--require-run", "cuda:1", "-k", "gpu"]])
def test_cuda_without_a_device_is_not_green(arguments):
    result = run(*arguments, TRIANGLE)
    assert "cuda: 0 ran: no CUDA device" in result.stdout
    assert result.returncode == 5


def test_too_few_torch_ref_tests_are_not_green():
    result = run("-k", "changed_loses", "--require-run", "torch_ref:1", TRIANGLE)
    assert "1 passed" in result.stdout
    assert "NOT GREEN: torch_ref: 0 ran, 1 required" in result.stdout
    assert result.returncode == 5


def test_the_requirement_itself_is_checked():
    result = run("--require-run", "torch:1", TRIANGLE)
    assert "expected MARKER:N" in result.stderr
    assert result.returncode == 4
