"""What is compared over meshes every night: Megalodon and MLA-MoE, each a training run."""

from parity.mesh.subjects.megalodon import megalodon
from parity.mesh.subjects.mla_moe import mla_moe

__all__ = ["megalodon", "mla_moe"]
