"""Ports of anybody's: the file that names them, their comparison, and what a run keeps of it."""

from reports.ports.document import document_of
from reports.ports.files import PortFileError, ports_of
from reports.ports.run import Options, compare_ports, manifest_of, store_ports

__all__ = [
    "Options",
    "PortFileError",
    "compare_ports",
    "document_of",
    "manifest_of",
    "ports_of",
    "store_ports",
]
