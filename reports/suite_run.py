"""The result `SuiteRun` of one suite of a night, and what the functions that measure suites share.

A suite that raises an error stores the error as its reason and counts as incomplete, never as
passed: docs/verdicts.md "Word and exit code".
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from parity.engine.measure.contract import Gate
from parity.engine.measure.deviation import Deviations
from parity.engine.measure.measurement import Measurement, Verdict
from parity.engine.programs.explanation import Explanation
from reports.store.manifest import SuiteResult
from stability.core.findings import Finding

Calibrated = tuple[str, str] | tuple[str, str, str]
"""Case, metric and edge whose responses to rounding were measured; without an edge, all edges."""


@dataclass
class SuiteRun:
    """One suite of a night: its measurements, and how much of its plan it executed."""

    name: str
    planned: int
    executed: int = 0
    reason: str = ""
    """Why the suite is incomplete; empty if nothing went wrong."""
    seconds: float = 0.0
    times: dict[tuple[str, str], float] = field(default_factory=dict)
    """Seconds by case and edge, for comparisons that are timed one by one. For probes, the case is
    the name of the probe and the edge is empty."""
    contract: list[Gate] = field(default_factory=list)
    """Gates that must be measured, determined before the measurement."""
    measurements: list[Measurement] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    tensors: Deviations = field(default_factory=Deviations)
    explanations: list[Explanation] = field(default_factory=list)
    responses: dict[Calibrated, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    """Relative L2 changes of each quantity, one for each rounding perturbation, by (case, metric),
    valid on all edges, or by (case, metric, edge): the `responses` of
    `reports.verdict.levels.spreads_of`."""
    shown: dict[str, Any] = field(default_factory=dict)
    """Plain data for sections of the page."""

    def result(self) -> SuiteResult:
        """Return the entry of this suite in a manifest."""
        status = "ran" if self.executed == self.planned and not self.reason else "failed"
        return SuiteResult(self.name, self.planned, self.executed, self.reason, status)

    def timed(self, rows: Iterator[Measurement]) -> Iterator[Measurement]:
        """Yield `rows`, and add the time that computing each row takes to `times`.

        The time of a program that several comparisons share counts for the first of them.
        """
        while True:
            start = time.perf_counter()
            row = next(rows, None)
            if row is None:
                return
            key = row.case, row.edge
            self.times[key] = self.times.get(key, 0.0) + time.perf_counter() - start
            yield row

    @property
    def passed(self) -> int:
        """Number of gates that hold."""
        return sum(row.verdict is Verdict.PASS for row in self.measurements)


@contextmanager
def breakdowns_named(suite: SuiteRun, what: str = "") -> Iterator[None]:
    """Context that times its body and stores an error in it as the suite's `reason`: `what`, then
    the error.

    Bugs of this project, such as a KeyError, are caught too: other suites continue, and the night
    is INCOMPLETE.
    """
    start = time.perf_counter()
    try:
        yield
    except Exception as error:
        suite.reason = f"{what}{type(error).__name__}: {error}"[:400]
    finally:
        suite.seconds += time.perf_counter() - start


def mark_repeats(rows: Sequence[Measurement], again: Sequence[Measurement]) -> list[Measurement]:
    """Return `rows` with `deterministic` set: whether a repetition of the work gave the same value.

    Args:
        rows: Measurements.
        again: Measurements of the repetition; a row that they lack counts as not repeated.
    """
    values = {m.key: m.value for m in again}

    def repeats(m: Measurement) -> bool:
        second = values.get(m.key)
        if second is None:
            return False
        return second == m.value or (math.isnan(second) and math.isnan(m.value))

    return [replace(m, deterministic=repeats(m)) for m in rows]
