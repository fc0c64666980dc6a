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
"""Metric of a finding that counts all differences found by one comparison. Each difference also has
a finding of its own, with the same probe and source. If an earlier run reported a difference and
this run has the count but no such finding, the difference is gone, not unmeasured."""


class Severity(StrEnum):
    """Severity of a finding, in ascending order."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"

    def gravity(self) -> int:
        """Return the rank of the severity, from 0 for OK to 3 for ERROR."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one probe for one parameter or operation."""

    probe: str
    """Name of the probe (the kind of test), such as "survival"."""
    severity: Severity
    subject: str
    """Name of the parameter or operation."""
    metric: str
    """Name of the measured number."""
    value: float
    """The measured number; NaN if it could not be measured."""
    threshold: float
    """Value at which the severity changes; NaN if there is no such value."""
    source: str
    """Origin of the threshold, as text: a document and its heading, a file or a paper."""
    message: str
    """The result as a sentence, without the subject."""
    remedy: str = ""
    """Instruction for the user; empty if nothing needs to be done."""


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
    """Return a finding that is OK up to its threshold, and has `severity` beyond it or for NaN.

    Args:
        probe, subject, metric, value, threshold, source, message, remedy: see `Finding`; an OK
            finding has no remedy.
        least: whether the threshold is a minimum, so that values below it get `severity`.
        severity: severity of a value beyond the threshold.
    """
    if value >= threshold if least else value <= threshold:
        severity, remedy = Severity.OK, ""
    return Finding(probe, severity, subject, metric, value, threshold, source, message, remedy)


def notes(probe: str, subject: str, numbers: Mapping[str, float], source: str) -> list[Finding]:
    """Return one finding of severity NOTE per number (metric -> value), without a threshold."""
    return [
        Finding(probe, Severity.NOTE, subject, metric, value, math.nan, source, "")
        for metric, value in numbers.items()
    ]


def non_finite(name: str, count: int, size: int, source: str, more: str = "") -> Finding:
    """Return an ERROR finding: `count` of a parameter's `size` values are NaN or infinite.

    `more` is appended to the message.
    """
    message = f"{count:,} of {size:,} values are NaN or infinite{more}"
    error, value = Severity.ERROR, float(count)
    return Finding("finite", error, name, "non_finite", value, 0.0, source, message, RESTORE)
