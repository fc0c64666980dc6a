"""Results of every single NumPy operation of the oracle up to a stage.

Source: docs/parity.md "From a stage to a line".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from autograd.tracer import Node, trace

from parity.megalodon import oracle
from parity.megalodon.cases import Case


class _Recording(Node):
    """Node of autograd's trace that appends its operation's result to one list per trace."""

    # autograd creates a node for each operation whose inputs depend on traced values (the weights).
    def __init__(self, value, fun, args, kwargs, parent_argnums, parents):
        self.results: list[Any] = parents[0].results
        self.results.append(value)

    def initialize_root(self):
        self.results = []


def results(case: Case, stage: str) -> list[np.ndarray]:
    """Return the weights, and the results of the oracle's operations up to a stage.

    All are float64 or complex, results in order of execution. Operations of earlier layers are
    omitted: if the JAX model had the same value as one of them, that would be a coincidence.

    Args:
        case: a case that is no trajectory, and no stream of padded rows or documents.
        stage: name of an intermediate.
    """
    batch, config = case.batch, case.config
    layer = stage.rpartition(".")[0]
    root = _Recording.new_root()
    passed: dict[str, int] = {}

    def hook(name: str, value: Any) -> Any:
        passed[name] = len(root.results)
        return value

    def forward(weights: Any) -> Any:
        return oracle.forward(
            config,
            weights,
            batch.ids,
            batch.mask,
            mask_ema=config.mask_ema,
            hook=hook,
            segments=batch.segments,
            cuts=case.cuts,
        )

    weights = {name: np.asarray(w, np.float64) for name, w in case.weights.items()}
    trace(root, forward, weights)
    before = [at for name, at in passed.items() if not name.startswith(f"{layer}.")]
    start = max((at for at in before if layer and at < passed[stage]), default=0)
    found = (np.asarray(x) for x in root.results[start : passed[stage]])
    return [*weights.values(), *(x for x in found if x.dtype.kind in "fc")]
