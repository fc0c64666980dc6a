"""What a planted parallel bug is, and what the mesh edge says of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from parity.faults.fault import Patch, Plant, around
from parity.mesh.faults.witnesses import experts, sequence, tensor, training
from parity.mesh.faults.witnesses.experts import Experts
from parity.mesh.faults.witnesses.sequence import Sequence as SequenceParallel
from parity.mesh.faults.witnesses.tensor import Tensor
from parity.mesh.faults.witnesses.training import Training
from parity.mesh.report import MeshResult
from parity.mesh.step import MeshComparison

_WITNESSES = {
    Training: training.comparison,
    SequenceParallel: sequence.comparison,
    Tensor: tensor.comparison,
    Experts: experts.comparison,
}


class Family(StrEnum):
    """What a parallel bug is about (docs/meshes.md "Planted bugs")."""

    GRADIENTS = "gradients"
    COUNTS = "counts"
    """Means, masks and rows that were filled in."""
    OPTIMISER = "optimiser"
    PARAMETERS = "parameters"
    """Those that are gathered, saved or permuted."""
    STATES = "states"
    """What a shard of a text hands to the next one."""
    STATISTICS = "statistics"
    """Of norms whose tokens or channels lie on several devices."""
    VOCABULARY = "vocabulary"
    HEADS = "heads"
    """Heads and channels."""
    DROPOUT = "dropout"
    PRECISION = "precision"
    EXPERTS = "experts"


@dataclass(frozen=True, slots=True)
class MeshFault:
    """One bug: how people make it, where it is planted, and where it must first show."""

    family: Family
    name: str
    how: str
    stage: str
    """The first stage that must be reported."""
    patch: Patch
    collective: tuple[str, tuple[str, ...]] | None = None
    """Operation and axes of a collective that must be named; None asks for none."""

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Context in which the witness has this bug. Each comparison traces it anew."""
        with self.patch.applied():
            yield

    @property
    def witness(self) -> MeshComparison:
        """The program it is planted in."""
        return witness_of(self.patch.owner)


@dataclass(frozen=True, slots=True)
class MeshDetection:
    """What became of one fault."""

    fault: MeshFault
    result: MeshResult

    @property
    def detected(self) -> bool:
        """Whether anything was reported."""
        return not self.result.holds

    @property
    def localised(self) -> bool:
        """Whether what was reported is where the fault is, with the collective it must name."""
        named = {(c.operation, c.axes) for c in self.result.suspects}
        wanted = self.fault.collective
        return self.result.start == self.fault.stage and (wanted is None or wanted in named)


@cache
def witness_of(owner: Any) -> MeshComparison:
    """Return the program whose exchanges an owner is."""
    return _WITNESSES[owner]()


def detect(fault: MeshFault) -> MeshDetection:
    """Plant a fault and compare with one device, which has it too, in float64."""
    with fault.planted():
        report = fault.witness.run(precisions=("float64",), reorder=False, forced=False)
    return MeshDetection(fault, report.results[0])


def fault(
    family: Family,
    name: str,
    how: str,
    plant: Plant,
    *,
    stage: str,
    owner: Any,
    attribute: str,
    collective: tuple[str, tuple[str, ...]] | None = None,
) -> MeshFault:
    """Return the fault of one exchange of one witness."""
    return MeshFault(family, name, how, stage, Patch(owner, attribute, plant), collective)


def instead(faulty: Any) -> Plant:
    """Return the plant of a function that stands in place of an exchange and does without it."""
    return around(lambda healthy, *args: faulty(*args))


def unique(faults: Sequence[MeshFault]) -> tuple[MeshFault, ...]:
    """Return the faults as a tuple.

    Raises:
        ValueError: two have one name.
    """
    names = [fault.name for fault in faults]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"mesh faults named twice: {', '.join(sorted(twice))}.")
    return tuple(faults)
