"""Planted porting bugs: the harness is judged by whether it finds each and names where it starts.

A fault is a small named patch of the JAX model, a witness among the cases, and the quantity that
must first be reported there. Source: docs/parity.md "Faults".
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
        ValueError: there is none; the message lists those there are.
    """
    for fault in FAULTS:
        if fault.name == name:
            return fault
    raise ValueError(f"no fault {name!r}; there are {', '.join(f.name for f in FAULTS)}.")


def select(names: Sequence[str] = (), family: str | None = None) -> tuple[Fault, ...]:
    """Return the faults called `names`, or those of a family by its name, or all.

    Raises:
        ValueError: a fault or the family does not exist, or the two have nothing in common.
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
