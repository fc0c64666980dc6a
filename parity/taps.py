"""`parity.megalodon.intermediates` under the name it had: programs import it from here."""

from parity.megalodon.intermediates import *  # noqa: F403
from parity.megalodon.intermediates import BLOCK_INTERMEDIATES as BLOCK_TAPS  # noqa: F401
from parity.megalodon.intermediates import Intermediate as Tap  # noqa: F401
