"""Result of a comparison: one `Measurement` per case, edge, quantity and metric.

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
    """The two sides did not compute the same work (missing, extra, other shape or recording)."""


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
    """Size of a deliberate difference (`parity.megalodon.known_differences`)."""


Key = tuple[str, str, str, str]
"""Case, edge, quantity, metric."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One metric of one tensor on one edge.

    `tolerance` is the largest `value` that passes, so `value` is also the smallest tolerance that
    would pass. `tolerance` is NaN for metrics that are for information only.
    """

    case: str
    edge: str
    quantity: str
    kind: Kind
    stage: int
    """Position in order of computation; -1 if there is none (loss, gradients)."""
    metric: str
    value: float
    tolerance: float
    verdict: Verdict
    dtype: str
    device: str
    identity: str
    """Hash of case, weights, inputs, metric version and device class; only measurements with equal
    identity can be compared between runs."""
    note: str = ""
    deterministic: bool | None = None
    """Whether a replay in the same run was bit-identical; None if nothing was replayed."""
    suite: str = ""
    """The subject or the part of a night it belongs to; empty in runs of schema 3 and earlier."""

    @property
    def key(self) -> Key:
        """Case, edge, quantity and metric, which identify it across runs."""
        return self.case, self.edge, self.quantity, self.metric

    def settled(self) -> Measurement:
        """Return it with the verdict that its numbers support (fail closed).

        A gate passes only with a finite value within its tolerance. Values are distances or counts,
        so a negative one fails too. A gate without a finite tolerance is not comparable.
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
        """Fraction of the tolerance used; NaN if none applies."""
        if not math.isfinite(self.tolerance):
            return math.nan
        if self.tolerance == 0.0:
            return 0.0 if self.value == 0.0 else math.inf
        return self.value / self.tolerance
