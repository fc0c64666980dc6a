"""A port and its original, two programs that should compute the same thing.

`compare` is given two sides and finds parameters, stages, truth and bounds by itself; `check` is
given a function whose marks have the names of the original's values.
"""

from parity.port.check import OUTPUT, Arrays, Side, check, digest_of, watched
from parity.port.check import Report as CheckReport
from parity.port.compare import Port, PortError, compare
from parity.port.report import Report

__all__ = [
    "OUTPUT",
    "Arrays",
    "CheckReport",
    "Port",
    "PortError",
    "Report",
    "Side",
    "check",
    "compare",
    "digest_of",
    "watched",
]
