"""How close gates come to their tolerances, as other tools draw it: the largest share by group.

Source: docs/commands.md "For other tools".
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from parity.engine.measurement import Measurement, Verdict
from reports.verdict.document import suite_of

Group = tuple[str, str, str, str]
"""Suite, case, edge, kind of quantity."""


def largest_shares(measurements: Iterable[Measurement]) -> dict[Group, float]:
    """Return the largest share of a tolerance by group; infinite for a gate that failed without
    exceeding its tolerance: a NaN, a comparison that was not possible, a bound that is not finite.
    """
    shares: dict[Group, float] = {}
    for m in measurements:
        if m.verdict is Verdict.INFO:
            continue
        group = (suite_of(m), m.case, m.edge, m.kind.value)
        shares[group] = max(_share(m), shares.get(group, 0.0))
    return shares


def _share(m: Measurement) -> float:
    """Return the share of its tolerance that a gate uses, above 1 unless the gate holds."""
    measured = math.isfinite(m.value) and math.isfinite(m.tolerance)
    # A gate that does not hold may have a value below its tolerance: two tensors of other shapes
    # have no distance, and a stored 0 would draw them as equal.
    if not measured or (m.verdict is not Verdict.PASS and m.fraction <= 1.0):
        return math.inf
    return m.fraction
