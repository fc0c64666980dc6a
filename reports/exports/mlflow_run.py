"""Exports a stored run to MLflow, with MLflow's own client.

The destination is set by MLflow's variables MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME.
Source: docs/commands.md "For other tools".
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalodon_jax.extras import install
from reports.exports.steps import PROJECT, Step, files

BATCH = 1000
"""Largest number of metrics per request of MLflow's API."""


def to_mlflow(steps: Sequence[Step], folder: Path) -> str:
    """Log stored runs as the steps of one MLflow run, and attach the files of the last one.

    The MLflow run is marked FAILED if the exit code of the last stored run is not 0. If logging
    fails, the MLflow run is deleted.

    Args:
        steps: Runs converted by `reports.exports.step`, oldest first, at least one.
        folder: Folder of the last run.

    Returns:
        A description with the id of the MLflow run and the tracking server.

    Raises:
        ValueError: MLflow is not installed, or rejects the run.
    """
    try:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise ValueError(f"MLflow's client is not installed: {install('mlflow')}") from error
    try:
        client = MlflowClient()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        known = client.get_experiment_by_name(experiment)
        parent = known.experiment_id if known else client.create_experiment(experiment)
        last = steps[-1]
        started = client.create_run(
            parent, start_time=_milliseconds(last), tags=dict(last.facts), run_name=last.run
        )
        identity = started.info.run_id
        try:
            _log(client, identity, steps, folder)
        except BaseException:
            client.delete_run(identity)
            raise
        return f"run {identity} of experiment {experiment}, {client.tracking_uri}"
    except MlflowException as error:
        raise ValueError(
            f"MLflow rejected the run: {str(error).rstrip('. ')}. Set MLFLOW_TRACKING_URI to the "
            "destination, such as sqlite:///mlflow.db or http://localhost:5000."
        ) from error


def _log(client: Any, identity: str, steps: Sequence[Step], folder: Path) -> None:
    from mlflow.entities import Metric

    metrics = [
        Metric(name, value, _milliseconds(step), turn)
        for turn, step in enumerate(steps)
        for name, value in step.values.items()
    ]
    for start in range(0, len(metrics), BATCH):
        client.log_batch(identity, metrics=metrics[start : start + BATCH])
    for path in files(folder):
        client.log_artifact(identity, str(path))
    status = "FAILED" if steps[-1].exit_code else "FINISHED"
    client.set_terminated(identity, status, end_time=_milliseconds(steps[-1]))


def _milliseconds(step: Step) -> int:
    return round(step.created.timestamp() * 1000)
