"""Findings: results of probes, one per parameter or operation, with a number and a remedy.

Source: docs/stability.md "Findings".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

RESTORE = "restore the last checkpoint without non-finite values"
"""Remedy for NaN and infinity in stored parameters."""
DIFFERENCES = "changes"
"""Metric of a finding that counts all differences of one comparison. Each difference has a finding
with the same probe and source, so an earlier one without its finding is mended."""


class Severity(StrEnum):
    """How severe a finding is, mildest first."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"

    def gravity(self) -> int:
        """Return the rank of the severity, 0 for the mildest."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one probe for one parameter or operation."""

    probe: str
    severity: Severity
    subject: str
    """Name of the parameter or operation."""
    metric: str
    value: float
    threshold: float
    """Value at which the severity changes; NaN if there is none."""
    source: str
    """Source of the threshold."""
    message: str
    remedy: str = ""


def judge(
    probe: str,
    subject: str,
    metric: str,
    value: float,
    threshold: float,
    source: str,
    message: str,
    remedy: str = "",
    *,
    least: bool = False,
    severity: Severity = Severity.WARNING,
) -> Finding:
    """Return a finding that is OK up to its threshold and has `severity` beyond it, or if NaN.

    Args:
        probe, subject, metric, value, threshold, source, message, remedy: see `Finding`; an OK
            finding has no remedy.
        least: the threshold is a minimum instead of a maximum.
        severity: severity of a value beyond the threshold.
    """
    if value >= threshold if least else value <= threshold:
        severity, remedy = Severity.OK, ""
    return Finding(probe, severity, subject, metric, value, threshold, source, message, remedy)


def notes(probe: str, subject: str, numbers: Mapping[str, float], source: str) -> list[Finding]:
    """Return notes: numbers without a threshold."""
    return [
        Finding(probe, Severity.NOTE, subject, metric, value, math.nan, source, "")
        for metric, value in numbers.items()
    ]


def non_finite(name: str, count: int, size: int, source: str, more: str = "") -> Finding:
    """Return the error finding for a parameter of which `count` values are NaN or infinite."""
    message = f"{count:,} of {size:,} values are NaN or infinite{more}"
    error, value = Severity.ERROR, float(count)
    return Finding("finite", error, name, "non_finite", value, 0.0, source, message, RESTORE)
