"""Planted parallel bugs, which the mesh edge must find and locate.

A fault is a named patch of one exchange of a small sharded program. Both sides have the patch, and
only the mesh is affected. Source: docs/sharding.md "Planted bugs".
"""

from __future__ import annotations

from parity.faults.fault import unique
from tests.parity.mesh.faults.catalogue import experts, sequence, tensor, training
from tests.parity.mesh.faults.fault import Family, MeshDetection, MeshFault, detect

FAULTS = unique(
    [fault for module in (training, sequence, tensor, experts) for fault in module.FAULTS]
)

__all__ = ["FAULTS", "Family", "MeshDetection", "MeshFault", "by_name", "detect"]


def by_name(name: str) -> MeshFault:
    """Return the fault called `name`.

    Raises:
        ValueError: there is no such fault; the message lists all.
    """
    for fault in FAULTS:
        if fault.name == name:
            return fault
    raise ValueError(f"no mesh fault {name!r}; there are {', '.join(f.name for f in FAULTS)}.")
