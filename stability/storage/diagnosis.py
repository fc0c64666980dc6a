"""What a diagnosis is: findings, remedies tried, what the whole run loses, and how it is said.

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
from stability.storage.survival import Prediction
from stability.storage.whole_run import WholeRun


@dataclass(frozen=True, slots=True)
class StateUse:
    """How far the optimiser state of a checkpoint was used."""

    place: str
    """Where it was found."""
    parameters: int
    """Number of parameters it has moments of."""
    identified: str
    """How its parameters were identified, in words; empty where they were not."""
    unused: str
    """Why gradients are not drawn as its moments say, in words; empty where they are."""

    def describe(self) -> str:
        """Return what was not used, in words."""
        return f"{self.place}: state of {self.parameters:,} parameters not used: {self.unused}"


SHOWN = 3
"""Remedies named for each kind of leaf, best first."""


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a checkpoint, worst first, and what each remedy would do."""

    findings: list[Finding]
    """Worst severity first; within one, what concerns most elements first."""
    trials: dict[str, list[Trial]]
    """By kind of leaf (path with layer numbers replaced by *): remedies, best first."""
    representatives: dict[str, str]
    """By kind: the leaf its remedies were tried on, the worst of its kind."""
    predictions: dict[str, dict[str, Prediction]]
    """By leaf and format name."""
    basis: list[str]
    """What the numbers rest on: optimiser, gradients, samples."""
    seconds: float
    whole: WholeRun | None = None
    """What storage costs the run; None where there are no parameters."""
    storage: str = BF16.name
    torch: tuple[str, ...] = ()
    """Where torch trains it: what helps, as lines of a torch script."""
    states: tuple[StateUse, ...] = ()
    """Optimiser states of the checkpoint."""

    def worst(self) -> Severity:
        """Return the worst severity there is."""
        return max((f.severity for f in self.findings), key=Severity.gravity)

    def text(self) -> str:
        """Return the diagnosis for a terminal: one entry per problem and kind of leaf."""
        groups: dict[tuple[str, str, str], list[Finding]] = defaultdict(list)
        for f in self.findings:
            if f.severity.gravity() >= Severity.WARNING.gravity():
                # Moments are of one kind across parameters: what is wrong is how they are kept.
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
        run = ["", *self.whole.lines(self.storage)] if self.whole is not None else []
        wrong = any(
            f.probe in ("survival", "optimiser") for group in groups.values() for f in group
        )
        torch = ["", *self.torch] if self.torch and wrong else []
        return "\n".join([*lines, *run, *torch, "", *self.basis, f"{self.seconds:.1f} s"])

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
