"""Former module name of `stability.recovery.guard`, kept for existing imports."""

from stability.recovery.guard import *  # noqa: F403
