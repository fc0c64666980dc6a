"""Packed rows of a case: split into single documents, and results joined again.

megalodon-hf does not support packed rows, so it runs each document alone. The oracle does the same
for a cached stream. Source: docs/parity.md "Packed documents".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np

from parity.megalodon.cases import Batch, Case
from parity.megalodon.oracle import document_positions
from parity.megalodon.ragged import stacked


def spans(case: Case) -> Iterator[tuple[int, slice]]:
    """Yield the row and the slice of positions of each document, row by row."""
    assert case.batch.segments is not None
    for row, positions in enumerate(document_positions(case.batch.segments)):
        begins = [*np.flatnonzero(positions == 0).tolist(), len(positions)]
        for begin, end in pairwise(begins):
            yield row, slice(begin, end)


def documents(case: Case) -> Iterator[Batch]:
    """Yield each document as a batch of one row."""
    batch = case.batch
    for row, span in spans(case):
        yield Batch(*(a[row : row + 1, span] for a in (batch.ids, batch.labels, batch.mask)))


def joined_documents(
    case: Case, found: Sequence[Mapping[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Join arrays (1, n, ...) of single documents to arrays (B, L, ...).

    If a document lacks an array, the joined array is 0 at the document's positions.

    Args:
        case: a case with packed documents.
        found: arrays by name, one dictionary per document in the order of `spans`.
    """
    shape, joined = case.batch.ids.shape, {}
    for (row, span), arrays in zip(spans(case), found, strict=True):
        for name, array in arrays.items():
            whole = joined.setdefault(name, np.zeros((*shape, *array.shape[2:]), array.dtype))
            whole[row, span] = array[0]
    return joined


def streamed_documents(
    case: Case, run: Callable[[np.ndarray, tuple[int, ...], bool], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Run each document of a packed stream alone, and combine the results to arrays of the stream.

    Logits (B, L, V) are those of all documents. States and generated tokens are those of the last
    document of each row.

    Args:
        case: a cached stream with packed documents.
        run: streams one document. It takes the ids (1, n), the number of tokens that each call
            feeds, and whether tokens are generated after the document (true for the last document
            of a row).
    """
    ends, pieces, last = list(accumulate(case.cuts)), [], []
    for row, span in spans(case):
        within = [min(max(end, span.start), span.stop) for end in (0, *ends)]
        calls = tuple(after - before for before, after in pairwise(within) if after > before)
        follows = span.stop == case.length
        found = run(case.batch.ids[row : row + 1, span], calls, follows)
        pieces.append({"logits": found.pop("logits")})
        if follows:
            last.append(found)
    return joined_documents(case, pieces) | stacked(last)
