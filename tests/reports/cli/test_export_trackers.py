"""Runs in experiment trackers, read back by the trackers' own clients, without a network."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megalodon_jax.extras import install
from reports.exports import step
from reports.store.runs import write_run
from reports.verdict.decide import decide
from stability.core.findings import Severity
from tests.helpers import ROOT, cli
from tests.reports.nights import earlier, failing, finding, measurement, run

RAN = [{"name": "parity", "status": "ran", "planned": 2, "executed": 2, "reason": ""}]
TRAINED = {"train_loss": [5.0, 1.5], "final_val_loss": 1.75}
CHECKPOINT = {"name": "byte_lm", "parameters": 3, "config": {}, "training": TRAINED}
SHARE = "tolerance_used/parity/jax32-oracle/logits"
BLOCK = 2**15
LEVELS = (0.25, 0.5)
"""Shares of the tolerance of two nights; the gate of the third is broken at 2.25."""


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two nights that hold and one that does not, with a page beside the last."""
    root = tmp_path_factory.mktemp("trackers") / "runs"
    for day, level in enumerate(LEVELS, 18):
        write_run(root, earlier(measurement(value=4e-6 * level), day=day, suites=RAN))
    night = run(failing(), measurement(case="plain"), suites=RAN, checkpoint=CHECKPOINT)
    (write_run(root, night) / "report.html").write_text("<h1>REGRESSED</h1>", encoding="utf-8")
    return root


def test_a_step_has_verdict_counts_losses_and_the_tightest_gate_of_each_kind() -> None:
    rows = failing(), measurement(case="plain"), measurement(edge="jax64:oracle", value=1e-6)
    night = run(*rows, findings=(finding(severity=Severity.ERROR),), checkpoint=CHECKPOINT)
    values = step(night, decide(night, None)).values
    assert values["exit_code"] == 1
    assert (values["gates/parity"], values["gates_held/parity"]) == (3, 2)
    # Of two cases the one that comes closest, here the one that is beyond.
    assert values[SHARE] == pytest.approx(2.25)
    assert values["tolerance_used/parity/jax64-oracle/logits"] == pytest.approx(0.25)
    assert (values["loss/train"], values["loss/validation"]) == (1.5, 1.75)
    assert (values["findings/error"], values["seconds/parity"]) == (1, 61.25)


def test_what_is_no_number_is_beyond_every_level() -> None:
    night = run(failing(value=math.nan), measurement(case="plain"))
    assert step(night, decide(night, None)).values[SHARE] == math.inf


def test_names_of_curves_are_ones_that_trackers_take() -> None:
    night = run(measurement(suite="../port: ünï/\x1b"))
    names = set(step(night, decide(night, None)).values)
    assert "gates/--port---n---" in names
    assert all(set(name) <= set(map(chr, range(45, 123))) - set(":;<=>?@[\\]^`") for name in names)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("mlflow", "--to", "x"),
            "mlflow takes its destination from MLFLOW_TRACKING_URI, not --to; omit --to.",
        ),
        (("junit", "--history"), "--history is for mlflow and wandb; junit exports one run"),
    ],
)
def test_options_of_another_format_are_refused(nights: Path, arguments, says) -> None:
    result = cli("export", "latest", *arguments, "--out", nights)
    assert (result.exit_code, says in result.output) == (2, True)


@pytest.mark.parametrize("tracker", ["mlflow", "wandb"])
def test_a_client_that_is_missing_is_named(nights: Path, monkeypatch, tracker: str) -> None:
    for module in (tracker, "mlflow.exceptions"):
        monkeypatch.setitem(sys.modules, module, None)
    result = cli("export", "latest", tracker, "--out", nights)
    assert result.exit_code == 2
    assert install(tracker) in result.output


def exported(nights: Path, tracker: str, *more: str, **variables: object) -> str:
    """Return what the command prints in a process of its own, as a user's shell has it."""
    given = {name: str(value) for name, value in variables.items()}
    command = [sys.executable, "-m", "reports.cli", "export", "latest", tracker, *more]
    done = subprocess.run(
        [*command, "--out", str(nights)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **given},
        cwd=nights.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.trackers
@pytest.mark.filterwarnings("default")
def test_mlflow_draws_every_night_and_keeps_the_page(nights: Path, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    at = {"MLFLOW_TRACKING_URI": uri, "MLFLOW_EXPERIMENT_NAME": "megalodon"}
    printed = exported(nights, "mlflow", "--history", **at)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("megalodon")
    [logged] = client.search_runs([experiment.experiment_id])
    assert logged.info.run_id in printed
    assert logged.info.status == "FAILED"
    assert logged.data.tags["verdict"] == "REGRESSED"
    curve = client.get_metric_history(logged.info.run_id, SHARE)
    assert [point.step for point in curve] == [0, 1, 2]
    assert [point.value for point in curve] == pytest.approx([*LEVELS, 2.25])
    days = [(point.timestamp - curve[0].timestamp) / 86_400_000 for point in curve]
    assert days == [0, 1, 2]
    names = {artifact.path for artifact in client.list_artifacts(logged.info.run_id)}
    assert {"report.html", "run.json", "measurements.parquet"} <= names


@pytest.mark.trackers
@pytest.mark.filterwarnings("default")
def test_wandb_offline_draws_every_night_and_keeps_the_page(nights: Path, tmp_path: Path) -> None:
    at = {"WANDB_MODE": "offline", "WANDB_DIR": tmp_path, "HOME": tmp_path}
    folder = exported(nights, "wandb", "--history", **at).strip()
    records = read_wandb(next(Path(folder).glob("*.wandb")))
    steps = [
        {
            item.nested_key[0] if item.nested_key else item.key: item.value_json
            for item in r.history.item
        }
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]
    assert [json.loads(s[SHARE]) for s in steps] == pytest.approx([*LEVELS, 2.25])
    [exit_code] = [r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit"]
    assert exit_code == 1
    [started] = [r.run for r in records if r.WhichOneof("record_type") == "run"][:1]
    config = {update.key: json.loads(update.value_json) for update in started.config.update}
    assert config["verdict"] == "REGRESSED"
    requests = [r for r in records if r.WhichOneof("record_type") == "artifact"]
    paths = {entry.path for r in requests for entry in r.artifact.manifest.contents}
    assert {"report.html", "run.json", "measurements.parquet"} <= paths


def read_wandb(path: Path) -> list[Any]:
    """Return the records of an offline run, as its client defines them.

    They lie in a LevelDB log behind 7 bytes of W&B's: blocks of 32 KiB, and pieces of records in
    them, each behind a checksum (4 bytes), a length (2) and a type (1), of which 1 and 4 are last.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, records, parts = path.read_bytes(), 7, [], b""
    assert data.startswith(b":W&B")
    while at < len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            records.append(Record.FromString(parts))
            parts = b""
    return records
