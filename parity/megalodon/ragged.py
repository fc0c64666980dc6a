"""Batches of cached streams whose rows have different lengths: split into rows, results combined.

The JAX model runs such a case as one padded batch. The oracle and megalodon-hf run each row alone,
without padding. Source: docs/model.md "Caches".
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from parity.megalodon.cases import Case


def row_alone(case: Case, row: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return the n unpadded token ids of a row, (1, n), and how many of them each call feeds.

    Calls in which the row is all padding are omitted, so the counts are positive and sum to n.

    Raises:
        ValueError: the row has no token.
    """
    mask = case.batch.mask[row]
    if not mask.any():
        raise ValueError(
            f"case {case.name}: row {row} of {case.length} tokens is all padding, expected a "
            "token of text in every row; choose longer calls or fewer rows."
        )
    ends = list(accumulate(case.cuts))
    counts = [int(part.sum()) for part in np.split(mask, ends[:-1])]
    return case.batch.ids[row : row + 1, mask], tuple(n for n in counts if n)


def combine_rows(case: Case, rows: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Combine the results of single rows, in row order, into arrays of the batch.

    Logits (B, L, V) are 0 at padding. Other arrays are padded with zeros at the end of each axis.
    """
    found = stacked([{n: a for n, a in row.items() if n != "logits"} for row in rows])
    mask, first = case.batch.mask, rows[0]["logits"]
    logits = np.zeros((*mask.shape, first.shape[-1]), first.dtype)
    for row, arrays in enumerate(rows):
        logits[row, mask[row]] = arrays["logits"][0]
    return {"logits": logits} | found


def stacked(rows: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Concatenate arrays (1, ...) of rows to (B, ...), padding each axis with zeros at its end."""

    def joined(arrays: list[np.ndarray]) -> np.ndarray:
        shape = np.max([a.shape for a in arrays], axis=0)
        widths = [
            [(0, most - size) for most, size in zip(shape, a.shape, strict=True)] for a in arrays
        ]
        return np.concatenate([np.pad(a, w) for a, w in zip(arrays, widths, strict=True)])

    return {name: joined([row[name] for row in rows]) for name in rows[0]}


def last_valid(mask: np.ndarray) -> np.ndarray:
    """Return the index (B,) of the last valid token of each row of a mask (B, L)."""
    return mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
