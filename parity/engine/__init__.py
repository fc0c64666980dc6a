"""The engine: turns named arrays into measurements. It knows no model, not even ours.

`compare` checks two sides against their bounds, `localize` finds where a difference starts,
`rounding_noise` measures the effect of rounding alone, `instrument` captures named intermediates.
"""

from parity.engine.bounds import NoiseFloors, Rule
from parity.engine.compare import Arrays, Bounds, Comparison, Work
from parity.engine.deviation import Deviation, Deviations
from parity.engine.edge import Edge
from parity.engine.instrument import capture
from parity.engine.localize import Stage, first_divergence
from parity.engine.measurement import Kind, Measurement, Verdict
from parity.engine.quantity import Quantity, Role, kind_of

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
