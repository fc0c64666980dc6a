"""`stability.storage.frozen_watch` under the name it had: programs import it from here."""

from stability.storage.frozen_watch import *  # noqa: F403
