"""Root causes of NaN and infinity: flags by name inside jit, and a replay that finds the line.

`watched_loss` is cheap enough for every step; `locate` replays a failed step.
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
