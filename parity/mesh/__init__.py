"""Comparison of any jitted JAX function on one device with the same function on device meshes.

`compare_meshes` reports whether the results differ, at which stage the difference starts, and which
collectives that stage is computed from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalodon_jax.lazy import on_first_use

if TYPE_CHECKING:
    from parity.mesh.collectives import Collective
    from parity.mesh.comparison import compare_meshes, layouts, mesh_name
    from parity.mesh.placement import out_of_sync
    from parity.mesh.report import MeshReport, MeshResult
    from parity.mesh.step import MeshComparison, mesh_of

__all__ = [
    "Collective",
    "MeshComparison",
    "MeshReport",
    "MeshResult",
    "compare_meshes",
    "layouts",
    "mesh_name",
    "mesh_of",
    "out_of_sync",
]

_ROOMS = {
    "parity.mesh.collectives": ("Collective",),
    "parity.mesh.comparison": (
        "compare_meshes",
        "layouts",
        "mesh_name",
    ),
    "parity.mesh.placement": ("out_of_sync",),
    "parity.mesh.report": (
        "MeshReport",
        "MeshResult",
    ),
    "parity.mesh.step": (
        "MeshComparison",
        "mesh_of",
    ),
}
__getattr__, __dir__ = on_first_use(__name__, _ROOMS)
