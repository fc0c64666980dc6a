"""Result of a diagnosis: findings, tried remedies, whole-run loss, and their text.

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
    """How far the optimiser state of a checkpoint was used."""

    place: str
    """File that holds the state."""
    parameters: int
    """Number of parameters whose moments it holds."""
    identified: str
    """How its parameters were identified, as text; empty if they were not."""
    unused: str
    """Why its moments were not used as a source of gradients, as text; empty if they were."""

    def describe(self) -> str:
        """Describe an unused state and the reason."""
        return f"{self.place}: state of {self.parameters:,} parameters not used: {self.unused}"


SHOWN = 3
"""Number of remedies listed per kind of leaf, best first, and of kinds that freeze in part."""
NOTED = FROZEN_SHARE / 5
"""Share of frozen elements from which a kind of leaf is named. It decides what is shown, not what
is wrong: a fifth of the warning's, so that a share that may grow into one is seen before."""


@dataclass(frozen=True)
class Diagnosis:
    """Problems of a checkpoint, worst first, and the effect of each remedy."""

    findings: list[Finding]
    """Sorted by severity, worst first, then by the number of elements concerned."""
    trials: dict[str, list[Trial]]
    """Trials of remedies, best first, by kind of leaf: its path with layer numbers replaced by
    *."""
    representatives: dict[str, str]
    """Leaf on which the remedies were tried, by kind: the worst of that kind."""
    predictions: dict[str, dict[str, Prediction]]
    """Predictions by leaf name, then format name."""
    basis: list[str]
    """Lines on the assumptions behind the numbers: optimiser, gradients, samples."""
    seconds: float
    whole: WholeRun | None = None
    """Cost of storage for the whole run; None if there are no parameters."""
    storage: str = BF16.name
    torch: tuple[str, ...] = ()
    """Remedies as lines of a torch script; empty if torch does not train the model."""
    states: tuple[StateUse, ...] = ()
    """Optimiser states found in the checkpoint."""

    def worst(self) -> Severity:
        """Return the worst severity of all findings."""
        return max((f.severity for f in self.findings), key=Severity.gravity)

    def text(self) -> str:
        """Return the diagnosis for a terminal: one entry per problem and kind of leaf."""
        groups: dict[tuple[str, str, str], list[Finding]] = defaultdict(list)
        for f in self.findings:
            if f.severity.gravity() >= Severity.WARNING.gravity():
                # Group moments across parameters: what is at fault is their storage.
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
        """Return a line on kinds of leaf that freeze in part, but not enough for a warning."""
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
