"""Drivers killed at random moments, 200 in the sweep: nothing lost, twice, or of other content."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT


def killed(folder: Path, kills: int, seed: int, *words: str) -> dict[str, Any]:
    """Return what became of sweeps whose drivers were killed."""
    command = [sys.executable, "-m", "tests.parity.executors.kills", folder, kills, seed, *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["counts"]["kills"] == kills
    return found


@pytest.mark.parametrize(
    ("kills", "seed"),
    [(40, 35), pytest.param(200, 36, marks=[pytest.mark.sweep, pytest.mark.long])],
)
def test_killed_drivers_lose_nothing_and_take_nothing_of_other_content(
    tmp_path: Path, kills: int, seed: int
) -> None:
    found = killed(tmp_path, kills, seed)
    assert not found["wrong"], found
    counts = found["counts"]
    # The kills met sweeps that had something to lose, and some of them came to their end.
    assert counts["parts taken"] and counts["whole"] and counts["changed with parts kept"], counts


def test_parts_of_another_content_are_found_where_they_are_taken(tmp_path: Path) -> None:
    """The negative control: items that know the path of their input, and not what is in it."""
    found = killed(tmp_path, 40, 35, "path")
    assert any(text.startswith("content") for text in found["wrong"])
