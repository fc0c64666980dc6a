"""`megalodon-numerics mesh`: a step file in, a table and an exit code out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import cli

STEP = """
import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from parity.mesh import MeshComparison


def mean(x):
    def local(x):
        return jax.lax.{} (x.mean(), "data")
    return {{"loss": jax.shard_map(local, in_specs=P("data"), out_specs=P())(x)}}


def step():
    x = np.arange(16, dtype=np.float32)
    return MeshComparison(mean, (x,), (P("data"),), [{{"data": 4}}])
"""


@pytest.fixture
def step_file(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "my_step.py"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_a_sound_step_passes_and_a_faulty_one_does_not(step_file):
    sound = cli("mesh", step_file(STEP.format("pmean")), "--mesh", "data=2", "--mesh", "data=8")
    assert sound.exit_code == 0, sound.output
    assert [line.split()[1] for line in sound.stdout.splitlines()] == ["data=2", "data=8"]
    faulty = cli("mesh", step_file(STEP.format("psum")), "--precision", "float64", "--json")
    assert faulty.exit_code == 1
    document = json.loads(faulty.stdout)
    assert document["parts"]["step data=4"]["start"] == "loss"
    assert {row["edge"] for row in document["measurements"]} == {"mesh64:one64"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "defines no function step(); define one"),
        ("def step(): return 1", "expected step() to return a parity.mesh.MeshComparison, got int"),
        (STEP.format("psum").replace("4}", "4096}"), "needs 4096 devices"),
    ],
)
def test_a_step_file_that_is_none_is_refused(step_file, text: str, message: str):
    result = cli("mesh", step_file(text))
    assert result.exit_code == 2 and message in result.stderr


def test_no_step_file_is_bad_usage(tmp_path: Path):
    assert cli("mesh", tmp_path / "none.py").exit_code == 2
    text = cli("mesh", tmp_path / "none.py").stderr
    assert "no step file" in text
