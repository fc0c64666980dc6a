"""Errors of one stage as a row of a table, for users' ports and for Megalodon's cases.

Pure functions from numbers to plain data. Source: docs/parity.md "First divergence".
"""

from __future__ import annotations

import math
from typing import Any

from reports.text import label, number, share

SHARES = (-4.0, -3.0, -2.0, -1.0, -0.3, 0.0)
"""Upper limits of the heat map's colour classes h0, h1, ..., as log10 of error / tolerance."""


def stage_row(
    name: str, free: float, forced: float, tolerance: float, here: bool, original: str = ""
) -> dict[str, Any]:
    """Return the data of one stage, a named intermediate of the computation.

    Args:
        name: Name of the stage.
        free: Relative L2 error of the stage, against the original or the oracle, when its inputs
            were computed by its own side.
        forced: The same when it is given the right inputs, those of the original or the oracle.
        tolerance: Largest `forced` that passes.
        here: Whether the difference starts at this stage.
        original: Name of the stage on the other side; "" if equal or unknown.
    """
    of = forced / tolerance if tolerance else (0.0 if forced == 0.0 else math.inf)
    return {
        "name": label(name, 120),
        "original": label(original, 120),
        "free": number(free),
        "forced": number(forced),
        "tolerance": number(tolerance),
        "heat": _heat(of),
        "share": share(of),
        "state": "pass" if forced <= tolerance else "fail",
        "here": here,
    }


def _heat(of: float) -> str:
    """Return the heat map's CSS class for a share of a tolerance; "fail" above 1 or for NaN."""
    if not of <= 1.0:
        return "fail"
    level = math.log10(of) if of > 0 else -math.inf
    return f"h{next(i for i, top in enumerate(SHARES) if level <= top)}"
