"""Explanation of a failing case: the stage and source line where its difference starts, for the
page and the terminal.

Source: docs/parity.md "From a stage to a line".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from parity.engine.measure.deviation import Worst
from parity.engine.measure.localize import Stage
from parity.engine.programs.source_lines import Line

NOTE = 400
"""Largest number of characters of `Explanation.note`."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of a case; `quantity` is empty if the case passes."""

    case: str
    """Name of the case."""
    edge: str
    """The two runs whose stages (named intermediates) were compared, as `left:right`."""
    quantity: str = ""
    """Root cause: the first stage that is wrong given correct inputs. If there is none, the first
    quantity that fails."""
    value: float = math.nan
    """Relative L2 error of `quantity`; of the `culprit`, when computed from the oracle's inputs
    (forced). For generated tokens, the metric `disagreement`. NaN if a stream raised an error."""
    tolerance: float = math.nan
    """Largest `value` that passes."""
    meaning: str = ""
    """Interpretation for the reader, in sentences."""
    stages: tuple[Stage, ...] = ()
    """Stages in order of computation; empty for a stream (token-by-token run) or a training
    trajectory."""
    worst: Worst | None = None
    """Element of the `culprit` with the largest error when computed from the oracle's inputs
    (forced); None without a culprit."""
    parameters: tuple[str, ...] = ()
    """Names that the parameters of the wrong stage have in the torch model. That stage is
    `quantity`; for a stream, it may be another one, which `meaning` names."""
    note: str = ""
    """Note of the comparison, such as a mismatch of shapes."""
    where: str = ""
    """Description of which elements of `quantity` exceed its tolerance given correct inputs."""
    lines: tuple[Line, ...] = ()
    """Source lines that make the stage wrong, the most likely first."""

    @property
    def holds(self) -> bool:
        """Whether the case passes."""
        return not self.quantity

    @property
    def culprit(self) -> Stage | None:
        """The stage named by `quantity`, if it is wrong given correct inputs, else None."""
        return next((s for s in self.stages if s.broken and s.name == self.quantity), None)

    @property
    def also_broken(self) -> tuple[str, ...]:
        """Names of the stages other than `quantity` that are wrong given correct inputs."""
        return tuple(s.name for s in self.stages if s.broken and s.name != self.quantity)

    @property
    def carried(self) -> int:
        """Number of stages that are wrong only because of their inputs."""
        return sum(not s.broken and not s.free <= s.tolerance for s in self.stages)
