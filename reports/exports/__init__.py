"""Exports of stored runs for other tools: JUnit XML, OpenMetrics, Arrow, MLflow, W&B.

Source: docs/commands.md "For other tools".
"""

from reports.exports.arrow import arrow_file
from reports.exports.junit import junit
from reports.exports.mlflow_run import to_mlflow
from reports.exports.openmetrics import openmetrics
from reports.exports.steps import Step, step
from reports.exports.wandb_run import to_wandb

__all__ = ["Step", "arrow_file", "junit", "openmetrics", "step", "to_mlflow", "to_wandb"]
