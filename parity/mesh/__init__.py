"""Meshes: the same jitted function on one device and on many, for any JAX function.

`compare_meshes` says whether they part, at which stage, and which collective stands there.
"""

from parity.mesh.collectives import Collective
from parity.mesh.comparison import compare_meshes, layouts, mesh_name
from parity.mesh.placement import out_of_sync
from parity.mesh.report import MeshReport, MeshResult

__all__ = [
    "Collective",
    "MeshReport",
    "MeshResult",
    "compare_meshes",
    "layouts",
    "mesh_name",
    "out_of_sync",
]
