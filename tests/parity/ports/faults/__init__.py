"""Bugs planted in Flax models of Transformers at run time, and changes that are none."""

from __future__ import annotations

from tests.parity.ports.faults import (
    activations,
    attention,
    masks,
    norms,
    parameters,
    positions,
    precision,
    wiring,
)
from tests.parity.ports.faults.controls import CONTROLS
from tests.parity.ports.faults.fault import Family, PortFault

FAULTS = (
    *norms.FAULTS,
    *activations.FAULTS,
    *attention.FAULTS,
    *masks.FAULTS,
    *positions.FAULTS,
    *wiring.FAULTS,
    *parameters.FAULTS,
    *precision.FAULTS,
)

__all__ = ["CONTROLS", "FAULTS", "Family", "PortFault"]
