"""Subjects compared over meshes every night: training runs of Megalodon and of MLA-MoE."""

from parity.mesh.subjects.megalodon import megalodon
from parity.mesh.subjects.mla_moe import mla_moe

__all__ = ["megalodon", "mla_moe"]
