"""The verdict of a run: one word, exit code and sentence, and the changes since the baseline.

Source: docs/verdicts.md "Comparability", docs/verdicts.md "Word and exit code", docs/parity.md
"Fail closed", docs/parity.md "First divergence".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

from parity.engine.measure.contract import Breaches
from parity.engine.measure.localize import first_divergence
from parity.engine.measure.measurement import Key, Measurement, Verdict
from parity.engine.measure.where import ALL_PADDING
from reports.provenance.host import differences, fingerprint
from reports.store.manifest import Manifest
from reports.store.runs import Run
from reports.subject import live_suites
from reports.text import count, edge_rank, label
from reports.verdict import sentences as say
from reports.verdict.agreement import agreement
from reports.verdict.changes import (
    Change,
    Counts,
    What,
    count_changes,
    drift_change,
    find_changes,
    gravest_first,
    rescaled_change,
    unseen_change,
)
from reports.verdict.completeness import breaches_of, lacking
from reports.verdict.drift import PinComparison, compare_with_pins, levels_of
from reports.verdict.history import Past
from reports.verdict.pins import Pin
from reports.verdict.vanished import Retired, Seen, Vanished

NOTHING_GONE = Vanished()


class Word(StrEnum):
    """Word of a run's verdict, as shown to people; docs/verdicts.md explains each."""

    PASS = "PASS"
    REGRESSED = "REGRESSED"
    CHANGED = "CHANGED"
    INCOMPLETE = "INCOMPLETE"
    NOT_COMPARABLE = "NOT COMPARABLE"


class ExitCode(IntEnum):
    """Exit codes of the command line."""

    PASS = 0
    REGRESSION = 1
    USAGE = 2
    INCOMPLETE = 3
    NOT_COMPARABLE = 4
    NOTHING_SELECTED = 5
    INTERNAL_ERROR = 6


@dataclass(frozen=True)
class Decision:
    """The verdict of a run, with the changes and comparisons that led to it."""

    word: Word
    exit_code: ExitCode
    sentence: str
    counts: Counts
    changes: tuple[Change, ...]
    starts: tuple[Measurement, ...]
    """First stage that fails, or cannot be compared, of each case and edge with such a stage; those
    of the most severe case come first."""
    baseline_id: str | None
    """Id of the baseline; None without one."""
    environment: tuple[str, ...]
    """Differences from the baseline's environment, one line each. If there are any, values need not
    repeat. In a run of several hosts, those of a case that both runs measured on the same host
    must."""
    breaches: Breaches = field(default_factory=Breaches)
    """Differences between the measured gates and the run's contract (its planned gates)."""
    comparisons: tuple[PinComparison, ...] = ()
    """Comparisons of error levels with pinned runs and anchors, those of this machine first. Each
    level is compared with at most one run of this machine and one of another."""

    @property
    def against(self) -> tuple[str, ...]:
        """One line per comparison: the pinned run, and how many error levels could be compared."""
        return tuple(say.against(comparison) for comparison in self.comparisons)


def _starts(run: Run, new: set[Key]) -> tuple[Measurement, ...]:
    rows = run.measurements
    # Nobody reads values at padding, so errors that are only there come after those at real tokens.
    padding = {e.case for e in run.explanations if ALL_PADDING in e.where}
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for m in rows:
        groups.setdefault((m.case, m.edge), []).append(m)
    divergences = [start for group in groups.values() if (start := first_divergence(group))]

    def novelty(m: Measurement) -> tuple[bool, bool, bool]:
        is_new = any(case == m.case and edge == m.edge for case, edge, _, _ in new)
        return m.verdict is not Verdict.FAIL, not is_new, m.case in padding

    def importance(m: Measurement) -> tuple[Any, ...]:
        fraction = m.fraction
        finite = math.isfinite(fraction)
        return (*novelty(m), edge_rank(m.edge), finite, -fraction if finite else 0.0, m.case)

    # A case is ranked by its most severe edge. Within a case the earliest stage comes first, on
    # any edge: the edge with the tightest tolerances may compare nothing but logits.
    gravest: dict[str, tuple[Any, ...]] = {}
    for m in sorted(divergences, key=importance):
        gravest.setdefault(m.case, importance(m))

    def order(m: Measurement) -> tuple[Any, ...]:
        at = (m.stage < 0, m.stage, edge_rank(m.edge))
        return *novelty(m), gravest[m.case], *at

    return tuple(sorted(divergences, key=order))


def _missing(run: Run, baseline: Run | None, retired: Sequence[Retired]) -> tuple[str, ...]:
    """Return the suites that the baseline completed and that this run lacks, if they are expected.

    A run of selected cases needs no other suites; retired suites are not expected, nor are
    those of `live_suites` if this run compares with recordings.
    """
    if baseline is None or run.manifest.selected:
        return ()
    names = {suite.name for suite in run.manifest.suites}
    now, then = (r.manifest.environment.reference.kind for r in (run, baseline))
    if (now, then) == ("recorded", "live"):
        names |= live_suites()
    before, seen = baseline.manifest.suites, Seen(baseline.id, baseline.manifest.created)
    names |= {s.name for s in before for each in retired if each.covers(s.name, seen)}
    return tuple(suite.name for suite in before if suite.whole and suite.name not in names)


def decide(
    run: Run,
    baseline: Run | None,
    past: Mapping[Key, Past] | None = None,
    pins: Sequence[Pin] = (),
    unusable: Sequence[str] = (),
    *,
    gone: Vanished = NOTHING_GONE,
    old_schema_may_pass: bool = False,
    alone: bool = False,
) -> Decision:
    """Judge a run by its most severe problem.

    The order is failures, incomplete or missing suites, values that are not comparable, missing
    gates, and values that left their history or error level.

    Args:
        run: The measured run.
        baseline: The newest earlier run with comparable measurements, or None. A value that differs
            from it makes the run CHANGED only if a replay in this run repeated the value and both
            environments are equal. CHANGED exits with 0, since every tolerance holds.
        past: Earlier values of the gates that do not repeat (`reports.verdict.history`). A value
            that rose beyond them is REGRESSED although the tolerance holds.
        pins: Pinned runs for the comparison of levels (`reports.verdict.drift.compare_with_pins`),
            in order of preference. A level that grew beyond its limit over one of them is
            REGRESSED too.
        unusable: One line for each pinned baseline that could not be used; the sentence counts
            them.
        gone: Work of earlier runs that this run does not plan (`reports.verdict.vanished`).
        old_schema_may_pass: Whether a run stored before runs had a contract can pass. It may then
            be the anchor of later nights. Otherwise it is INCOMPLETE, since the gates that it
            should have had are unknown.
        alone: Compare with `baseline` only (or with nothing if it is None). The sentence of a
            passing run then counts equal gates and does not mention history, pins or first nights.
    """
    past, here = past or {}, run.manifest.environment
    environment = differences(here, baseline.manifest.environment) if baseline else ()
    before = levels_of(baseline, {}) if baseline else {}
    comparisons = compare_with_pins(run, levels_of(run, past), pins, before)
    drifted = [drift_change(drift, to, run) for to in comparisons for drift in to.drifts]
    drifted += [rescaled_change(it, to) for to in comparisons for it in to.rescaled]
    drifted += [unseen_change(drift, to) for to in comparisons for drift in to.unseen]
    changes = find_changes(run, baseline, past, equal=_equal_hosts(run, baseline, environment))
    new = {(c.case, c.edge, c.quantity, c.metric) for c in changes if c.what is What.NEW}
    starts = _starts(run, new)
    changes = gravest_first([*changes, *drifted], [m.case for m in starts])
    counts = count_changes(run, changes)
    breaches = breaches_of(run)
    lacks = lacking(run, breaches, old_schema_may_pass)
    word, exit_code, sentence = _verdict(
        run, baseline, changes, counts, starts, environment, comparisons, lacks, gone, alone
    )
    return Decision(
        word=word,
        exit_code=exit_code,
        sentence=sentence + say.not_used(unusable),
        counts=counts,
        changes=changes,
        starts=starts,
        baseline_id=baseline.id if baseline else None,
        environment=environment,
        breaches=breaches,
        comparisons=comparisons,
    )


def _equal_hosts(
    run: Run, baseline: Run | None, environment: Sequence[str]
) -> Callable[[str], bool]:
    """Return a function of a case's name: whether a run and its baseline measured it on one host.

    Only on the same host must values repeat. In a run of several hosts, each case may have another
    host. `environment` has the differences of the two environments; without any, hosts are equal.
    """
    manifests = [each.manifest for each in (run, baseline) if each is not None]
    if all(len({part.fingerprint for part in m.parts}) <= 1 for m in manifests):
        return lambda case: not environment
    if baseline is None:
        return lambda case: False
    now, then = map(_host_of, manifests)
    return lambda case: bool(now(case)) and now(case) == then(case)


def _host_of(manifest: Manifest) -> Callable[[str], str]:
    """Return a function of a case's name: the fingerprint of its host, "" if unknown."""
    whole = fingerprint(manifest.environment) or ""
    by_case = {case: part.fingerprint for part in manifest.parts for case in part.cases}
    return lambda case: by_case.get(case, "" if manifest.parts else whole)


def _verdict(
    run: Run,
    baseline: Run | None,
    changes: Sequence[Change],
    counts: Counts,
    starts: Sequence[Measurement],
    environment: Sequence[str],
    comparisons: Sequence[PinComparison],
    lacks: str,
    gone: Vanished,
    alone: bool,
) -> tuple[Word, ExitCode, str]:
    suites = run.manifest.suites
    missing = tuple(dict.fromkeys((*gone.suites, *_missing(run, baseline, gone.retired))))
    whole = bool(suites) and all(suite.whole for suite in suites) and not missing
    if counts.new + counts.persisting:
        return Word.REGRESSED, ExitCode.REGRESSION, say.regressed(run, baseline, counts, starts)
    if not whole and (suites or counts.gates):
        return Word.INCOMPLETE, ExitCode.INCOMPLETE, say.incomplete(run, missing)
    if counts.not_comparable:
        first = starts[0]
        reason = f": {label(first.note)}" if first.note else ""
        several = count(counts.not_comparable, "measurement")
        sentence = f"{several} could not be compared. It starts at {say.place(first)}{reason}."
        return Word.NOT_COMPARABLE, ExitCode.NOT_COMPARABLE, sentence
    if not counts.gates:
        sentence = "Nothing was measured against a tolerance, and that is never a pass."
        return Word.INCOMPLETE, ExitCode.NOTHING_SELECTED, sentence
    if lacks:
        return Word.INCOMPLETE, ExitCode.INCOMPLETE, lacks
    if gone.groups:
        return Word.INCOMPLETE, ExitCode.INCOMPLETE, say.vanished(run, gone)
    if counts.worse:
        return Word.REGRESSED, ExitCode.REGRESSION, say.worse(run, changes, counts)
    if unseen := [(drift, to) for to in comparisons for drift in to.unseen]:
        return Word.NOT_COMPARABLE, ExitCode.NOT_COMPARABLE, say.unseen(run, unseen)
    # In a run of several hosts, cases of equal hosts were compared although the runs differ.
    if baseline and (counts.changed or (counts.fixed and not environment)):
        return Word.CHANGED, ExitCode.PASS, say.changed(run, changes, baseline)
    return _holding(run, baseline, changes, counts, environment, comparisons, alone)


def _holding(
    run: Run,
    baseline: Run | None,
    changes: Sequence[Change],
    counts: Counts,
    environment: Sequence[str],
    comparisons: Sequence[PinComparison],
    alone: bool,
) -> tuple[Word, ExitCode, str]:
    """Return the verdict of a run in which every gate holds and no value changed or drifted."""
    if alone and baseline and not agreement(baseline, run).compared:
        # No row was compared with the baseline, which is never a pass.
        return Word.NOT_COMPARABLE, ExitCode.NOT_COMPARABLE, say.nothing_shared(run, baseline)
    if alone:
        return Word.PASS, ExitCode.PASS, say.against_one(run, baseline, environment, changes)
    sentence = (
        f"{say.selection(run)}All {count(counts.gates, 'gate')} hold; {say.tightest(run)}. "
        f"{say.since(run, baseline, environment, changes)}{say.first_night(run, comparisons)}"
    )
    return Word.PASS, ExitCode.PASS, sentence
