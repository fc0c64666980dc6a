"""Two checkpoints from outside, compared on a text: whole, or layer by layer.

`files` opens and compares what is stored, `triangle` the models if they fit, `Walk` the layers one
by one if they do not. `deployment` writes a folder for megalodon-hf and compares it with the model.
"""

from parity.checkpoint_pair.deployment import Export, ExportError, export_pretrained
from parity.checkpoint_pair.files import Stored, WeightRow, converted, open_checkpoint
from parity.checkpoint_pair.layerwise import Outcome, Walk
from parity.checkpoint_pair.whole_model import triangle

__all__ = [
    "Export",
    "ExportError",
    "Outcome",
    "Stored",
    "Walk",
    "WeightRow",
    "converted",
    "export_pretrained",
    "open_checkpoint",
    "triangle",
]
