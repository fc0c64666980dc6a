"""A stored run as a run of MLflow, written by its own client.

Where to is said by MLflow's variables: MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME.
Source: docs/commands.md "For other tools".
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reports.exports.steps import PROJECT, Step, files

BATCH = 1000
"""Metrics that MLflow's interface takes at once."""


def to_mlflow(steps: Sequence[Step], folder: Path) -> str:
    """Log runs, oldest first, as the steps of one run of MLflow, with the files of the last.

    The run is FAILED there where the exit code of the last is not 0. One that breaks off is
    deleted again.

    Args:
        steps: at least one.
        folder: of the last.

    Returns:
        The id of the run in MLflow, and where that is.

    Raises:
        ValueError: MLflow is not installed, or refuses.
    """
    try:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise ValueError(
            "MLflow's client is not installed: pip install 'megalodon-numerics[mlflow]'"
        ) from error
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
            f"MLflow refused the run: {str(error).rstrip('. ')}. MLFLOW_TRACKING_URI "
            "says where runs go, such as sqlite:///mlflow.db or http://localhost:5000."
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
