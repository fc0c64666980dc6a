"""Comparison of a port with its original: two programs that should compute the same thing.

`compare` takes the two programs, pairs their parameters and stages (named intermediates) by value,
and derives the tolerances.
"""

from parity.port.compare import Port, PortError, compare
from parity.port.correspondence import Correspondence
from parity.port.report import Report

__all__ = ["Correspondence", "Port", "PortError", "Report", "compare"]
