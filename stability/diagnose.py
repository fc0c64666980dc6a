"""Former module name of `stability.storage.diagnose`, kept for existing imports."""

from stability.storage.diagnose import *  # noqa: F403
