"""`stability.recovery.guard` under the name it had: programs import it from here."""

from stability.recovery.guard import *  # noqa: F403
