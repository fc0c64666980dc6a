"""Finds the smallest case that still fails in the same way, for use with a debugger.

The search is greedy, as in property-based testing. Source: docs/parity.md "First divergence".
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from parity.engine.measure.compare import Comparison
from parity.engine.measure.localize import first_divergence
from parity.engine.measure.measurement import Measurement
from parity.engine.measure.quantity import Quantity
from parity.executors.executor import Log
from parity.megalodon.cases import SMALL, Case
from parity.megalodon.edges import MegalodonEdge
from parity.megalodon.intermediates import stages
from parity.megalodon.noise_floors import forward_truth, truth
from parity.megalodon.runner import JaxSubject
from parity.megalodon.tolerance_table import NoiseFloors

EDGE = MegalodonEdge.JAX64_ORACLE
"""Sides whose difference counts as a failure: the float64 JAX model and the oracle."""
LEAST = dict.fromkeys(SMALL, 1) | {"vocab_size": 4, "model_dim": 4, "z_dim": 2}
"""Smallest sizes to try, by field of the configuration. LayerNorm over fewer than 4 features
(`model_dim`) would be nearly constant."""


def failure(case: Case, *, forward_only: bool = False) -> Measurement | None:
    """Return the first divergence of the float64 JAX model from the oracle; None if they agree.

    Args:
        case: any case.
        forward_only: compare only the intermediates of a forward pass, which is faster; for cases
            without cuts and steps.
    """
    comparison = Comparison(case.work, EDGE, NoiseFloors({}), "float64")
    subject = JaxSubject("float64")
    if forward_only:
        return first_divergence(comparison.run(subject.intermediates(case), forward_truth(case)))
    return first_divergence(comparison.run(subject.run(case), truth(case)))


def shrink(case: Case, report: Log) -> tuple[Case, Measurement]:
    """Return the smallest case found that fails at the same intermediate, and its first divergence.

    "Same" means the same name in any layer. Otherwise the search could move to another bug.

    Args:
        case: a failing case.
        report: receives a line for each smaller case that still fails.

    Raises:
        ValueError: the case does not fail, or is a trajectory.
    """
    if case.steps:
        raise ValueError(
            f"case {case.name} is a training trajectory, which cannot be shrunk: its divergence "
            "starts in a gradient or in the optimiser. Shrink a case without steps, like 'plain'."
        )
    found = failure(case)
    if found is None:
        raise ValueError(
            f"case {case.name} holds on {EDGE}: there is nothing to shrink. "
            "Plant a fault with --fault, or name a case that fails."
        )
    wanted, forward_only = (
        Quantity(found.quantity).stage,
        found.quantity in stages(case.config) and not case.cuts,
    )
    # Changes after which the case held; they are not tried again on smaller cases.
    held: set[str] = set()
    while True:
        for change, candidate in _candidates(case):
            # A change without effect would fail again forever.
            if change in held or candidate == case:
                continue
            again = None
            # Some sizes must be multiples of others; an invalid configuration raises ValueError.
            with contextlib.suppress(ValueError):
                again = failure(candidate, forward_only=forward_only)
            if again is not None and Quantity(again.quantity).stage == wanted:
                report(f"  {change}: still fails at {again.quantity}")
                case, found = candidate, again
                break
            held.add(change)
        else:
            return case, found


def _candidates(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield changes, as text, and the smaller case that each gives; largest reductions first."""
    sizes = {**SMALL, **case.overrides}
    if case.checkpoint is None and sizes != sizes | LEAST:
        least = dataclasses.replace(case, batch_size=1, overrides={**case.overrides, **LEAST})
        yield "everything smallest", least
        yield "1 layer", _override(case, "num_layers", 1)
    if case.batch_size > 1:
        yield "1 row", dataclasses.replace(case, batch_size=1)
    yield from _shorter(case)
    if case.padding != "none":
        yield "no padding", dataclasses.replace(case, padding="none")
    if case.checkpoint is not None:
        return
    for field in SMALL:
        for size in _below(sizes[field], LEAST[field]):
            yield f"{field} = {size}", _override(case, field, size)


def _shorter(case: Case) -> Iterator[tuple[str, Case]]:
    if case.cuts:
        if len(case.cuts) > 1:
            fewer = case.cuts[:-1]
            yield f"{len(fewer)} calls", dataclasses.replace(case, cuts=fewer, length=sum(fewer))
        if max(case.cuts) > 1:
            shorter = tuple(max(1, tokens // 2) for tokens in case.cuts)
            half = dataclasses.replace(case, cuts=shorter, length=sum(shorter))
            yield f"calls of {max(shorter)}", half
    else:
        for length in _below(case.length, 1):
            yield f"{length} tokens", dataclasses.replace(case, length=length)


def _below(value: int, least: int) -> Iterator[int]:
    tried = {least, value // 2, value - 1}
    yield from sorted(size for size in tried if least <= size < value)


def _override(case: Case, field: str, size: Any) -> Case:
    return dataclasses.replace(case, overrides={**case.overrides, field: size})
