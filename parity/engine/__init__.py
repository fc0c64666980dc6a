"""The engine: named arrays in, measurements out. It knows no model, not even ours.

`compare` holds two sides to their bounds, `localize` says where a difference starts,
`rounding_noise` what rounding alone does, `instrument` names the intermediates of a function.
"""

from parity.engine.compare import Arrays, Bounds, Comparison, Work, kind_of
from parity.engine.deviation import Deviation, Deviations
from parity.engine.instrument import capture
from parity.engine.localize import Stage, first_divergence
from parity.engine.measurement import Kind, Measurement, Verdict

__all__ = [
    "Arrays",
    "Bounds",
    "Comparison",
    "Deviation",
    "Deviations",
    "Kind",
    "Measurement",
    "Stage",
    "Verdict",
    "Work",
    "capture",
    "first_divergence",
    "kind_of",
]
