"""The engine: turns named arrays into measurements. It knows no model, not even ours.

`compare` checks two sides against their bounds, `localize` finds where a difference starts,
`rounding_noise` measures the effect of rounding alone, `instrument` captures named intermediates.
"""

from parity.engine.measure.arrays import Arrays
from parity.engine.measure.bounds import NoiseFloors, Rule
from parity.engine.measure.compare import Bounds, Comparison, Work
from parity.engine.measure.deviation import Deviation, Deviations
from parity.engine.measure.edge import Edge
from parity.engine.measure.localize import Stage, first_divergence
from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.engine.measure.quantity import Quantity, Role, kind_of
from parity.engine.programs.instrument import capture

__all__ = [
    "Arrays",
    "Bounds",
    "Comparison",
    "Deviation",
    "Deviations",
    "Edge",
    "Kind",
    "Measurement",
    "NoiseFloors",
    "Quantity",
    "Role",
    "Rule",
    "Stage",
    "Verdict",
    "Work",
    "capture",
    "first_divergence",
    "kind_of",
]
