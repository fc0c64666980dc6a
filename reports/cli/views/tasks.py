"""Runs the command `tasks`: compares the language models that a user's file defines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from parity.self_agreement import Agreement, batch_agreement, stream_agreement
from parity.tasks import LanguageModel, TaskError, greedy_agreement, text_agreement
from reports.user_module import UserFileError, functions_of, guarded


def agreements(
    file: Path, window: int, rows: int, prompts: int, new_tokens: int, margin: float | None
) -> tuple[list[str], bool]:
    """Return one text per comparison, and whether the models agree within a margin.

    Two models are compared with each other; one model is compared with itself.

    Args:
        file: Python file with `models()`, `ids()` and optionally `stepwise(ids)`.
        window: tokens in a window of the text.
        rows: windows that a model gets in one call.
        prompts: number of prompts to continue, if there are two models.
        new_tokens: tokens that each prompt is continued by.
        margin: limit in nats; None: the second result is False. One model agrees with itself if
            `Agreement.within(margin)` holds for each comparison; two models agree if
            `TextAgreement.within(margin)` holds, whatever their continuations.

    Raises:
        UserFileError: the file lacks a function, or one of them raises an error.
        TaskError: the models or the text cannot be compared.
    """
    with functions_of(file, "models", "ids", "stepwise") as functions:
        for name in ("models", "ids"):
            if name not in functions:
                raise UserFileError(f"expected a function `{name}()` in {file}, which has none")
        models = _models(file, functions["models"])
        ids = guarded(file, lambda: np.asarray(functions["ids"]()))
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise UserFileError(
                f"expected token ids (N,) of integers from `ids()` in {file}, got {ids.dtype} of "
                f"shape {ids.shape}"
            )
        if len(models) == 1:
            found = _run(file, lambda: _with_itself(models[0], ids, window, rows, functions))
            within = [margin is not None and each.within(margin) for each in found]
            return [each.text() for each in found], all(within)
        both = models[0], models[1]
        agreement = _run(file, lambda: text_agreement(*both, ids, window=window, rows=rows))
        lines = [agreement.text()]
        if prompts:
            starts = _prompts(ids, prompts, window)
            same = _run(file, lambda: greedy_agreement(*both, starts, new_tokens=new_tokens))
            lines.append(same.text())
        return lines, margin is not None and agreement.within(margin)


def _models(file: Path, models: Callable[[], Any]) -> list[LanguageModel]:
    given = guarded(file, models)
    found = list(given) if isinstance(given, (tuple, list)) else [given]
    if other := [type(each).__name__ for each in found if not isinstance(each, LanguageModel)]:
        raise UserFileError(
            f"expected LanguageModel from `models()` in {file}, got {', '.join(other)}"
        )
    if len(found) not in (1, 2):
        raise UserFileError(
            f"expected one or two models from `models()` in {file}, got {len(found)}"
        )
    return found


def _run(file: Path, action: Callable[[], Any]) -> Any:
    """Return the result of a function that runs code of the user's file.

    A `TaskError` of that code is raised unchanged: its message says what to do. Any other error
    becomes a `UserFileError` that shows the user's lines.
    """
    try:
        return guarded(file, action)
    except UserFileError as error:
        raise error.__cause__ if isinstance(error.__cause__, TaskError) else error from None


def _prompts(ids: np.ndarray, count: int, window: int) -> list[np.ndarray]:
    """Return up to `count` evenly spaced prompts, each of `window` / 4 tokens (at least one)."""
    length = max(1, window // 4)
    starts = np.unique(np.linspace(0, max(0, len(ids) - length), count).astype(int))
    return [ids[start : start + length] for start in starts]


def _with_itself(
    model: LanguageModel,
    ids: np.ndarray,
    window: int,
    rows: int,
    functions: dict[str, Callable[..., Any]],
) -> list[Agreement]:
    """Return how a model agrees with itself on the first `rows` windows of a text: each window
    alone and in a batch; and whole and token by token if `functions` has `stepwise`.

    Raises:
        TaskError: the text is shorter than that, or `rows` is 1.
    """
    if len(ids) < rows * window:
        raise TaskError(
            f"expected at least {rows * window} token ids, for --rows {rows} of --window {window} "
            f"tokens, got {len(ids)}"
        )
    batch = ids[: rows * window].reshape(rows, window)
    found = [*batch_agreement(model, batch)]
    if "stepwise" in functions:
        found.append(stream_agreement(model, batch, functions["stepwise"]))
    return found
