"""`stability.nonfinite.replay` under the name it had: programs import it from here."""

from stability.nonfinite.replay import *  # noqa: F403
