"""Former module name of `stability.nonfinite.replay`, kept for existing imports."""

from stability.nonfinite.replay import *  # noqa: F403
