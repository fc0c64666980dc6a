"""A stage, free and forced, as a row of a table: of a port and of a case of the triangle alike.

Pure functions from numbers to plain data. Source: docs/parity.md "First divergence".
"""

from __future__ import annotations

import math
from typing import Any

from reports.text import label, number, share

SHARES = (-4.0, -3.0, -2.0, -1.0, -0.3, 0.0)
"""log10 of a share of a tolerance up to which a colour of the heat map reaches."""


def stage_row(
    name: str, free: float, forced: float, tolerance: float, here: bool, original: str = ""
) -> dict[str, Any]:
    """Return what the page shows of one stage.

    Args:
        name: of the stage.
        free: its relative L2 error, everything before it computed by the side itself.
        forced: the same, fed the right values.
        tolerance: the largest `forced` that passes.
        here: whether the difference starts at it.
        original: what it is called on the other side, where that is another name.
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
    """Return the colour of a share of a tolerance, as the heat map has it."""
    if not of <= 1.0:
        return "fail"
    level = math.log10(of) if of > 0 else -math.inf
    return f"h{next(i for i, top in enumerate(SHARES) if level <= top)}"
