"""Largest error / tolerance per group of gates (measurements with a tolerance), for other tools.

Source: docs/commands.md "For other tools".
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from parity.engine.measure.measurement import Measurement, Verdict
from reports.verdict.replays import suite_of

Group = tuple[str, str, str, str]
"""Suite, case, edge and kind of quantity of a group of gates."""


def largest_shares(measurements: Iterable[Measurement]) -> dict[Group, float]:
    """Return the largest share of its tolerance that a gate uses, by suite, case, edge and kind of
    quantity of the gates.

    The share is infinite for a gate whose value or tolerance is not finite, and for a gate that
    does not hold although its value is within the tolerance, such as one that is not comparable.
    """
    shares: dict[Group, float] = {}
    for m in measurements:
        if m.verdict is Verdict.INFO:
            continue
        group = (suite_of(m), m.case, m.edge, m.kind.value)
        shares[group] = max(_share(m), shares.get(group, 0.0))
    return shares


def _share(m: Measurement) -> float:
    """Return the share of its tolerance that a gate uses; above 1 if it does not hold."""
    measured = math.isfinite(m.value) and math.isfinite(m.tolerance)
    # A failed gate may have a value below its tolerance: tensors of different shapes have no
    # distance, and their stored 0 would look like equality.
    if not measured or (m.verdict is not Verdict.PASS and m.fraction <= 1.0):
        return math.inf
    return m.fraction
