"""Results of a comparison: one `Measurement` per case, edge (pair of runs), quantity and metric.

Source: docs/parity.md "Metrics", docs/parity.md "Fail closed", docs/reports.md "Store".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum


class Verdict(StrEnum):
    """Outcome of one measurement; every value except `PASS` and `INFO` is a problem."""

    PASS = "pass"
    FAIL = "fail"
    INFO = "info"
    """Reported for information; no tolerance applies."""
    NOT_COMPARABLE = "not comparable"
    """No meaningful comparison was possible, for example without a tolerance or any elements."""


class Kind(StrEnum):
    """Family of a quantity, by which its tolerance is chosen."""

    LOGITS = "logits"
    LOSS = "loss"
    BLOCK = "block"
    GRADIENT = "gradient"
    STATE = "state"
    TOKENS = "tokens"
    WEIGHTS = "weights"
    """Parameters after conversion, compared by hash."""
    TRAJECTORY = "trajectory"
    """Losses during training, optimizer moments, parameter displacements."""
    KNOWN_DIFFERENCE = "seam"  # the name in stored runs
    """Size of a deliberate difference from the reference (`parity.megalodon.known_differences`)."""


Key = tuple[str, str, str, str]
"""Identity of a measurement across runs: case, edge, quantity, metric."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One metric of one tensor on one edge (pair of compared runs).

    `tolerance` is the largest `value` that passes, so `value` is also the smallest tolerance that
    would pass. `tolerance` is NaN for metrics that are for information only.
    """

    case: str
    edge: str
    quantity: str
    kind: Kind
    stage: int
    """Index in order of computation; -1 if the quantity has none, as gradients."""
    metric: str
    value: float
    tolerance: float
    verdict: Verdict
    dtype: str
    device: str
    identity: str
    """Hash of the work (inputs and weights), edge, quantity, metric, metric version and
    `device`; only measurements with equal identity can be compared between runs."""
    note: str = ""
    """Explanation for the reader; empty if there is none."""
    deterministic: bool | None = None
    """Whether a second computation in the same run gave the same bits; None if there was none."""
    suite: str = ""
    """Name of the group of cases, such as a model; empty in runs of schema 3 and earlier."""

    @property
    def key(self) -> Key:
        """Case, edge, quantity and metric, which identify a measurement across runs."""
        return self.case, self.edge, self.quantity, self.metric

    def settled(self) -> Measurement:
        """Return the measurement with the verdict recomputed from its value and tolerance.

        Only passes are recomputed, and informational measurements that have a tolerance, which they
        should not. They pass if the value is finite and between 0 and the tolerance: values are
        distances or counts, so a negative one fails. A finite value without a finite tolerance is
        not comparable.
        """
        if self.verdict is not Verdict.PASS and (
            self.verdict is not Verdict.INFO or math.isnan(self.tolerance)
        ):
            return self
        holds = math.isfinite(self.value) and 0.0 <= self.value <= self.tolerance
        verdict = Verdict.PASS if holds else Verdict.FAIL
        if math.isfinite(self.value) and not math.isfinite(self.tolerance):
            verdict = Verdict.NOT_COMPARABLE
        return self if verdict is self.verdict else replace(self, verdict=verdict)

    @property
    def fraction(self) -> float:
        """Value over tolerance; NaN if there is no finite tolerance."""
        if not math.isfinite(self.tolerance):
            return math.nan
        if self.tolerance == 0.0:
            return 0.0 if self.value == 0.0 else math.inf
        return self.value / self.tolerance
