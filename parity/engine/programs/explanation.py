"""Explanation of a case that fails: where its difference starts, for the page and the terminal.

Source: docs/parity.md "From a stage to a line".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from parity.engine.measure.deviation import Worst
from parity.engine.measure.localize import Stage
from parity.engine.programs.source_lines import Line

NOTE = 400
"""Largest number of characters of a note."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of a case; `quantity` is empty if the case passes."""

    case: str
    edge: str
    """Edge on which the stages were compared."""
    quantity: str = ""
    """Root cause: the first stage that is wrong on correct inputs. If there is none, the first
    wrong quantity."""
    value: float = math.nan
    """Relative L2 error of `quantity`; for a stage, on the oracle's inputs."""
    tolerance: float = math.nan
    meaning: str = ""
    """Interpretation for a person, in sentences."""
    stages: tuple[Stage, ...] = ()
    """Stages in order of computation; empty for a stream or trajectory."""
    worst: Worst | None = None
    """Element of `quantity` with the largest error, if that is a stage."""
    parameters: tuple[str, ...] = ()
    """Parameters used by that stage, by torch name."""
    note: str = ""
    """Note of the comparison, such as a mismatch of shapes."""
    where: str = ""
    """Elements of the stage that exceed its tolerance on correct inputs (`engine.where`)."""
    lines: tuple[Line, ...] = ()
    """Source lines that make the stage wrong, the most likely first."""

    @property
    def holds(self) -> bool:
        """Whether nothing diverges."""
        return not self.quantity

    @property
    def culprit(self) -> Stage | None:
        """The stage that is wrong on correct inputs; None if every stage is correct."""
        return next((s for s in self.stages if s.broken and s.name == self.quantity), None)

    @property
    def also_broken(self) -> tuple[str, ...]:
        """Other stages that are wrong on correct inputs."""
        return tuple(s.name for s in self.stages if s.broken and s.name != self.quantity)

    @property
    def carried(self) -> int:
        """Number of stages that are wrong only because of their inputs."""
        return sum(not s.broken and not s.free <= s.tolerance for s in self.stages)
