"""Findings, the answers of probes: one per parameter or op, with its number and its remedy.

Source: docs/stability.md "Findings".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

RESTORE = "restore the last checkpoint without non-finite values"
"""What helps against NaN and infinity in stored parameters."""


class Severity(StrEnum):
    """How much a finding matters, mildest first."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"

    def gravity(self) -> int:
        """Return its place in the order, 0 for the mildest."""
        return list(Severity).index(self)


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
    """Return a finding that is OK up to its threshold and `severity` beyond it, as NaN is.

    Args:
        probe, subject, metric, value, threshold, source, message, remedy: as `Finding` has them;
            the remedy is left out where nothing is wrong.
        least: whether the threshold is the least that is right, not the most.
        severity: of a value beyond the threshold.
    """
    if value >= threshold if least else value <= threshold:
        severity, remedy = Severity.OK, ""
    return Finding(probe, severity, subject, metric, value, threshold, source, message, remedy)


def notes(probe: str, subject: str, numbers: Mapping[str, float], source: str) -> list[Finding]:
    """Return numbers without a threshold as findings."""
    return [
        Finding(probe, Severity.NOTE, subject, metric, value, math.nan, source, "")
        for metric, value in numbers.items()
    ]


def non_finite(name: str, count: int, size: int, source: str, more: str = "") -> Finding:
    """Return the error of a parameter with `count` values that are NaN or infinite, of `size`."""
    message = f"{count:,} of {size:,} values are NaN or infinite{more}"
    error, value = Severity.ERROR, float(count)
    return Finding("finite", error, name, "non_finite", value, 0.0, source, message, RESTORE)
