"""Users' ports: loads the file that defines them, compares them, stores the results as a run."""

from reports.ports.document import document_of
from reports.ports.files import as_ports, port_of, ports_of, side_of
from reports.ports.run import Options, compare_ports, select, store_ports, with_documents

__all__ = [
    "Options",
    "as_ports",
    "compare_ports",
    "document_of",
    "port_of",
    "ports_of",
    "select",
    "side_of",
    "store_ports",
    "with_documents",
]
