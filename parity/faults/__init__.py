"""Planted porting bugs, which the comparison must find and locate.

A fault is a small named patch of the JAX model, with a witness case and the quantity that must be
reported first there. Source: docs/parity.md "Faults".
"""

from __future__ import annotations

from collections.abc import Sequence

from parity.faults.catalogue import (
    activations,
    attention,
    caches,
    cema,
    conversion,
    gradients,
    loss,
    norms,
    optimiser,
    packed,
    rings,
    rope,
    runtime,
    timenorm,
    wiring,
)
from parity.faults.fault import Family, Fault, Patch, unique

_FAMILIES = (
    conversion,
    timenorm,
    norms,
    activations,
    wiring,
    rope,
    attention,
    cema,
    caches,
    rings,
    packed,
    loss,
    gradients,
    optimiser,
    runtime,
)
FAULTS = unique([fault for module in _FAMILIES for fault in module.FAULTS])

__all__ = ["FAULTS", "Family", "Fault", "Patch", "by_name", "select"]


def by_name(name: str) -> Fault:
    """Return the fault called `name`.

    Raises:
        ValueError: there is no such fault; the message lists all.
    """
    for fault in FAULTS:
        if fault.name == name:
            return fault
    raise ValueError(f"no fault {name!r}; there are {', '.join(f.name for f in FAULTS)}.")


def select(names: Sequence[str] = (), family: str | None = None) -> tuple[Fault, ...]:
    """Return the faults with these names, those of a family, or all.

    Raises:
        ValueError: a fault or the family does not exist, or no fault matches both.
    """
    chosen = tuple(map(by_name, names)) or FAULTS
    if family is None:
        return chosen
    if family.lower() not in {f.value.lower() for f in Family}:
        raise ValueError(f"no family {family!r}; there are {', '.join(Family)}.")
    chosen = tuple(fault for fault in chosen if fault.family.value.lower() == family.lower())
    if not chosen:
        raise ValueError(f"none of {', '.join(names)} is of the family {family!r}.")
    return chosen
