"""Planted parallel bugs, and their detection by a mesh comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from parity.faults.fault import Patch, Plant, around
from parity.mesh.report import MeshResult
from parity.mesh.step import MeshComparison
from tests.parity.mesh.faults.witnesses import experts, sequence, tensor, training
from tests.parity.mesh.faults.witnesses.experts import Experts
from tests.parity.mesh.faults.witnesses.sequence import Sequence as SequenceParallel
from tests.parity.mesh.faults.witnesses.tensor import Tensor
from tests.parity.mesh.faults.witnesses.training import Training

_WITNESSES = {
    Training: training.comparison,
    SequenceParallel: sequence.comparison,
    Tensor: tensor.comparison,
    Experts: experts.comparison,
}


class Family(StrEnum):
    """Family of a parallel bug (docs/sharding.md "Planted bugs")."""

    GRADIENTS = "gradients"
    COUNTS = "counts"
    """Means, masks and padding rows."""
    OPTIMISER = "optimiser"
    PARAMETERS = "parameters"
    """Gathered, saved or permuted parameters."""
    STATES = "states"
    """States that a shard of a text passes to the next one."""
    STATISTICS = "statistics"
    """Statistics of norms whose tokens or channels are on several devices."""
    VOCABULARY = "vocabulary"
    HEADS = "heads"
    """Heads and channels."""
    DROPOUT = "dropout"
    PRECISION = "precision"
    EXPERTS = "experts"


@dataclass(frozen=True, slots=True)
class MeshFault:
    """One bug: how it is made, where it is planted, and where it must be found."""

    family: Family
    name: str
    how: str
    stage: str
    """Name of the first stage that must be reported."""
    patch: Patch
    collective: tuple[str, tuple[str, ...]] | None = None
    """Operation and axes of a collective that must be named; None: none is required."""

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Plant this bug in the witness within a context. Each comparison traces it again."""
        with self.patch.applied():
            yield

    @property
    def witness(self) -> MeshComparison:
        """The program in which it is planted."""
        return witness_of(self.patch.owner)


@dataclass(frozen=True, slots=True)
class MeshDetection:
    """Result of a comparison with one planted fault."""

    fault: MeshFault
    result: MeshResult

    @property
    def detected(self) -> bool:
        """Whether the comparison failed."""
        return not self.result.holds

    @property
    def localised(self) -> bool:
        """Whether the reported stage is the fault's, with the required collective."""
        named = {(c.operation, c.axes) for c in self.result.suspects}
        wanted = self.fault.collective
        return self.result.start == self.fault.stage and (wanted is None or wanted in named)


@cache
def witness_of(owner: Any) -> MeshComparison:
    """Return the program to which an owner of exchanges belongs."""
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
    """Build the fault of one exchange of one witness."""
    return MeshFault(family, name, how, stage, Patch(owner, attribute, plant), collective)


def instead(faulty: Any) -> Plant:
    """Return the plant that replaces an exchange by a function of the same arguments."""
    return around(lambda healthy, *args: faulty(*args))
