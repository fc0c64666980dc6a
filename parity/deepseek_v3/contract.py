"""Contract: the gates (measurements with a tolerance) that a case of MLA + MoE must report.

The gates follow from the names of stages, which Transformers' results give, and of parameters,
which the JAX model gives. Nothing is run. Source: docs/verdicts.md "Contract".
"""

from __future__ import annotations

from collections.abc import Iterator

from parity.deepseek_v3 import SUBJECT
from parity.deepseek_v3.cases import BUFFER, Case
from parity.deepseek_v3.recordings import RECORDED64, Recorded
from parity.deepseek_v3.reference import CHOSEN
from parity.engine.measure.contract import Gate
from parity.engine.measure.metrics import POOLED
from parity.engine.measure.quantity import LOGITS, WEIGHTS, Quantity
from parity.port.compare import FORCED
from parity.port_tolerances import PortEdge
from parity.sides.side import OUTPUT, Side

LIVE = (
    PortEdge.PORT64_ORIGINAL64,
    PortEdge.PORT32_PORT64,
    PortEdge.ORIGINAL32_ORIGINAL64,
    PortEdge.PORT32_ORIGINAL32,
)
"""Edges (pairs of sides) on which all quantities are compared if Transformers runs live."""
RECORDED = (PortEdge.PORT32_PORT64, PortEdge.ORIGINAL32_PORT64, PortEdge.PORT32_ORIGINAL32)
"""Edges (pairs of sides) on which all quantities are compared if Transformers is a float32
recording."""


def gates(case: Case, answer: Recorded, ours: Side) -> Iterator[Gate]:
    """Yield the gates of a case on every edge.

    Args:
        case: the case.
        answer: Transformers' results. Only the names of stages and sparse layers are used, and
            whether the results are live.
        ours: the JAX model as a side; only the names of its parameters are used.
    """
    live = answer.kind == "live"
    stages = [name for name in answer.stages if not name.endswith(CHOSEN)]
    forward = (*stages, OUTPUT)
    trained = [name for name in ours.parameters() if not name.endswith(BUFFER)]
    everything = (*forward, *map(Quantity.gradient, trained))
    yield _gate(case, PortEdge.PORT32_ORIGINAL32, WEIGHTS, "unmatched")
    for edge in LIVE if live else RECORDED:
        yield from _edge(case, edge, everything)
    if not live:
        yield from _edge(case, PortEdge.PORT64_ORIGINAL64, RECORDED64)
        for name in forward:
            yield _gate(case, PortEdge.ORIGINAL32_PORT64, name, FORCED)
    for layer in answer.chosen:
        yield _gate(case, PortEdge.PORT32_ORIGINAL32, f"{layer}.chosen", "expert_flips")
    for edge in tuple(PortEdge)[1 : 4 if live else 2]:
        for name in everything:
            yield _gate(case, edge, name, POOLED)


def _edge(case: Case, edge: PortEdge, names: tuple[str, ...]) -> Iterator[Gate]:
    for name in names:
        yield _gate(case, edge, name)
        if name == LOGITS:
            yield _gate(case, edge, name, "top1_flips")


def _gate(case: Case, edge: PortEdge, name: str, metric: str = "rel_l2") -> Gate:
    return Gate(SUBJECT, case.title, str(edge), Quantity(name).kind.value, str(name), metric)
