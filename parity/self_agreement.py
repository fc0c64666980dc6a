"""Agreement of one language model with itself: a row alone and in a batch, a text whole and token
by token.

Training sees whole texts in large batches, and serving sees single tokens in batches of any size.
Kernels that sum in another order for another batch change the last bits; a scale that is shared by
a batch, or a state that is lost between tokens, changes more. Source: docs/your-own-port.md "One
model in two ways".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from parity.tasks import LanguageModel, TaskError

LARGE = 1e-3
"""Smallest probability of a token whose change counts for `Agreement.largest`."""


@dataclass(frozen=True)
class Agreement:
    """Differences between the log-probabilities that one model gives when it is run in two ways.

    The inputs are token ids (B, L); differences are in nats.
    """

    title: str
    """Name of the model, and the two ways in which it was run."""
    rows: int
    """Number B of rows."""
    length: int
    """Number L of tokens in a row."""
    unequal: int
    """Number of the B L positions at which any probability differs in any bit."""
    first: tuple[int, int] | None
    """Row and position of the first position that differs: the smallest position, and of its rows
    the first. None if no position differs."""
    largest: float
    """Largest absolute change of a log-probability, over all positions and those tokens of the
    vocabulary with a probability of at least `LARGE` in one way or both; infinite if the other way
    gives one of them a probability of 0."""
    at: tuple[int, int] | None
    """Row and position of the change `largest`; None if `largest` is 0."""
    mean: float
    """Mean change of the log-probability of the text's own tokens: second way minus first way.
    Rounding errors have random signs, so a mean as large as the single changes has another cause.
    0 if rows have one token; infinite or NaN if one way gives one of these tokens a probability
    of 0."""
    divergence: float
    """Mean Kullback-Leibler divergence of the second way from the first, over all positions;
    infinite if the second way gives a probability of 0 to a token that the first does not."""

    @property
    def equal(self) -> bool:
        """Whether all probabilities are equal bit for bit. Logits need not be: a constant added to
        all logits of a position changes no probability."""
        return not self.unequal

    def within(self, nats: float) -> bool:
        """Return whether `largest` and `divergence` are at most this many nats.

        Tokens of the vocabulary with a probability below `LARGE` in both ways affect only
        `divergence`. At a position where all tokens are that improbable, only `divergence` can show
        a change.
        """
        return self.largest <= nats and self.divergence <= nats

    def text(self) -> str:
        """Describe the result in one to three lines."""
        positions = self.rows * self.length
        if self.first is None:
            return f"{self.title}: equal bits at all {positions} positions"
        row, place = self.first
        lines = [
            f"{self.title}: {self.unequal} of {positions} positions differ, the first in row {row} "
            f"at token {place}"
        ]
        if self.at is not None:
            row, place = self.at
            lines.append(
                f"  largest change of a log-probability {self.largest:.1e} nats, in row {row} "
                f"behind token {place}"
            )
        lines.append(
            f"  mean change of the text's tokens {self.mean:+.1e} nats, divergence "
            f"{self.divergence:.1e} nats"
        )
        return "\n".join(lines)


def batch_agreement(
    model: LanguageModel, ids: np.ndarray, *, sizes: Sequence[int] = ()
) -> tuple[Agreement, ...]:
    """Compare each row alone with the same row in a batch; return one result per batch size.

    The batches are computed twice, with the rows in their order and in reverse order, so that each
    row has other neighbours and another place. Of the two orders, the one in which more positions
    differ gives the result; if the numbers of positions are equal, the order with the larger
    `Agreement.largest`.

    Args:
        model: the model.
        ids: token ids (B, L) of B >= 2 different rows.
        sizes: numbers of rows in a batch, from 2 to B, each a divisor of B; (): one
            batch of all B rows.

    Raises:
        TaskError: the arguments are not as described, or logits are NaN or +inf.
    """
    ids = _checked(ids)
    count = len(ids)
    if count < 2 or len(np.unique(ids, axis=0)) < count:
        raise TaskError(
            f"expected at least two rows that all differ, got {count} rows of which "
            f"{len(np.unique(ids, axis=0))} differ: a batch of copies of one row tests nothing"
        )
    for size in (sizes := tuple(sizes) or (count,)):
        if size < 2 or size > count or count % size:
            raise TaskError(
                f"expected batch sizes from 2 to {count} that divide it, got {size}: one row is "
                "no batch, and with a remainder the last batch would be smaller"
            )
    alone = np.concatenate([model.log_probabilities(ids[n : n + 1]) for n in range(count)])
    results = []
    for size in sizes:
        both = []
        for order in (np.arange(count), np.arange(count)[::-1]):
            shuffled = ids[order]
            parts = [shuffled[n : n + size] for n in range(0, count, size)]
            found = np.concatenate([model.log_probabilities(part) for part in parts])
            both.append(_agreement(alone, found[np.argsort(order)], ids))
        worst = max(both, key=lambda each: (each.unequal, each.largest))
        title = f"{model.name}, a row alone and in a batch of {size}"
        results.append(replace(worst, title=title))
    return tuple(results)


def stream_agreement(
    model: LanguageModel, ids: np.ndarray, stepwise: Callable[[np.ndarray], np.ndarray]
) -> Agreement:
    """Compare a text computed whole with the same text computed token by token.

    Args:
        model: the model, whose `logits` computes all positions at once, as training does.
        ids: token ids (B, L) with L >= 2.
        stepwise: maps token ids (B, L) int32 to logits (B, L, V) of all positions, computed as when
            serving: the first tokens at once (a prompt of any length), each later one by itself,
            with a cache.

    Raises:
        TaskError: `stepwise` is `model.logits`, the arguments are not as described, or logits are
            NaN or +inf.
    """
    ids = _checked(ids)
    # `==`, because each access to a method creates a new object.
    if stepwise == model.logits:
        raise TaskError(
            f"{model.name} would be compared with itself: pass as `stepwise` the function that "
            "computes a text token by token"
        )
    if ids.shape[1] < 2:
        raise TaskError(f"expected at least two tokens in a row, got ids of shape {ids.shape}")
    whole = model.log_probabilities(ids)
    steps = replace(model, logits=stepwise).log_probabilities(ids)
    title = f"{model.name}, whole and token by token"
    return replace(_agreement(whole, steps, ids), title=title)


def change_of(first: LanguageModel, second: LanguageModel, ids: np.ndarray) -> Agreement:
    """Compare a second model's log-probabilities with a first one's, on token ids (B, L).

    Raises:
        TaskError: the arguments are not as described, or logits are NaN or +inf.
    """
    ids = _checked(ids)
    found = _agreement(first.log_probabilities(ids), second.log_probabilities(ids), ids)
    return replace(found, title=f"{first.name} and {second.name}")


def _checked(ids: np.ndarray) -> np.ndarray:
    found = np.asarray(ids)
    if found.ndim != 2 or not found.size or not np.issubdtype(found.dtype, np.integer):
        raise TaskError(
            f"expected token ids (B, L) of integers, got {found.dtype} of shape {found.shape}"
        )
    if found.max() > np.iinfo(np.int32).max:
        raise TaskError(f"expected token ids that fit int32, got {found.min()} to {found.max()}")
    return found.astype(np.int32)


def _agreement(first: np.ndarray, second: np.ndarray, ids: np.ndarray) -> Agreement:
    """Compare the log-probabilities (B, L, V), float64, of two runs of one model; the result has no
    title."""
    if first.shape != second.shape:
        raise TaskError(
            f"expected log-probabilities of one shape, got {first.shape} and {second.shape}"
        )
    if ids.min() < 0 or ids.max() >= first.shape[-1]:
        raise TaskError(
            f"expected token ids from 0 to {first.shape[-1] - 1}, got {ids.min()} to {ids.max()}: "
            "the tokens are those of another model"
        )
    differs = (first != second).any(-1)
    places = np.argwhere(differs.T)
    # A token that both runs exclude has -inf in both and does not change.
    with np.errstate(invalid="ignore"):
        change = np.where(first == second, 0.0, second - first)
    # Changes of very improbable tokens are mostly cancellation error and have no effect on users.
    large = np.maximum(first, second) >= math.log(LARGE)
    sizes = np.where(large, np.abs(change), 0.0).max(-1)
    row, place = (int(n) for n in np.unravel_index(sizes.argmax(), sizes.shape))
    largest = float(sizes[row, place])
    # The tokens of the text that are predicted: all but the first of each row.
    own = np.take_along_axis(change[:, :-1], ids[:, 1:, None].astype(np.int64), axis=-1)
    weight = np.exp(first)
    with np.errstate(invalid="ignore"):
        mean = own.mean() if own.size else 0.0
        terms = np.where(weight > 0, weight * change, 0.0)
    return Agreement(
        title="",
        rows=first.shape[0],
        length=first.shape[1],
        unequal=int(differs.sum()),
        first=(int(places[0][1]), int(places[0][0])) if len(places) else None,
        largest=largest,
        at=(row, place) if largest > 0 else None,
        mean=float(mean),
        # Rounding may make the sum of positive and negative terms slightly negative.
        divergence=max(0.0, float(-terms.sum(-1).mean())),
    )
