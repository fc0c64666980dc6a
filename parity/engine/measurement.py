"""What a comparison says: one `Measurement` per case, edge, quantity and metric.

Source: docs/parity.md "Metrics", docs/parity.md "Fail closed", docs/reports.md "Store".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum


class Verdict(StrEnum):
    """What one measurement means; only `PASS` and `INFO` are not a problem."""

    PASS = "pass"
    FAIL = "fail"
    INFO = "info"
    """Reported for the reader; no tolerance applies."""
    NOT_COMPARABLE = "not comparable"
    """The two sides are not the same work (missing, extra, other shape, other recording)."""


class Kind(StrEnum):
    """The family a quantity belongs to; tolerances are chosen by it."""

    LOGITS = "logits"
    LOSS = "loss"
    BLOCK = "block"
    GRADIENT = "gradient"
    STATE = "state"
    TOKENS = "tokens"
    WEIGHTS = "weights"
    """Parameters after conversion, by hash."""
    TRAJECTORY = "trajectory"
    """Losses over training, moments of the optimiser, drift of parameters."""
    KNOWN_DIFFERENCE = "seam"  # as stored runs have it
    """What a deliberate difference amounts to (`parity.megalodon.known_differences`)."""


Key = tuple[str, str, str, str]
"""Case, edge, quantity, metric."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One number about one tensor on one edge of the triangle.

    `tolerance` is the largest `value` that passes, so `value` is also the minimum tolerance that
    would pass. It is NaN where the metric is informative only.
    """

    case: str
    edge: str
    quantity: str
    kind: Kind
    stage: int
    """Position in the order of computation, -1 where there is none (loss, gradients)."""
    metric: str
    value: float
    tolerance: float
    verdict: Verdict
    dtype: str
    device: str
    identity: str
    """Hash of case, weights, inputs, metric version and device class; deltas need it equal."""
    note: str = ""
    deterministic: bool | None = None
    """Whether a replay in the same run gave the same bits; None where nothing was replayed."""
    suite: str = ""
    """The subject it is about, or the part of a night; empty in runs of schema 3 and before."""

    @property
    def key(self) -> Key:
        """What names it across runs."""
        return self.case, self.edge, self.quantity, self.metric

    def settled(self) -> Measurement:
        """Return it with the verdict its numbers support: fail closed.

        A gate passes only on a finite value within its tolerance. Its value is a distance or a
        count, so one below 0 fails too. A gate whose tolerance is not finite measured nothing.
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
        """Share of the tolerance used; NaN where none applies."""
        if not math.isfinite(self.tolerance):
            return math.nan
        if self.tolerance == 0.0:
            return 0.0 if self.value == 0.0 else math.inf
        return self.value / self.tolerance
