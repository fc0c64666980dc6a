"""`stability.storage.diagnose` under the name it had: programs import it from here."""

from stability.storage.diagnose import *  # noqa: F403
