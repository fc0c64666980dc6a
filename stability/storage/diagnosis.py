"""Result of a diagnosis: findings, tried remedies, the cost for the whole run, and the text.

Source: docs/stability.md "Diagnose a checkpoint".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from stability.core.findings import Finding, Severity
from stability.core.number_formats import BF16
from stability.core.parameter_leaves import kind_of
from stability.storage.remedies import Trial, ranks
from stability.storage.survival import FROZEN_SHARE, Prediction
from stability.storage.whole_run import WholeRun


@dataclass(frozen=True, slots=True)
class StateUse:
    """One optimiser state of a checkpoint, and whether gradient statistics were derived from it."""

    place: str
    """File, or place in a file, that holds the state."""
    parameters: int
    """Number of parameters whose moments the state holds."""
    identified: str
    """Method by which the state's entries were assigned to parameters, such as "by shape"; empty if
    they were not."""
    unused: str
    """Why no gradient statistics were derived from the state's moments; empty if they were."""

    def describe(self) -> str:
        """Return a clause for the report: the place of an unused state, and why it is unused."""
        return f"{self.place}: state of {self.parameters:,} parameters not used: {self.unused}"


SHOWN = 3
"""Number of best remedies listed per kind of leaf, and largest number of failing remedies listed
after them. Also the largest number of partly frozen kinds named in one line."""
NOTED = FROZEN_SHARE / 5
"""Predicted frozen fraction from which a kind of leaf is listed as partly frozen. It is a fifth of
the limit for a warning, so that a fraction on its way to the limit is seen early. It decides only
about display, never about severity."""


@dataclass(frozen=True)
class Diagnosis:
    """Problems of a checkpoint, worst first, and the effect of each remedy."""

    findings: list[Finding]
    """Findings, sorted by severity, worst first, then by the elements concerned, most first."""
    trials: dict[str, list[Trial]]
    """Trials of remedies, best first, by kind of leaf (its path with * for layer numbers)."""
    representatives: dict[str, str]
    """Name of the leaf on which the remedies were tried, the one with the largest frozen fraction,
    by kind of leaf."""
    predictions: dict[str, dict[str, Prediction]]
    """Predictions by leaf name, then format name."""
    basis: list[str]
    """Lines on the assumptions behind the numbers: optimiser, gradients, samples."""
    seconds: float
    """Wall time of the diagnosis, in seconds."""
    whole: WholeRun | None = None
    """Cost of storage for the whole run; None if there are no parameters."""
    storage: str = BF16.name
    """Name of the diagnosed storage format."""
    torch: tuple[str, ...] = ()
    """Remedies as lines of a torch script; empty if the source is not a torch model."""
    states: tuple[StateUse, ...] = ()
    """Optimiser states found in the checkpoint."""

    def worst(self) -> Severity:
        """Return the worst severity of the findings.

        Raises:
            ValueError: there are no findings.
        """
        return max((f.severity for f in self.findings), key=Severity.gravity)

    def text(self) -> str:
        """Return the diagnosis as text for a terminal: one entry per problem and kind of leaf."""
        groups: dict[tuple[str, str, str], list[Finding]] = defaultdict(list)
        for f in self.findings:
            if f.severity.gravity() >= Severity.WARNING.gravity():
                # Moments are grouped across parameters: their common storage dtype is at fault.
                moment = f"optimiser state *.{f.subject.rpartition('.')[2]}"
                kind = moment if f.probe == "optimiser" else kind_of(f.subject)
                groups[f.probe, kind, f.metric].append(f)
        lines = [line for key, found in groups.items() for line in self._entry(key[1], found)]
        if not lines:
            rows = any(f.probe == "embedding_rows" for f in self.findings)
            looked_at = ", and no embedding row is zero" if rows else ""
            lines = [f"Nothing found: no parameter freezes, collapses or is not finite{looked_at}."]
            if not self.predictions:
                lines = ["Nothing found: every moment decays, is finite and does not underflow."]
        lines += self._below()
        run = ["", *self.whole.lines(self.storage)] if self.whole is not None else []
        wrong = any(
            f.probe in ("survival", "optimiser") for group in groups.values() for f in group
        )
        torch = ["", *self.torch] if self.torch and wrong else []
        return "\n".join([*lines, *run, *torch, "", *self.basis, f"{self.seconds:.1f} s"])

    def _below(self) -> list[str]:
        """Return a list with one line on the partly frozen kinds of leaf; empty if there are none.

        A kind is listed if the predicted frozen fraction of one of its leaves is at least `NOTED`
        but below `FROZEN_SHARE`, the limit for a warning.
        """
        shares: dict[str, float] = {}
        for f in self.findings:
            if f.metric == "predicted_frozen_fraction" and NOTED <= f.value < FROZEN_SHARE:
                kind = kind_of(f.subject)
                shares[kind] = max(f.value, shares.get(kind, 0.0))
        if not shares:
            return []
        largest = sorted(shares, key=lambda kind: -shares[kind])[:SHOWN]
        named = ", ".join(f"{kind} {shares[kind]:.0%}" for kind in largest)
        more = f" and {len(shares) - SHOWN} more" if len(shares) > SHOWN else ""
        return [f"Frozen in part, less than the {FROZEN_SHARE:.0%} of a warning: {named}{more}."]

    def _entry(self, kind: str, findings: Sequence[Finding]) -> list[str]:
        first = findings[0]
        name = first.subject if len(findings) == 1 else f"{kind} ({len(findings)} leaves)"
        lines = [f"{first.severity.upper()} {name}: {first.message}"]
        if first.metric == "frozen_fraction" and kind in self.trials:
            trials = self.trials[kind]
            torch = bool(self.torch)
            shown = trials[:SHOWN] + [t for t in trials[SHOWN:] if not t.works][:SHOWN]
            places = dict(zip(map(id, trials), ranks(trials), strict=True))
            for before, t in zip([None, *shown], shown, strict=False):
                tie = before is not None and places[id(before)] == places[id(t)]
                tied = "; a tie with the one above" if tie else ""
                lines.append(f"    {t.verdict()}: {t.describe(torch)}{tied}")
        elif first.remedy:
            lines.append(f"    fix: {first.remedy}")
        return lines
