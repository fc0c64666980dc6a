"""Where a difference starts: the first stage, in order of computation, that breaks its tolerance.

Source: spec/parity.md "First divergence".
"""

from __future__ import annotations

from collections.abc import Iterable

from parity.results import Measurement, Verdict


def first_divergence(measurements: Iterable[Measurement]) -> Measurement | None:
    """Return the earliest failing or not comparable stage, or the first failure without a stage.

    The measurements should belong to one case and one edge: stages of different cases do not order.
    """
    bad = [m for m in measurements if m.verdict in (Verdict.FAIL, Verdict.NOT_COMPARABLE)]
    return min(bad, key=lambda m: (m.stage < 0, m.stage), default=None)
