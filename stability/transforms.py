"""Former module name of `stability.storage.narrow_optimisers`, kept for existing imports."""

from stability.storage.narrow_optimisers import *  # noqa: F403
