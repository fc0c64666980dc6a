"""Training runs of Megalodon and of MLA-MoE, which nightly runs compare over meshes."""

from parity.mesh.subjects.megalodon import megalodon
from parity.mesh.subjects.mla_moe import mla_moe

__all__ = ["megalodon", "mla_moe"]
