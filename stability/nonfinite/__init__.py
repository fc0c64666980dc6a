"""Search for the root cause of NaN and infinity in a training step.

`watched_loss` makes a training step that also returns whether each named value is finite; it is
cheap enough for every step. `locate` replays a failed step and finds the operation and source line
that made a value not finite.
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
