"""Exports a stored run to Weights & Biases, with W&B's own client.

The destination is set by W&B's variables WANDB_PROJECT, WANDB_ENTITY and WANDB_DIR;
WANDB_MODE=offline writes a folder that `wandb sync` uploads later. Source: docs/commands.md "For
other tools".
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megalodon_jax.extras import install
from reports.exports.steps import PROJECT, Step, curve, files


def to_wandb(steps: Sequence[Step], folder: Path) -> str:
    """Log stored runs as the steps of one W&B run, and attach the files of the last one.

    The W&B run is marked failed if the exit code of the last stored run is not 0.

    Args:
        steps: Runs converted by `reports.exports.step`, oldest first, at least one.
        folder: Folder of the last run.

    Returns:
        The URL of the W&B run; without a URL (offline) the local folder of that run.

    Raises:
        ValueError: W&B's client is not installed, or rejects the run.
    """
    try:
        import wandb
    except ImportError as error:
        raise ValueError(f"W&B's client is not installed: {install('wandb')}") from error
    last = steps[-1]
    # The stored run is older and maybe from another machine: console, code and statistics of this
    # process do not belong to it.
    settings = wandb.Settings(
        console="off", disable_code=True, disable_git=True, silent=True, x_disable_stats=True
    )
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=last.run,
            job_type=last.facts["kind"],
            config=dict(last.facts),
            settings=settings,
        )
        try:
            for turn, step in enumerate(steps):
                created = {"created": step.created.timestamp()}
                run.log({**step.values, **created}, step=turn)
            artifact = wandb.Artifact(curve(last.run), type="run", metadata=dict(last.facts))
            for path in files(folder):
                artifact.add_file(str(path))
            run.log_artifact(artifact)
        except BaseException:
            run.finish(exit_code=last.exit_code or 1)
            raise
        run.finish(exit_code=last.exit_code)
    except wandb.Error as error:
        raise ValueError(
            f"W&B rejected the run: {str(error).rstrip('. ')}. Log in with `wandb login`, or set "
            "WANDB_MODE=offline to write a folder that `wandb sync` uploads later."
        ) from error
    return run.url or str(Path(run.dir).parent)
