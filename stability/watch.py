"""Former module name of `stability.storage.frozen_watch`, kept for existing imports."""

from stability.storage.frozen_watch import *  # noqa: F403
