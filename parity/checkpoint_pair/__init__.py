"""Two checkpoints from outside, compared on a text: whole, or layer by layer.

`files` opens and compares what is stored, `triangle` the models if they fit, `Walk` the layers one
by one if they do not.
"""

from parity.checkpoint_pair.files import Stored, WeightRow, converted, open_checkpoint
from parity.checkpoint_pair.layerwise import Outcome, Walk
from parity.checkpoint_pair.whole_model import triangle

__all__ = [
    "Outcome",
    "Stored",
    "Walk",
    "WeightRow",
    "converted",
    "open_checkpoint",
    "triangle",
]
