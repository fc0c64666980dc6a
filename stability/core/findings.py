"""What a probe says: one `Finding` per parameter or op.

Source: docs/stability.md "Findings".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How much a finding matters, mildest first."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer of one probe about one parameter or op."""

    probe: str
    severity: Severity
    subject: str
    """Parameter name or op the finding is about."""
    metric: str
    value: float
    threshold: float
    """The value at which the severity changes; NaN where there is none."""
    source: str
    """Where the threshold comes from."""
    message: str
    remedy: str = ""
