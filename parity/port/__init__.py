"""Comparison of a port with its original: two programs that should compute the same thing.

`compare` takes two sides and finds parameters, stages, truth and bounds by itself.
"""

from parity.port.compare import Port, PortError, compare
from parity.port.correspondence import Correspondence
from parity.port.report import Report

__all__ = ["Correspondence", "Port", "PortError", "Report", "compare"]
