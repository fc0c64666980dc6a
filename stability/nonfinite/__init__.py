"""Where a NaN came from: flags by name inside jit, and a replay that finds the line."""

from stability.nonfinite.flags import broken, in_order, watched_loss
from stability.nonfinite.replay import locate

__all__ = ["broken", "in_order", "locate", "watched_loss"]
