"""Megalodon as a subject: cases, float64 oracle, runner of the JAX model, references, noise floors.

`Suite` compares every case on every edge of the triangle. `intermediates` names the intermediates
that all sides have.
"""

from parity.megalodon.cases import CASES, Case, by_name
from parity.megalodon.edges import MegalodonEdge
from parity.megalodon.known_differences import KNOWN_DIFFERENCES
from parity.megalodon.noise_floors import truth
from parity.megalodon.runner import JaxSubject
from parity.megalodon.suite import Reference, Suite, choose_reference
from parity.megalodon.tolerance_table import TABLE, NoiseFloors

__all__ = [
    "CASES",
    "KNOWN_DIFFERENCES",
    "TABLE",
    "Case",
    "JaxSubject",
    "MegalodonEdge",
    "NoiseFloors",
    "Reference",
    "Suite",
    "by_name",
    "choose_reference",
    "truth",
]
