"""The sentence under the verdict: what happened, how large the error is, and where it starts.

Functions that "say" something return it as text.
"""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Collection, Sequence

from parity.engine.measure.measurement import Measurement, Verdict
from reports.provenance.host import fingerprint
from reports.store.runs import Run
from reports.store.schema import RunKind
from reports.subject import registered
from reports.text import contrast, count, edge_name, edge_rank, label, metric_name, number, share
from reports.verdict.agreement import agreement
from reports.verdict.changes import Change, Counts, What, pin_name
from reports.verdict.drift import UNSEEN, Drift, PinComparison
from reports.verdict.vanished import LONGEST, Vanished
from stability.core.findings import Severity


def place(m: Measurement | Change) -> str:
    """Return text that names a measurement by quantity, case and edge."""
    return f"{label(m.quantity, 60)} in case {label(m.case, 40)} ({edge_name(m.edge)})"


def _size(m: Measurement) -> str:
    text = f"{metric_name(m.metric)} {number(m.value)}"
    if math.isnan(m.tolerance):
        return f"{text} with no tolerance to compare it with"
    over = m.fraction
    times = ""
    if math.isfinite(over) and over > 1:
        times = f", {over:,.1f} times over" if over < 1e4 else f", {number(over)} times over"
    return f"{text} against a tolerance of {number(m.tolerance)}{times}"


def regressed(run: Run, baseline: Run | None, counts: Counts, starts: Sequence[Measurement]) -> str:
    """Say how many gates or probes failed, and where the failure starts."""
    total = counts.new + counts.persisting
    new = "all new" if not counts.persisting else f"{counts.new:,} new"
    if baseline is None:
        # Without a baseline no failure can be called new.
        head = f"{count(total, 'failure')}, with no earlier run to compare with."
    elif total > 1:
        head = f"{total:,} failures, {new}."
    else:
        head = f"1 {'new' if counts.new else 'persisting'} failure."
    if baseline is not None:
        before = {m.key for m in baseline.measurements}
        failed = (m for m in run.measurements if m.verdict is Verdict.FAIL)
        if unknown := sum(m.key not in before for m in failed):
            # They are called new, but may have failed in runs before the baseline.
            head += f" The baseline did not measure {unknown:,} of these gates."
    if wrong := [document for document in run.manifest.ports if not document["holds"]]:
        # The diagnosis of a port is more specific than its first failing stage.
        others = f"; {count(len(wrong) - 1, 'more port')} of this run" if len(wrong) > 1 else ""
        return f"{head} {label(wrong[0]['sentence'], 400)}{others}."
    failing = [m for m in starts if m.verdict is Verdict.FAIL]
    if failing:
        more = len(failing) - 1
        others = f"; {count(more, 'other comparison', 'other comparisons')} fail" + (
            "s" if more == 1 else ""
        )
        size = _size(failing[0])
        end = f"{others}." if more else "."
        return f"{head} It starts at {place(failing[0])}: {size}{end}{_shared(run, failing)}"
    errors = [f for f in run.findings if f.severity is Severity.ERROR]
    if errors:
        f = errors[0]
        return f"{head} Probe {label(f.probe, 40)} on {label(f.subject, 60)}: {label(f.message)}."
    blocked = starts[0] if starts else None
    return head + (f" It starts at {place(blocked)}: not comparable." if blocked else "")


def _shared(run: Run, failing: Sequence[Measurement]) -> str:
    """Say what the subject of the failing case suspects; empty if it suspects nothing."""
    case = failing[0].case
    broken = {m.edge for m in failing if m.case == case}
    measured = {m.edge for m in run.measurements if m.case == case}
    hints = filter(None, (subject.hint(measured, broken) for subject in registered()))
    return "".join(f" {hint}" for hint in hints)


def worse(run: Run, changes: Sequence[Change], counts: Counts) -> str:
    """Say that all gates hold but values left their history or error level; name the worst one."""
    first = next(c for c in changes if c.what in (What.WORSE, What.DRIFTED))
    then, now = contrast(first.before, first.now)
    return (
        f"{selection(run)}All {count(counts.gates, 'gate')} hold, but "
        f"{count(counts.worse, 'value')} left their "
        f"history or level. The worst is {place(first)}: {metric_name(first.metric)} {then} → "
        f"{now}, {first.note}."
    )


def incomplete(run: Run, missing: Sequence[str]) -> str:
    """Say which suite is incomplete or missing, and why."""
    suites = run.manifest.suites
    if not suites:
        return "The run does not list its planned suites, so nothing shows that it is complete."
    if all(suite.whole for suite in suites):
        names = ", ".join(label(name, 40) for name in missing)
        return (
            f"Nothing failed, but earlier runs ran a suite that this run lacks: {names}. "
            f"{_retire(run, missing[0])}"
        )
    partial = [suite for suite in suites if not suite.whole]
    first = partial[0]
    reason = f": {label(first.reason, 120)}" if first.reason else ""
    more = f" {count(len(partial) - 1, 'more suite')} did not finish." if len(partial) > 1 else ""
    return (
        f"Nothing failed, but suite {label(first.name, 40)} is incomplete "
        f"({label(first.status, 40)}): {first.executed:,} of "
        f"{count(first.planned, 'check')} executed{reason}.{more}"
    )


def vanished(run: Run, gone: Vanished) -> str:
    """Say which gates earlier runs measured that this run does not plan, and how to retire them."""
    newest = max(gone.groups.items(), key=lambda item: (item[1].created, item[0]))
    (case, edge, kind), seen = newest
    groups = count(len(gone.groups), "group of gates", "groups of gates")
    kinds = f"{label(kind, 40)} gates" if kind else "gates"
    return (
        f"Nothing failed, but this run does not plan {groups} that earlier runs measured, first: "
        f"{kinds} of case {label(case, 40)} ({edge_name(edge)}), last in run "
        f"{label(seen.run, 60)}. {_retire(run, case)}"
    )


def _retire(run: Run, name: str) -> str:
    # Whole, to be copied; `--` where it would be taken for an option.
    quoted = shlex.quote(label(name, LONGEST))
    quoted = f"-- {quoted}" if name.startswith("-") else quoted
    return f"If that is intended: `retire --reason ... {shlex.quote(run.id)} {quoted}`."


def _shortened(reason: str, limit: int = 80) -> str:
    """Return a reason, cut after a whole word to at most `limit` characters."""
    return label(textwrap.shorten(reason, limit, placeholder=" …"), limit)


def selection(run: Run) -> str:
    """Say which cases were selected; empty for a run of all cases."""
    manifest = run.manifest
    if manifest.kind is not RunKind.NIGHTLY or not manifest.selected:
        return ""
    names = ", ".join(label(name, 40) for name in manifest.selected[:3])
    more = f" and {len(manifest.selected) - 3} more" if len(manifest.selected) > 3 else ""
    were = "was" if len(manifest.selected) == 1 else "were"
    return f"Only {names}{more} {were} measured, not the whole night. "


def tightest(run: Run) -> str:
    """Name the gate that is closest to its tolerance."""
    gates = [m for m in run.measurements if m.verdict is Verdict.PASS]
    worst = max(gates, key=lambda m: m.fraction)
    return f"the closest is {place(worst)} at {share(worst.fraction)} of its tolerance"


def since(
    run: Run, baseline: Run | None, environment: Sequence[str], changes: Sequence[Change]
) -> str:
    """Say how a passing run differs from its baseline and from pinned error levels.

    A value that does not repeat bit by bit and has a short history may grow without being a change.
    The sentence therefore also counts the equal gates, and names the gate that grew most.
    """
    if baseline is None:
        return f"There is no earlier comparable run.{_levels(changes)}"
    name = f"run {label(baseline.id, 60)}"
    if environment:
        more = f" and {len(environment) - 1} more" if len(environment) > 1 else ""
        return f"The environment differs from {name}: {label(environment[0], 160)}{more}."
    if values := _counted([c.what for c in changes if not c.kind]):
        return f"Since {name}: {values}.{_levels(changes)}"
    found = agreement(baseline, run)
    if found.equal:
        return f"Nothing changed since {name}.{_levels(changes)}"
    text = f"Since {name} no gate failed or left its history: {found.sentence()}"
    return f"{text}{_growth(run, baseline)}{_levels(changes)}"


def _growth(run: Run, baseline: Run) -> str:
    """Name the gate whose value grew by the largest factor since the baseline; empty if none grew.

    Only gates with the same work in both runs count.
    """
    before = {m.key: m for m in baseline.measurements}
    grown = [
        (m.value / then.value, m)
        for m in run.measurements
        if m.verdict is Verdict.PASS
        and (then := before.get(m.key)) is not None
        and then.identity == m.identity
        and m.value > then.value > 0
    ]
    if not grown:
        return ""
    ratio, most = max(grown, key=lambda each: each[0])
    return f" The largest growth is {ratio:,.2f} times, {place(most)}."


def against_one(
    run: Run, baseline: Run | None, environment: Sequence[str], changes: Sequence[Change]
) -> str:
    """Say how a passing run compares with the only run that it was judged against.

    If it was judged without another run, say that all its gates hold.
    """
    if baseline is None:
        gates = sum(m.verdict is not Verdict.INFO for m in run.measurements)
        return f"{selection(run)}All {count(gates, 'gate')} hold; {tightest(run)}."
    found, closest = agreement(baseline, run), tightest(run)
    if found.equal:
        differs = f" {since(run, baseline, environment, changes)}" if environment else ""
        return f"{selection(run)}{found.sentence()} All hold; {closest}.{differs}"
    text = since(run, baseline, environment, changes)
    if found.sentence() not in text:
        text = f"{text} {found.sentence()}"
    return (
        f"{selection(run)}All {count(found.compared + found.other_work + found.only_now, 'gate')} "
        f"hold; {closest}. {text}"
    )


def nothing_shared(run: Run, baseline: Run) -> str:
    """Say that no gate of a passing run can be compared with the only run it was judged against."""
    found = agreement(baseline, run)
    gates = count(found.other_work + found.only_now, "gate")
    other = f", {found.other_work:,} of them of other work" if found.other_work else ""
    return (
        f"{selection(run)}Nothing was compared: run {label(baseline.id, 60)} measured none of the "
        f"{gates} of this run{other}. By themselves all hold; {tightest(run)}."
    )


def _levels(changes: Sequence[Change]) -> str:
    """Say for how many groups of gates the level changed since a pinned run; "" if for none.

    There is one number per kind of change (`What`), such as drifted or not comparable.
    """
    groups = {(c.case, c.edge, c.kind, c.metric): c.what for c in changes if c.kind}
    return f" Levels compared with a pinned run: {_counted(groups.values())}." if groups else ""


def _counted(whats: Collection[What]) -> str:
    listed = [(what, sum(each is what for each in whats)) for what in What]
    return ", ".join(f"{number_of:,} {what}" for what, number_of in listed if number_of)


def changed(run: Run, changes: Sequence[Change], baseline: Run) -> str:
    """Say which failures are fixed, and which values should have repeated exactly and did not."""
    moved = [c for c in changes if c.what in (What.CHANGED, What.FIXED)]
    first = min(
        moved,
        key=lambda c: (math.isnan(c.tolerance), edge_rank(c.edge), c.stage < 0, c.stage, c.case),
    )
    fixed = sum(c.what is What.FIXED for c in moved)
    rest = len(moved) - fixed
    before = f"run {label(baseline.id, 60)}"
    differ = f"{count(rest, 'value')} that should repeat exactly differ{'s' if rest == 1 else ''}"
    facts = sum(c.what is What.CHANGED and math.isnan(c.tolerance) for c in moved)
    if 0 < facts < rest:
        # Other parts of the page count gates only, so both numbers are given.
        differ += f" ({rest - facts:,} of gates, {facts:,} without a tolerance)"
    if fixed:
        head = f"All gates hold: {count(fixed, 'failure')} of {before} {_are(fixed)} fixed"
        head += f", and {differ} from it." if rest else "."
    else:
        head = f"All gates hold, but {differ} from {before}."
    then, now = contrast(first.before, first.now)
    return (
        f"{selection(run)}{head} {'The first is' if fixed else 'It starts at'} {place(first)}: "
        f"{metric_name(first.metric)} {then} → {now}; {tightest(run)}."
    )


def _are(number_of: int) -> str:
    return "is" if number_of == 1 else "are"


def against(comparison: PinComparison) -> str:
    """Name a pinned run, why it was chosen, and how many levels could be compared with it."""
    pin = comparison.pin
    why = f", pinned {label(pin.pinned, 20)} ({_shortened(pin.reason)})"
    if not pin.pinned:
        why = ", the oldest healthy run on this machine"
    not_yet = len(comparison.not_yet)
    judged = comparison.comparable - not_yet
    count_of = f"{judged:,} of {count(comparison.levels, 'level')} comparable"
    if not_yet:
        count_of += f", {not_yet:,} not comparable yet"
    differs = (
        f"; {'; '.join(label(d, 200) for d in comparison.differs)}" if not comparison.same else ""
    )
    return f"run {label(pin.run, 60)}{why}: {count_of}{differs}"


def first_night(run: Run, comparisons: Sequence[PinComparison]) -> str:
    """Say that no error level could be compared with an earlier run of this machine.

    The text also counts the levels that were compared with pinned runs of other machines, and has
    the largest ratio. It is empty if a level could be compared with a run of this machine, and for
    sessions of tests of ports that have no pinned run.
    """
    if any(h.same and h.comparable for h in comparisons):
        return ""
    if run.manifest.without_megalodon and not comparisons:
        # The bounds of ports are measured with them, and a session of tests cannot be an anchor.
        return ""
    if fingerprint(run.manifest.environment) is None:
        who = " The processor cannot be identified, so no later run is compared with it"
    elif run.manifest.selected:
        who = " There is no whole night of this machine to compare levels with"
    else:
        what = "night" if run.manifest.kind is RunKind.NIGHTLY else "run"
        who = f" First {what} on this machine: it becomes the anchor of later ones"
    others = [h for h in comparisons if not h.same]
    if not others:
        return f"{who}; no levels were compared: there is no pinned run."
    other = others[0]
    found = [each.largest for each in others if each.largest is not None]
    if not found:
        differs = other.differs[0] if other.differs else "other work"
        return (
            f"{who}; no levels were compared: {pin_name(other)} has no level of the same work "
            f"({label(differs, 160)})."
        )
    largest = max(found, key=lambda drift: drift.ratio)
    case, edge, kind, metric = largest.group
    total = sum(each.comparable for each in others)
    # The page and the terminal name run and machine in the list of comparisons.
    runs = "a pinned run of another machine"
    if len(others) > 1:
        runs = f"{len(others)} pinned runs of other machines"
    return (
        f"{who}. {count(total, 'level')} compared with {runs}: "
        f"largest ratio {largest.ratio:.2f}, limit {largest.limit:.2f} ({label(case, 40)}, {kind}, "
        f"{edge_name(edge)}, {metric_name(metric)}).{_not_pinned(others)}{_not_yet(others)}"
    )


def _not_pinned(others: Sequence[PinComparison]) -> str:
    """Say how many error levels of the run no pinned run measured by the same work; "" if none."""
    left = others[0].levels - sum(each.covered for each in others)
    if left <= 0:
        return ""
    has = "has" if left == 1 else "have"
    return f" {count(left, 'other level')} {has} no pinned level of the same work."


def _not_yet(others: Sequence[PinComparison]) -> str:
    """Say how many error levels are not comparable yet, because rounding may explain ratios above
    `UNSEEN`; "" if there are none."""
    number_of = sum(len(each.not_yet) for each in others)
    if not number_of:
        return ""
    return (
        f" {number_of:,} of the compared {_are(number_of)} not comparable yet: rounding alone may "
        f"move {'it' if number_of == 1 else 'them'} by more than {UNSEEN:g} times. No level grew "
        f"by more than {UNSEEN:g} times."
    )


def not_used(unusable: Sequence[str]) -> str:
    """Say how many pinned baselines could not be used; "" if all could."""
    if not unusable:
        return ""
    verb = "was" if len(unusable) == 1 else "were"
    names = ", ".join(label(line.partition(" is not used")[0], 60) for line in unusable[:3])
    return f" {count(len(unusable), 'pinned baseline')} {verb} not used ({names})."


def unseen(run: Run, found: Sequence[tuple[Drift, PinComparison]]) -> str:
    """Say which error level of a machine's first night grew most, and how to decide about it.

    Such growth, above `UNSEEN`, may be rounding or a loss of accuracy.
    """
    first, other = max(found, key=lambda each: each[0].ratio)
    case, edge, kind, metric = first.group
    several = count(len(found), "level")
    return (
        f"All gates hold, but {several} grew by more than {UNSEEN:g} times and no earlier run of "
        f"this machine shows whether that is its rounding or a loss. The largest is "
        f"{first.ratio:.2f} times the {first.what} {kind} of {pin_name(other)} "
        f"({label(case, 40)}, {edge_name(edge)}, {metric_name(metric)}); rounding explains up to "
        f"{first.limit:.2f}. Find out why, then `pin {label(run.id, 60)} --reason ...`."
    )
