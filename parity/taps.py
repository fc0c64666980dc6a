"""`parity.megalodon.intermediates` under the name it had: programs import it from here."""

from parity.megalodon.intermediates import *  # noqa: F403
