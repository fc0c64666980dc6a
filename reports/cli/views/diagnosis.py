"""The diagnosis of a user's checkpoint, for the terminal. Source: docs/stability.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megalodon_jax.convert import load_from_pretrained
from reports.text import for_json
from reports.user_text import check_text
from stability.core.findings import Severity
from stability.core.number_formats import by_name
from stability.storage.diagnose import Diagnosis, report
from stability.storage.update_rules import optimiser as optimiser_by_name
from stability.suite import LENGTH, Checkpoint


def diagnose(
    path: Path,
    optimiser: str,
    lr: float | None,
    storage: str,
    text: Path | None,
    say: Callable[[str], None],
) -> Diagnosis:
    """Diagnose the checkpoint at `path`; `say` gets a line of progress.

    Args:
        path: a folder, a safetensors file or a torch file.
        optimiser: its name.
        lr: its learning rate; None takes the optimiser's own.
        storage: name of the storage format in question.
        text: a file whose bytes a Megalodon trains on; None measures on drawn gradients.
        say: progress.

    Raises:
        FileNotFoundError: the checkpoint or the text is not there.
        ValueError: the checkpoint cannot be probed, a name is unknown, or the text is too short or
            does not fit the vocabulary.
    """
    rule = optimiser_by_name(optimiser, **({} if lr is None else {"lr": lr}))
    fmt = by_name(storage)
    say(f"probing {path} for {fmt.name} storage, {rule.describe()}")
    if text is None:
        return report(path, rule, fmt=fmt)
    model = load_from_pretrained(path)
    otherwise = "leave --text out to measure on drawn gradients."
    check_text(text, model.config.vocab_size, LENGTH, otherwise)
    batches = Checkpoint(text.parent, text).batches()
    say(f"training {len(batches)} steps on {text.name}")
    return report(model, rule, fmt=fmt, batches=batches)


def broken(diagnosis: Diagnosis) -> bool:
    """Whether something is wrong already, rather than what storage would do."""
    return diagnosis.worst() is Severity.ERROR


def as_document(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis as JSON has it: numbers that are not finite are None."""
    return {
        "worst": diagnosis.worst().value,
        "findings": [for_json(asdict(f)) for f in diagnosis.findings],
        "remedies": [
            for_json(
                {"kind": kind, "leaf": diagnosis.representatives[kind], "remedy": trial.remedy.name}
                | asdict(trial.survival)
                | {"bytes": trial.bytes, "lost_at_start": trial.lost_at_start}
                | {"works": trial.works}
            )
            for kind, trials in diagnosis.trials.items()
            for trial in trials
        ],
        "basis": diagnosis.basis,
        "seconds": diagnosis.seconds,
    }
