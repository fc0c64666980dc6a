"""Former name of the module `parity.megalodon.intermediates`, kept for existing imports."""

from parity.megalodon.intermediates import *  # noqa: F403
from parity.megalodon.intermediates import BLOCK_INTERMEDIATES as BLOCK_TAPS  # noqa: F401
from parity.megalodon.intermediates import Intermediate as Tap  # noqa: F401
