"""Error of every stage of a case, in the run as a whole and when fed the oracle's values.

Source: docs/parity.md "First divergence".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from parity.engine.measure.bounds import bound_from, rule
from parity.engine.measure.deviation import Worst, worst_elements
from parity.engine.measure.localize import Stage
from parity.engine.measure.measurement import Kind
from parity.engine.measure.metrics import relative_l2
from parity.engine.measure.where import culprits, where
from parity.megalodon.cases import Case
from parity.megalodon.edges import MegalodonEdge
from parity.megalodon.intermediates import axes_of
from parity.megalodon.noise_floors import forced_floors, forward_truth
from parity.megalodon.runner import JaxSubject
from parity.megalodon.tolerance_table import TABLE


@dataclass(frozen=True)
class Account:
    """Errors of all stages of a case, in order of computation."""

    case: Case
    dtype: str
    """Dtype that the JAX model ran in: "float64" or "float32"."""
    stages: tuple[Stage, ...]
    worst: Worst | None
    """Element of `culprit` with the largest error when that stage is fed the oracle's values; None
    if every stage is right."""
    where: str = ""
    """Description of the elements of `culprit` that make its error exceed the tolerance when the
    stage is fed the oracle's values; empty if every stage is right."""

    @property
    def culprit(self) -> Stage | None:
        """The first stage that is wrong when fed the oracle's values; None if all are right."""
        return next((stage for stage in self.stages if stage.broken), None)

    @property
    def carried(self) -> tuple[Stage, ...]:
        """Stages that are right when fed the oracle's values, and wrong only in the free run, where
        their inputs are wrong."""
        return tuple(s for s in self.stages if not s.broken and not s.free <= s.tolerance)


def account(case: Case, dtype: str = "float64") -> Account:
    """Run the JAX model on a case twice, and compare every stage with the oracle.

    The first run is free: each stage gets what the model computed before it. In the second run each
    stage is forced: the stage gets the oracle's values of all earlier stages.

    Args:
        case: a case without cuts; a stream has states, not intermediates.
        dtype: "float64" tests whether the mathematics is the same; "float32" whether rounding
            errors are within the calibrated noise floors (ten more runs of the oracle).

    Raises:
        ValueError: the case is a stream.
    """
    if case.cuts:
        raise ValueError(
            f"case {case.name} is a cached stream: only its states are compared, not its stages. "
            "Use a case of one call with the same configuration, such as case 'plain'."
        )
    subject, exact = JaxSubject(dtype), forward_truth(case)
    free, forced = subject.intermediates(case), subject.intermediates(case, exact)
    floors = {} if dtype == "float64" else forced_floors(case)
    edge = MegalodonEdge.JAX64_ORACLE if dtype == "float64" else MegalodonEdge.JAX32_ORACLE
    found = tuple(
        Stage(
            name,
            relative_l2(free[name], exact[name]),
            relative_l2(forced[name], exact[name]),
            bound_from(rule(TABLE, edge, Kind.BLOCK), floors.get(name, math.nan)),
        )
        for name in exact
    )
    told = Account(case, dtype, found, None)
    if told.culprit is None:
        return told
    name = told.culprit.name
    first, *_ = worst_elements(forced[name], exact[name], 1)
    wrong = culprits(forced[name], exact[name], told.culprit.tolerance)
    return replace(told, worst=first, where=where(wrong, axes_of(name, case.config), case.valid))
