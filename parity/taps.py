"""`parity.megalodon.taps` under the name it had: programs import it from here."""

from parity.megalodon.taps import *  # noqa: F403
