"""`stability.storage.narrow_optimisers` under the name it had: programs import it from here."""

from stability.storage.narrow_optimisers import *  # noqa: F403
