"""The engine: named arrays in, measurements out. It knows no model, not even ours.

`compare` holds two sides to their bounds, `localize` says where a difference starts,
`rounding_noise` what rounding alone does, `instrument` names the intermediates of a function.
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
