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
    """Return the largest share of a tolerance by group; infinite where a value is no number or
    could not be compared.
    """
    shares: dict[Group, float] = {}
    for m in measurements:
        if m.verdict is Verdict.INFO:
            continue
        share = math.inf if math.isnan(m.fraction) or math.isnan(m.value) else m.fraction
        group = (suite_of(m), m.case, m.edge, m.kind.value)
        shares[group] = max(share, shares.get(group, 0.0))
    return shares
