"""Comparison of a user's torch and JAX checkpoint on a text: whole, or layer by layer.

`files` opens checkpoints and compares stored values. `triangle` compares models that fit into
memory; `Walk` compares larger ones layer by layer. `deployment` writes a folder for megalodon-hf
and verifies it.
"""

from parity.checkpoint_pair.deployment import Export, ExportError, export_pretrained
from parity.checkpoint_pair.files import Stored, WeightRow, converted, open_checkpoint
from parity.checkpoint_pair.layerwise import LayerwiseResult, Walk
from parity.checkpoint_pair.whole_model import triangle

__all__ = [
    "Export",
    "ExportError",
    "LayerwiseResult",
    "Stored",
    "Walk",
    "WeightRow",
    "converted",
    "export_pretrained",
    "open_checkpoint",
    "triangle",
]
