"""Zero rows of the embedding: the model cannot tell their tokens apart.

Source: docs/stability.md "Embedding rows".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megalodon_jax.weights import EMBEDDING
from stability.core.findings import Finding, judge
from stability.core.parameter_leaves import leaves_of, listed

SOURCE = 'docs/stability.md "Embedding rows"'
REMEDY = (
    "copy the rows from the checkpoint they come from; give tokens that were added later, or that "
    "no text had, the mean of the other rows"
)


def findings(source: Any) -> list[Finding]:
    """Return one finding on the fraction of embedding rows that are zero; it names some of them.

    Args:
        source: pytree, state dict or checkpoint.

    Raises:
        ValueError: see `leaves_of`; or the source has no embedding.
    """
    leaves = leaves_of(source)
    if EMBEDDING not in leaves:
        raise ValueError(
            f"no embedding here: expected a parameter named {EMBEDDING}, found "
            f"{listed(list(leaves))}. Only a Megalodon's embedding is checked."
        )
    # Tested in the stored dtype: a float64 row could become zero in float32.
    rows = ~np.any(np.asarray(leaves[EMBEDDING].load()) != 0, axis=1)
    tokens = [str(token) for token in np.flatnonzero(rows)]
    share = float(np.mean(rows))
    message = f"{len(tokens):,} of {rows.size:,} rows are zero"
    message += f", by token: {listed(tokens)}" if tokens else ""
    probe, metric = "embedding_rows", "zero_row_fraction"
    return [judge(probe, EMBEDDING, metric, share, 0.0, SOURCE, message, REMEDY)]
