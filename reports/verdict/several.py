"""Several runs as one table: the gates and errors that differ from the first run.

Each run is judged against the first run only. A row is a gate, or an error of a probe, that changed
in at least one run. Source: docs/reports.md "Two runs side by side".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parity.engine.measure.measurement import Key, Measurement, Verdict
from reports.store.runs import Run
from reports.verdict.agreement import Agreement, agreement
from reports.verdict.changes import Change, What, gravest_first
from reports.verdict.decide import Decision, Word, decide
from stability.core.findings import Finding, Severity

GRAVEST = (Word.REGRESSED, Word.NOT_COMPARABLE, Word.INCOMPLETE, Word.CHANGED, Word.PASS)
"""Verdicts, the most severe first."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One gate or finding in one run.

    Attributes:
        value: measured value; NaN if there is no number.
        tolerance: tolerance of the gate, or threshold of the finding.
        state: pass, fail, blocked (could not be compared) or info.
        other_work: whether the gate's identity (hash of its work) differs from that in the first
            run that has the gate.
        what: kind of difference from the first run; None if there is none.
    """

    value: float
    tolerance: float
    state: str
    other_work: bool = False
    what: What | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A gate, or an error of a probe, that changed in at least one run.

    Attributes:
        gravest: the most severe of its changes.
        cells: one cell per run; None where the run did not measure the row.
    """

    gravest: Change
    cells: tuple[Cell | None, ...]

    @property
    def key(self) -> Key:
        """Case, edge, quantity and metric of the row."""
        return _key(self.gravest)


@dataclass(frozen=True)
class Several:
    """Runs side by side, in the order given.

    Attributes:
        runs: the runs.
        decisions: verdicts of the runs: the first judged alone, each other against the first only.
        agreements: agreement with the first run, of each run but the first.
        rows: the changes of all runs, most severe first.
    """

    runs: tuple[Run, ...]
    decisions: tuple[Decision, ...]
    agreements: tuple[Agreement, ...]
    rows: tuple[Row, ...]

    @property
    def gravest(self) -> int:
        """Index in `runs` of the run with the most severe verdict against the first run."""
        ranks = [GRAVEST.index(decision.word) for decision in self.decisions[1:]]
        return 1 + ranks.index(min(ranks))


def compare_runs(runs: Sequence[Run]) -> Several:
    """Judge each of `runs` against the first only, and collect the changes in one table."""
    first = runs[0]
    decisions = [decide(first, None, alone=True)]
    decisions += [decide(run, first, alone=True) for run in runs[1:]]
    changes = [{_key(c): c for c in decision.changes} for decision in decisions]
    # A failure of the first run is not a change; in later runs it counts as persisting or fixed.
    changes[0] = {}
    gates = [{m.key: m for m in run.measurements} for run in runs]
    errors = [_errors(run) for run in runs]
    gravest: dict[Key, Change] = {}
    for change in gravest_first(c for of_run in changes for c in of_run.values()):
        gravest.setdefault(_key(change), change)
    rows = tuple(
        Row(change, _cells(key, gates, errors, [of_run.get(key) for of_run in changes]))
        for key, change in gravest.items()
    )
    found = tuple(agreement(first, run) for run in runs[1:])
    return Several(tuple(runs), tuple(decisions), found, rows)


def _key(change: Change) -> Key:
    return change.case, change.edge, change.quantity, change.metric


def _errors(run: Run) -> dict[Key, Finding]:
    # Keys as in `reports.verdict.changes`, for changes of findings.
    return {(f"probe {f.probe}", "", f.subject, f.metric): f for f in run.findings}


def _cells(
    key: Key,
    gates: Sequence[Mapping[Key, Measurement]],
    errors: Sequence[Mapping[Key, Finding]],
    changes: Sequence[Change | None],
) -> tuple[Cell | None, ...]:
    identity, cells = None, []
    for of_run, found, change in zip(gates, errors, changes, strict=True):
        what = change.what if change else None
        if (m := of_run.get(key)) is not None:
            identity = m.identity if identity is None else identity
            state = {Verdict.FAIL: "fail", Verdict.NOT_COMPARABLE: "blocked"}.get(m.verdict, "pass")
            state = "info" if m.verdict is Verdict.INFO else state
            cells.append(Cell(m.value, m.tolerance, state, m.identity != identity, what))
        elif (f := found.get(key)) is not None:
            state = "fail" if f.severity is Severity.ERROR else "pass"
            cells.append(Cell(f.value, f.threshold, state, what=what))
        else:
            cells.append(None)
    return tuple(cells)
