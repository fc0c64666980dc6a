"""Comparison of a port with its original: two programs that should compute the same thing.

`compare` takes the two programs, pairs their parameters and stages (named intermediates) by value,
and derives the tolerances. `adopt` converts the original's parameters for the port.
"""

from parity.port.adoption import Adoption, adopt
from parity.port.compare import Port, PortError, compare
from parity.port.correspondence import Correspondence
from parity.port.report import Report

__all__ = ["Adoption", "Correspondence", "Port", "PortError", "Report", "adopt", "compare"]
