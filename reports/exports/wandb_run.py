"""A stored run as a run of Weights & Biases, written by its own client.

Where to is said by its variables: WANDB_PROJECT, WANDB_ENTITY, WANDB_DIR, and WANDB_MODE=offline
for a folder that `wandb sync` uploads later. Source: docs/commands.md "For other tools".
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from reports.exports.steps import PROJECT, Step, curve, files


def to_wandb(steps: Sequence[Step], folder: Path) -> str:
    """Log runs, oldest first, as the steps of one run of W&B, with the files of the last.

    The run is failed there where the exit code of the last is not 0.

    Args:
        steps: at least one.
        folder: of the last.

    Returns:
        The address of the run, or offline the folder it is in.

    Raises:
        ValueError: W&B's client is not installed, or refuses.
    """
    try:
        import wandb
    except ImportError as error:
        raise ValueError(
            "W&B's client is not installed: pip install 'megalodon-numerics[wandb]'"
        ) from error
    last = steps[-1]
    # The run was elsewhere and earlier: nothing of this process, its console or its repository is
    # about it.
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
            f"W&B refused the run: {str(error).rstrip('. ')}. `wandb login` says "
            "who you are; WANDB_MODE=offline writes a folder that `wandb sync` uploads later."
        ) from error
    return run.url or str(Path(run.dir).parent)
