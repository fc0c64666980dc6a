"""Faults: bugs that are planted in the JAX model, and which the comparison must find and locate.

A fault is a small named patch. Each has a witness (the case to run) and the quantity that must be
reported there as the first wrong one. Source: docs/parity.md "Faults".
"""

from __future__ import annotations

from collections.abc import Sequence

from parity.faults.catalogue import FOLDER, faults_of
from parity.faults.demonstration import DEMONSTRATION
from parity.faults.fault import Family, Fault, Patch

FAULTS = faults_of()
"""All faults of the catalogue; in an installed wheel, only the demonstration's."""

__all__ = ["DEMONSTRATION", "FAULTS", "Family", "Fault", "Patch", "absent", "by_name", "select"]


def absent() -> str:
    """Return a sentence that says where the faults are that this installation lacks.

    The sentence is "" in a checkout, which has all faults.
    """
    if FAULTS != (DEMONSTRATION,):
        return ""
    return f"The other faults are in {FOLDER} of a checkout, and not in an installed package."


def by_name(name: str) -> Fault:
    """Return the fault called `name`.

    Raises:
        ValueError: there is no such fault; the message lists the names of all.
    """
    for fault in FAULTS:
        if fault.name == name:
            return fault
    names = ", ".join(fault.name for fault in FAULTS)
    raise ValueError(f"there is no fault {name!r}; choose one of {names}. {absent()}".rstrip())


def select(names: Sequence[str] = (), family: str | None = None) -> tuple[Fault, ...]:
    """Return the faults called `names` that belong to a family.

    Args:
        names: names of faults; empty: all.
        family: a value of `Family`, in upper or lower case; None: any family.

    Raises:
        ValueError: a fault or the family does not exist, or no named fault is of that family.
    """
    chosen = tuple(map(by_name, names)) or FAULTS
    if family is None:
        return chosen
    if family.lower() not in {f.value.lower() for f in Family}:
        raise ValueError(
            f"there is no family {family!r} of faults; choose one of {', '.join(Family)}."
        )
    chosen = tuple(fault for fault in chosen if fault.family.value.lower() == family.lower())
    if not chosen:
        raise ValueError(
            f"none of {', '.join(names)} is of the family {family!r}; leave out the family or the "
            "names."
        )
    return chosen
