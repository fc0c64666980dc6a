"""Where a NaN came from: flags by name inside jit, and a replay that finds the line.

`watched_loss` is cheap enough to leave on; `locate` takes apart the step it complains of.
"""

from stability.nonfinite.flags import (
    broken,
    finite_findings,
    finite_flags,
    in_order,
    watched_loss,
    with_intermediate_flags,
)
from stability.nonfinite.replay import Origin, locate, locate_findings

__all__ = [
    "Origin",
    "broken",
    "finite_findings",
    "finite_flags",
    "in_order",
    "locate",
    "locate_findings",
    "watched_loss",
    "with_intermediate_flags",
]
