"""Runs and prints the command `stability` on a user's checkpoint. Source: docs/stability.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from megalodon_jax.convert import load_from_pretrained
from reports.cli.console import Progress
from reports.text import for_json
from reports.user_module import UserFileError, functions_of, guarded, guarded_items
from reports.user_text import check_text
from stability.core.checkpoint_files import open_checkpoint
from stability.core.findings import Severity
from stability.core.number_formats import by_name
from stability.core.parameter_leaves import Leaf
from stability.storage.diagnose import report
from stability.storage.diagnosis import Diagnosis
from stability.storage.known_gradients import KnownGradients, measured
from stability.storage.remedies import ranks
from stability.storage.schedule import parse
from stability.storage.simulate import GRADIENTS
from stability.storage.torch_state import read_states, trained_by
from stability.storage.update_rules import optimiser as optimiser_by_name
from stability.suite import LENGTH, Checkpoint


def diagnose(
    path: Path,
    optimiser: str | None,
    settings: dict[str, float],
    storage: str,
    text: Path | None,
    progress: Progress,
    gradients: Path | None = None,
    schedule: str | None = None,
    order: Path | None = None,
    base: Path | None = None,
) -> Diagnosis:
    """Return what low-precision storage would do to the checkpoint at `path`.

    Args:
        path: A folder, a safetensors file or a torch file.
        optimiser: Name of the optimiser that trains the checkpoint; None for that of its optimiser
            state, or AdamW without a state.
        settings: Settings of the optimiser, such as `lr`; they override the state and the defaults.
        storage: Name of the storage format to examine.
        text: File whose bytes a Megalodon is trained on; None for random gradients.
        progress: Receives lines and steps of progress.
        gradients: Python file whose `gradients()` provides the gradients; None for random ones.
            Ignored if `text` is given.
        schedule: Learning-rate schedule, in the syntax of `--schedule`; None for a constant rate.
        order: File with the names of the parameters in the optimiser's order; None to infer it.
            Ignored if `text` is given.
        base: Checkpoint to which the LoRA adapters at `path` belong; None for other checkpoints.

    Raises:
        FileNotFoundError: the checkpoint or the text does not exist.
        ValueError: the checkpoint cannot be probed, a name is unknown, or the text is too short or
            does not fit the vocabulary.
    """
    fmt = by_name(storage)
    rates = None if schedule is None else parse(schedule)
    if optimiser is not None:
        # Reject settings that the optimiser does not have before anything is read.
        optimiser_by_name(optimiser, **settings)
    names = None if order is None else _names(order)
    files = open_checkpoint(path)
    progress(f"{path}: {files.summary}")
    progress(f"probing {path} for {fmt.name} storage")
    if text is None:
        known = None if gradients is None else partial(_measured, gradients, progress)
        return report(
            files, optimiser, settings=settings, fmt=fmt, known=known, schedule=rates, order=names,
            base=base, say=progress, step=progress.step,
        )  # fmt: skip
    states = read_states(files.states, files.leaves)
    rule, _ = trained_by(states, optimiser, **settings)
    model = load_from_pretrained(path)
    otherwise = "leave --text out to measure with random gradients."
    check_text(text, model.config.vocab_size, LENGTH, otherwise)
    batches = Checkpoint(text.parent, text).batches()
    progress(f"training {len(batches)} steps on {text.name}")
    return report(model, rule, fmt=fmt, batches=batches, schedule=rates)


def _names(file: Path) -> list[str]:
    """Return the names in a file: a JSON list, or one name per line.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not readable JSON or holds no names.
    """
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}: expected one with parameter names (--order).")
    text = file.read_text(encoding="utf-8", errors="replace").strip()
    try:
        names = json.loads(text) if text.startswith(("[", "{")) else text.split()
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not readable JSON: {error}.") from error
    if not (isinstance(names, list) and names and all(isinstance(n, str) for n in names)):
        raise ValueError(
            f"{file} holds no names: expected a JSON list of the names of the optimiser's "
            "parameters in its order, or one name per line."
        )
    return names


FUNCTION = "gradients"
"""Name of the function in a user's file that provides gradients."""


def _measured(file: Path, progress: Progress, leaves: Mapping[str, Leaf]) -> KnownGradients:
    """Return the gradients of `leaves` that the function `gradients()` of a user's file provides.

    Raises:
        UserFileError: the file does not exist, fails, or provides nothing usable.
    """
    progress(f"taking gradients from {file}")
    with functions_of(file, FUNCTION) as functions:
        if FUNCTION not in functions:
            raise UserFileError(
                f"{file} has no function `{FUNCTION}`: expected `def {FUNCTION}()` that yields a "
                "torch module and its loss for each batch, or gradients by parameter name"
            )
        answer = guarded(file, functions[FUNCTION])
        batches = guarded_items(file, answer) if isinstance(answer, Iterator) else [answer]
        try:
            return measured(batches, leaves, file.name, GRADIENTS.signal)
        except UserFileError:
            raise
        except ValueError as error:
            raise UserFileError(f"{FUNCTION}() of {file}: {error}") from error


def broken(diagnosis: Diagnosis) -> bool:
    """Return whether any finding is an error: something that is wrong already in the checkpoint."""
    return diagnosis.worst() is Severity.ERROR


def as_document(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis as JSON values; numbers that are not finite become None."""
    return {
        "worst": diagnosis.worst().value,
        "findings": [for_json(asdict(f)) for f in diagnosis.findings],
        "remedies": [
            for_json(
                {"kind": kind, "leaf": diagnosis.representatives[kind], "remedy": trial.remedy.name}
                | asdict(trial.survival)
                | {"bytes": trial.bytes, "lost_at_start": trial.lost_at_start, "idle": trial.idle}
                | {"works": trial.works, "verdict": trial.verdict(), "rank": rank}
            )
            for kind, trials in diagnosis.trials.items()
            for trial, rank in zip(trials, ranks(trials), strict=True)
        ],
        "whole_run": None if diagnosis.whole is None else for_json(asdict(diagnosis.whole)),
        "optimiser_states": [asdict(use) for use in diagnosis.states],
        "basis": diagnosis.basis,
        "seconds": diagnosis.seconds,
    }
