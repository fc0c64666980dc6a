"""Packages whose names are imported on first use behave as if they had been imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from reports.store.runs import write_run
from tests.helpers import ROOT
from tests.reports.nights import run

PACKAGES = {
    "megalodon_jax": ("generate", "model", "config", "loss"),
    "parity.mesh": ("compare_meshes", "step"),
    "stability.core": ("Finding", "findings"),
    "parity": ("compare", "recordings"),
}


@pytest.mark.parametrize("package", PACKAGES)
def test_names_and_modules_are_attributes(package: str) -> None:
    """In a fresh process, since another import would make them so."""
    code = f"""
import {package} as p
assert {{*p.__all__}} <= {{*dir(p)}}
for name in {PACKAGES[package]}:
    assert hasattr(p, name), name
for name in ("nothing", "_private", "__wrapped__"):
    assert not hasattr(p, name), name
from {package} import *
assert all(name in globals() for name in p.__all__)
assert {{*p._ROOMS}} and {{n for names in p._ROOMS.values() for n in names}} <= {{*p.__all__}}
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["gate latest", "list", "history"])
def test_a_command_that_reads_runs_imports_no_jax(command: str, tmp_path: Path) -> None:
    """JAX and Equinox take a second, a third of the time for ten thousand runs."""
    write_run(tmp_path, run())
    code = f"""
import sys
from pathlib import Path
from reports.cli import main
try:
    main({[*command.split(), "--out", str(tmp_path)]}, standalone_mode=False)
finally:
    assert not {{"jax", "equinox", "scipy", "torch"}} & {{*sys.modules}}
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "AssertionError" not in done.stderr and done.stdout.strip(), done
