"""Agreement of two language models on a task: perplexity of a text, and greedy continuations.

Gates on logits tell whether two programs compute the same function. The agreement on a task tells
what a difference means to a user, with a confidence interval. It applies to intended differences
too: weights in few bits, another precision, another attention kernel. Source:
docs/your-own-port.md "Tasks".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from parity.engine.measure.metrics import log_softmax

LEVEL = 0.95
"""Confidence level of all intervals."""


class TaskError(ValueError):
    """An argument is invalid, or a model returned something that cannot be measured."""


@dataclass(frozen=True)
class LanguageModel:
    """A language model of any framework, as functions of token ids."""

    name: str
    logits: Callable[[np.ndarray], np.ndarray]
    """Maps token ids (B, L) int32 to logits (B, L, V) of any float dtype. The logits at a
    position must not depend on later tokens."""
    generate: Callable[[np.ndarray, int], np.ndarray] | None = None
    """Maps token ids (1, L) int32 and a number N to the next N tokens (1, N); each is the most
    likely one after all tokens before it. None: `logits` is called once for each token."""

    def log_probabilities(self, ids: np.ndarray) -> np.ndarray:
        """Return log-probabilities of the token after each position, in nats, (B, L, V) float64.

        Raises:
            TaskError: logits have another shape, are complex, NaN or +inf, or exclude every token.
        """
        logits = np.asarray(self.logits(ids))
        if logits.ndim != 3 or logits.shape[:2] != ids.shape:
            raise TaskError(
                f"{self.name}: expected logits of shape {(*ids.shape, 'V')} for token ids of shape "
                f"{ids.shape}, got {logits.shape}: return one row of logits for each token"
            )
        if np.iscomplexobj(logits):
            raise TaskError(f"{self.name}: expected real logits, got {logits.dtype}")
        wide = logits.astype(np.float64)
        # -inf excludes a token; NaN and +inf are errors.
        if np.isnan(wide).any() or (wide == np.inf).any() or (wide.max(-1) == -np.inf).any():
            raise TaskError(
                f"{self.name}: logits hold NaN or +inf, or exclude every token: look for them in "
                "the weights, or compare the models as a port, which names the first such stage"
            )
        return log_softmax(wide)

    def continued(self, ids: np.ndarray, count: int) -> np.ndarray:
        """Return the greedy continuation of a prompt (L,): `count` new tokens, int64.

        Raises:
            TaskError: `generate` returns another number of tokens, or no integers; or logits are
                invalid, as in `log_probabilities`.
        """
        if self.generate is not None:
            found = np.asarray(self.generate(ids[None].astype(np.int32), count))
            if found.shape != (1, count):
                raise TaskError(
                    f"{self.name}: expected {count} new tokens, of shape {(1, count)}, got "
                    f"{found.shape}: return the new tokens without the prompt"
                )
            if not np.issubdtype(found.dtype, np.integer):
                raise TaskError(f"{self.name}: expected token ids of integers, got {found.dtype}")
            return found[0].astype(np.int64)
        for _ in range(count):
            last = self.log_probabilities(ids[None].astype(np.int32))[0, -1]
            ids = np.append(ids, last.argmax())
        return ids[len(ids) - count :].astype(np.int64)


@dataclass(frozen=True)
class TextAgreement:
    """Perplexities of two models on a text, and how much the two perplexities differ."""

    names: tuple[str, str]
    tokens: int
    """Number of predicted tokens."""
    windows: int
    """Number of windows of the text; a model predicts each window without seeing the others."""
    perplexities: tuple[float, float]
    """Perplexity by each model: e to the power of the mean negative log-likelihood of a token."""
    difference: float
    """Mean negative log-likelihood of the first model minus the second's, in nats per token."""
    interval: tuple[float, float]
    """Confidence interval (`LEVEL`) of `difference`: Student's t over the means of windows, because
    tokens of one window depend on one another."""
    same_best: int
    """Number of the `tokens` predictions in which both models have the same most likely token."""
    equal: bool
    """Whether all probabilities of all tokens are equal bit for bit."""

    def within(self, margin: float) -> bool:
        """Return whether the whole interval is less than `margin` nats per token from 0.

        This criterion is a test of equivalence: two one-sided tests, each at half of 1 - `LEVEL`. A
        short text has a wide interval, so the result is False, although a test for a difference
        would find none.
        """
        return all(abs(end) < margin for end in self.interval)

    def text(self) -> str:
        """Return the result in three lines, and a fourth if all probabilities are equal."""
        (first, second), (low, high) = self.names, self.interval
        share = self.same_best / self.tokens
        lines = (
            f"perplexity of {self.tokens} tokens in {self.windows} windows: "
            f"{first} {self.perplexities[0]:.6g}, {second} {self.perplexities[1]:.6g}\n"
            f"{first} - {second}: {self.difference:+.2e} nats per token "
            f"({LEVEL:.0%} between {low:+.2e} and {high:+.2e})\n"
            f"the same most likely token before {self.same_best} of {self.tokens} ({share:.2%})"
        )
        return lines + "\nall probabilities are equal bit for bit" * self.equal


@dataclass(frozen=True)
class Split:
    """First difference of two greedy continuations of a prompt."""

    prompt: int
    """Number of the prompt, from 0."""
    position: int
    """Number of new tokens before the difference."""
    tokens: tuple[int, int]
    """The token that each model chose at that position."""
    margins: tuple[float, float]
    """Nats by which each model prefers its own token to the other's, after the same tokens. A
    margin near 0 is a tie, which rounding decides."""


@dataclass(frozen=True)
class GreedyAgreement:
    """Greedy continuations of the same prompts by two models."""

    names: tuple[str, str]
    prompts: int
    new_tokens: int
    splits: tuple[Split, ...]
    """First difference of the two continuations, for each prompt whose continuations differ."""

    @property
    def same(self) -> int:
        """Number of prompts that both models continue alike."""
        return self.prompts - len(self.splits)

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's confidence interval (`LEVEL`) of the fraction of prompts that both models
        continue alike, from 0 to 1."""
        found = stats.binomtest(self.same, self.prompts).proportion_ci(LEVEL, method="wilson")
        return float(found.low), float(found.high)

    def text(self) -> str:
        """Return the result as text: one line, then one for each of the first five splits."""
        low, high = self.interval
        lines = [
            f"{self.same} of {self.prompts} prompts are continued alike for {self.new_tokens} "
            f"tokens ({LEVEL:.0%} between {low:.1%} and {high:.1%})"
        ]
        for split in self.splits[:5]:
            margins = " and ".join(f"{m:.1e}" for m in split.margins)
            lines.append(
                f"  prompt {split.prompt} after {split.position} tokens: {split.tokens[0]} and "
                f"{split.tokens[1]}, each preferred by its model by {margins} nats"
            )
        if more := len(self.splits) - 5:
            lines += [f"  and {more} more"] if more > 0 else []
        return "\n".join(lines)


def text_agreement(
    first: LanguageModel, second: LanguageModel, ids: np.ndarray, *, window: int, rows: int = 1
) -> TextAgreement:
    """Compare the perplexities that two models give a text.

    The text is cut into windows of equal length, and each window is a separate input of both
    models. A rest that fills no window is left out. The first token of a window is not predicted.

    Args:
        first: a model.
        second: another model.
        ids: token ids of the text, (N,) integers.
        window: tokens in a window, at least 2.
        rows: windows that a model gets in one call.

    Raises:
        TaskError: both arguments are one model, the text has less than two windows, the models have
            vocabularies of different sizes, an id is outside of the vocabularies, logits are NaN or
            +inf, or a model gives a token of the text a probability of 0.
    """
    _check_two(first, second)
    ids = _checked_ids(ids)
    if window < 2 or rows < 1:
        raise TaskError(f"expected window >= 2 and rows >= 1, got window={window}, rows={rows}")
    count = len(ids) // window
    if count < 2:
        raise TaskError(
            f"expected at least two windows of {window} tokens, for an interval, got a text of "
            f"{len(ids)} tokens: give a longer text or a smaller window"
        )
    windows = ids[: count * window].reshape(count, window)
    likelihoods: list[list[np.ndarray]] = [[], []]
    same, equal = 0, True
    for start in range(0, count, rows):
        part = windows[start : start + rows]
        both = [model.log_probabilities(part.astype(np.int32)) for model in (first, second)]
        _check_vocabularies((first, second), both, part)
        equal &= np.array_equal(both[0], both[1])
        found = [values[:, :-1] for values in both]
        targets = part[:, 1:, None]
        for side, values in zip(likelihoods, found, strict=True):
            side.append(-np.take_along_axis(values, targets, axis=-1)[..., 0])
        same += int(np.sum(found[0].argmax(-1) == found[1].argmax(-1)))
    ours, theirs = (np.concatenate(side) for side in likelihoods)
    for model, values in ((first, ours), (second, theirs)):
        if lost := int(np.isinf(values).sum()):
            raise TaskError(
                f"{model.name}: {lost} of {values.size} tokens of the text have probability 0, so "
                "that its perplexity is infinite: give them logits above -inf"
            )
    difference, interval = _mean_of_windows((ours - theirs).mean(axis=1))
    perplexities = float(np.exp(ours.mean())), float(np.exp(theirs.mean()))
    names = first.name, second.name
    return TextAgreement(names, ours.size, count, perplexities, difference, interval, same, equal)


def greedy_agreement(
    first: LanguageModel, second: LanguageModel, prompts: Sequence[np.ndarray], *, new_tokens: int
) -> GreedyAgreement:
    """Compare the greedy continuations of prompts by two models.

    Args:
        first: a model.
        second: another model.
        prompts: token ids of each prompt, (L,) integers with L >= 1.
        new_tokens: length of the continuations.

    Raises:
        TaskError: both arguments are one model, there is no prompt or an empty one, the models have
            vocabularies of different sizes, an id is outside of the vocabularies, or a model
            returns invalid tokens or logits.
    """
    _check_two(first, second)
    if new_tokens < 1 or not len(prompts):
        raise TaskError(
            f"expected prompts and new_tokens >= 1, got {len(prompts)} prompts and "
            f"new_tokens={new_tokens}"
        )
    splits = []
    for number, prompt in enumerate(prompts):
        ids = _checked_ids(prompt)
        if not len(ids):
            raise TaskError(f"prompt {number} has no token: begin it with the begin-of-text token")
        seen = [model.log_probabilities(ids[None].astype(np.int32)) for model in (first, second)]
        _check_vocabularies((first, second), seen, ids)
        both = [model.continued(ids, new_tokens) for model in (first, second)]
        _check_vocabularies((first, second), seen, np.concatenate(both))
        differs = np.flatnonzero(both[0] != both[1])
        if not len(differs):
            continue
        at = int(differs[0])
        tokens = int(both[0][at]), int(both[1][at])
        prefix = np.concatenate([ids, both[0][:at]])[None].astype(np.int32)
        margins = [
            float(last[own] - last[other])
            for model, own, other in ((first, *tokens), (second, *tokens[::-1]))
            for last in [model.log_probabilities(prefix)[0, -1]]
        ]
        splits.append(Split(number, at, tokens, (margins[0], margins[1])))
    return GreedyAgreement((first.name, second.name), len(prompts), new_tokens, tuple(splits))


def _check_two(first: LanguageModel, second: LanguageModel) -> None:
    if first is second or first.logits == second.logits:
        raise TaskError(f"{first.name} would be compared with itself: give two models")


def _checked_ids(ids: np.ndarray) -> np.ndarray:
    found = np.asarray(ids)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise TaskError(f"expected token ids (N,) of integers, got {found.dtype} {found.shape}")
    return found.astype(np.int64)


def _check_vocabularies(
    models: Sequence[LanguageModel], found: Sequence[np.ndarray], ids: np.ndarray
) -> None:
    sizes = [values.shape[-1] for values in found]
    if sizes[0] != sizes[1]:
        raise TaskError(
            f"expected vocabularies of one size, got {sizes[0]} of {models[0].name} and {sizes[1]} "
            f"of {models[1].name}: remove the logits of padding tokens"
        )
    if ids.min() < 0 or ids.max() >= sizes[0]:
        raise TaskError(
            f"expected token ids from 0 to {sizes[0] - 1}, got {ids.min()} to {ids.max()}: the "
            "tokens are those of another model"
        )


def _mean_of_windows(means: np.ndarray) -> tuple[float, tuple[float, float]]:
    """Return the mean over independent windows, and its confidence interval (`LEVEL`).

    `means` has one value per window.
    """
    mean = float(means.mean())
    error = float(means.std(ddof=1)) / math.sqrt(len(means))
    reach = error * float(stats.t.ppf((1 + LEVEL) / 2, len(means) - 1))
    return mean, (mean - reach, mean + reach)
