"""Agreement of two runs: how many gates (measurements with a tolerance) and findings are equal.

Source: docs/reports.md "Two runs side by side".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from parity.engine.measure.measurement import Measurement, Verdict
from reports.store.runs import Run
from reports.text import count
from stability.core.findings import Finding


@dataclass(frozen=True, slots=True)
class Agreement:
    """Numbers of equal and different gates and findings of two runs.

    Attributes:
        compared: gates that both runs measured with equal identity (hash of the work).
        same: compared gates with equal value, tolerance and verdict.
        other_work: gates that both runs measured with different identities, which are not compared.
        only_before: gates that only the earlier run measured.
        only_now: gates that only the later run measured.
        findings: findings of the later run.
        findings_differ: findings that both runs have and whose results differ.
        findings_alone: findings that only one run has.
    """

    compared: int
    same: int
    other_work: int
    only_before: int
    only_now: int
    findings: int
    findings_differ: int
    findings_alone: int = 0

    @property
    def equal(self) -> bool:
        """Whether both runs have the same gates (at least one) and findings with equal results."""
        alone = self.other_work + self.only_before + self.only_now + self.findings_alone
        differ = self.compared - self.same + alone + self.findings_differ
        return bool(self.compared) and not differ

    def sentence(self) -> str:
        """Say how many gates were compared and how many of them are equal."""
        found = f" and {count(self.findings, 'finding')}" if self.findings else ""
        if self.equal:
            return f"Equal: all {count(self.compared, 'gate')}{found} are the same in both runs."
        parts = [
            f"{count(self.compared, 'gate')} compared, {self.same:,} of them equal",
            *([f"{self.other_work:,} of other work"] if self.other_work else []),
            *([f"{self.only_before:,} only in the first run"] if self.only_before else []),
            *([f"{self.only_now:,} only in the second"] if self.only_now else []),
            *([self._differing()] if self.findings_differ else []),
            *(
                [f"{count(self.findings_alone, 'finding')} in one run only"]
                if self.findings_alone
                else []
            ),
        ]
        return f"{'; '.join(parts)}."

    def _differing(self) -> str:
        verb = "differs" if self.findings_differ == 1 else "differ"
        return f"{count(self.findings_differ, 'finding')} {verb}"


def agreement(before: Run, now: Run) -> Agreement:
    """Count how many gates and findings of two runs are exactly equal.

    Gates are measurements with a tolerance; findings are results of probes.
    """
    then, after = _gates(before), _gates(now)
    both = then.keys() & after.keys()
    alike = [key for key in both if then[key].identity == after[key].identity]
    found = [{(f.probe, f.subject, f.metric): f for f in run.findings} for run in (before, now)]
    shared = found[0].keys() & found[1].keys()
    return Agreement(
        compared=len(alike),
        same=sum(_same(then[key], after[key]) for key in alike),
        other_work=len(both) - len(alike),
        only_before=len(then.keys() - both),
        only_now=len(after.keys() - both),
        findings=len(now.findings),
        findings_differ=sum(_differ(found[0][name], found[1][name]) for name in shared),
        findings_alone=len(found[0].keys() ^ found[1].keys()),
    )


def _gates(run: Run) -> dict[tuple[str, str, str, str], Measurement]:
    return {m.key: m for m in run.measurements if m.verdict is not Verdict.INFO}


def _same(a: Measurement, b: Measurement) -> bool:
    numbers = (a.value, b.value), (a.tolerance, b.tolerance)
    return a.verdict is b.verdict and all(_equal(x, y) for x, y in numbers)


def _differ(a: Finding, b: Finding) -> bool:
    numbers = (a.value, b.value), (a.threshold, b.threshold)
    return a.severity is not b.severity or not all(_equal(x, y) for x, y in numbers)


def _equal(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))
