"""Contract: the gates (measurements with a tolerance) that a case of Megalodon must report.

The gates follow from the case's configuration and the kind of reference, without running a model:
names of intermediates come from `intermediates`, names of parameters from the weight table.
`parity.megalodon.suite` must measure exactly these gates; a test compares the two. Source:
docs/verdicts.md "Contract".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

from megalodon_jax.weights import weight_table
from parity.engine.measure.contract import Gate
from parity.engine.measure.measurement import Kind
from parity.engine.measure.quantity import GENERATED, LOGITS, LOSS, WEIGHTS, Quantity
from parity.megalodon import DIFFERENCES, SUITE, known_differences, low_precision
from parity.megalodon.cases import Case
from parity.megalodon.edges import MegalodonEdge
from parity.megalodon.intermediates import STATES, stages, trajectory

ALL = "all gates"
"""Value of `quantity` in gates that concern all tensors of a case together."""


@runtime_checkable
class Answers(Protocol):
    """The part of `parity.megalodon.suite.Reference` that the contract needs."""

    kind: str
    """"live" or "recorded"."""

    def gives(self, quantity: str) -> bool:
        """Return whether the reference has a value for this quantity of the oracle."""
        ...


def quantities(case: Case) -> tuple[str, ...]:
    """Return the names of all arrays that JAX model and oracle compute for a case."""
    config = case.config
    parameters = [row.name for row in weight_table(config)]
    if case.steps:
        return trajectory(parameters, case.steps)
    if case.cuts:
        blocks = (f"layers.{i}.{name}" for i in range(config.num_layers) for name in STATES)
        states = map(Quantity.state, (*blocks, *STATES[:3]))
        return (*states, LOGITS, GENERATED)
    forward = stages(config)
    cotangents = map(Quantity.cotangent, forward)
    return (*forward, LOSS, *cotangents, *map(Quantity.gradient, parameters))


def gates(case: Case, reference: Answers) -> Iterator[Gate]:
    """Yield the gates of a case on every edge (pair of compared sides).

    A case that is not compared with megalodon-hf (`Case.has_reference` is False) has gates against
    the oracle only.

    Args:
        case: the case.
        reference: source of megalodon-hf's results; determines which quantities have gates.
    """
    names = quantities(case)
    yield from _edge(case, MegalodonEdge.JAX64_ORACLE, names)
    yield _gate(case, MegalodonEdge.JAX64_ORACLE, ALL, "exact_share")
    yield from _edge(case, MegalodonEdge.JAX32_ORACLE, names)
    yield _gate(case, MegalodonEdge.JAX32_ORACLE, WEIGHTS, "changed_parameters")
    if not case.has_reference:
        return
    given = [name for name in names if reference.gives(name)]
    yield from _edge(case, MegalodonEdge.REFERENCE32_ORACLE, given)
    yield from _edge(case, MegalodonEdge.JAX32_REFERENCE32, given)
    ratios = [name for name in given if Quantity(name).kind in (Kind.LOGITS, Kind.BLOCK)]
    if any(name.startswith(Quantity.gradient("")) for name in given):
        ratios.append(Quantity.gradient("*"))
    for name in ratios:
        yield _gate(case, MegalodonEdge.JAX32_ORACLE, name, "error_over_reference")
    if reference.kind == "live":
        yield _gate(case, MegalodonEdge.REFERENCE32_ORACLE, WEIGHTS, "changed_parameters")
    if case.name in low_precision.CASES:
        for name in given:
            if Quantity(name).kind in (Kind.LOGITS, Kind.BLOCK):
                yield _gate(case, low_precision.OURS, name)
        yield _gate(case, low_precision.OURS, LOGITS, "error_over_autocast")


def known_difference_gates() -> Iterator[Gate]:
    """Yield one gate per known difference (deliberate difference from megalodon-hf)."""
    suite, edge = DIFFERENCES, str(known_differences.EDGE)
    for difference in known_differences.KNOWN_DIFFERENCES:
        yield Gate(suite, suite, edge, Kind.KNOWN_DIFFERENCE.value, difference.id, "seam")


def _edge(case: Case, edge: MegalodonEdge, names: Iterable[str]) -> Iterator[Gate]:
    for name in names:
        tokens = Quantity(name).kind is Kind.TOKENS
        yield _gate(case, edge, name, "disagreement" if tokens else "rel_l2")
        if name == LOGITS:
            yield _gate(case, edge, name, "top1_flips")


def _gate(case: Case, edge: MegalodonEdge, name: str, metric: str = "rel_l2") -> Gate:
    kind = Quantity(name).kind.value
    return Gate(SUITE, case.name, str(edge), kind, str(name), metric)
