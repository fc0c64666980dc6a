"""Finding stored runs by name, judging them, comparing two, and drawing their pages.

Source: docs/reports.md "Store", docs/verdicts.md "Comparability", docs/reports.md "Command line".
"""

from __future__ import annotations

import contextlib
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from parity.engine.measure.measurement import Verdict
from reports.provenance.host import fingerprint
from reports.store.manifest import AHEAD, Manifest, read_manifest
from reports.store.reader import checksum, read_bytes, read_json
from reports.store.runs import (
    DATED,
    Run,
    RunInfo,
    check_root,
    list_runs,
    none_yet,
    one_look,
    read_run,
)
from reports.store.schema import MANIFEST, PAGE, RunKind, StoreError
from reports.store.shared import address_of
from reports.subject import main
from reports.text import contrast, count, edge_name, for_json, metric_name
from reports.verdict import pins, since
from reports.verdict.anchors import anchor_pins, find_anchors
from reports.verdict.changes import Change
from reports.verdict.decide import Decision, ExitCode, Word, decide
from reports.verdict.drift import levels_of
from reports.verdict.history import History, load_history
from reports.verdict.levels import group_gates
from reports.verdict.replays import account_commands, suite_of
from reports.verdict.vanished import read_retired, vanished

_NO_VERDICT = {
    RunKind.BENCH: "its numbers are on the next nightly's page",
    RunKind.SHARD: "`merge` it with the others first",
    RunKind.WATCH: "its page shows what was measured, and `open` shows the page",
}
_CHANGE = ("what", "case", "edge", "quantity", "metric", "before", "now", "tolerance", "note")
SHOWN = 20
"""Largest number of changes that are listed in the terminal."""
NAMED = 5
"""Largest number of damaged runs that are listed below a verdict."""


@dataclass(frozen=True)
class Found:
    """A run found by name.

    Attributes:
        folder: folder of the run.
        newer: only for the name `latest`: damaged folders that may hold a newer run, each with the
            reason. If there are any, the found run may not be the newest.
        ahead: only for `latest`: hours by which the run is dated ahead of the clock; negative for a
            run in the past.
        others: only for `latest`: newest run of each other kind and subject (ports), as name and
            verdict, if it did not pass when it was stored.
    """

    folder: Path
    newer: tuple[tuple[Path, str], ...] = ()
    ahead: float = 0.0
    others: tuple[tuple[str, str], ...] = ()


def find_run(root: Path, name: str) -> Path:
    """Return the folder of a run, given its path, its id, a prefix of its id, `latest` or `pinned`.

    `latest` is the newest run of a kind with a verdict (no bench, shard or watched training), and
    `pinned` the newest pinned run.

    Raises:
        StoreError: there is no such run, the prefix is ambiguous, or a damaged run may be newer
            than `latest`.
    """
    found = look_up(root, name)
    if found.newer:
        folder, why = found.newer[0]
        raise StoreError(
            f"expected the newest run, but {folder.name} may be newer than {found.folder.name} and "
            f"cannot be read: {why}. Restore or delete it, or name the run to use"
        )
    return found.folder


def look_up(root: Path, name: str) -> Found:
    """Find a run like `find_run`; damaged runs that may be newer than `latest` raise no error.

    Raises:
        StoreError: there is no such run, or the prefix is ambiguous.
    """
    # A folder called `latest` or `pinned` in the current folder does not hide the keyword.
    if name not in ("latest", "pinned") and _is_run(Path(name)):
        return Found(Path(name))
    if name == "blessed":
        raise StoreError("a pinned run is now named 'pinned', not 'blessed'")
    # A complete id needs no listing. It may be that of a damaged run; reading it then reports that.
    if name not in ("latest", "pinned") and _is_run(root / name) and name == Path(name).name:
        return Found(root / name)
    check_root(root)
    stored, unreadable = list_runs(root)
    if name == "latest":
        matches = [run.folder for run in stored if run.kind not in _NO_VERDICT][-1:]
    elif name == "pinned":
        matches = [run.folder for run in stored if is_pinned(root, run.manifest)][-1:]
    else:
        matches = [run.folder for run in stored if run.folder.name.startswith(name)]
        matches += [f for f, _ in unreadable if f.name.startswith(name) and f not in matches]
    if len(matches) == 1:
        if name != "latest":
            return Found(matches[0])
        newest = next(run for run in stored if run.folder == matches[0])
        created = newest.manifest.created
        ahead = -_hours_since(created)
        return Found(
            matches[0], _newer(created, stored, unreadable), ahead, _others(newest, stored)
        )
    folders, place = matches or [run.folder for run in stored], address_of(root)
    bad = "".join(f"; {folder.name} is damaged: {why}" for folder, why in unreadable[-3:])
    if not folders:
        text = f"no run {name!r}: {none_yet(root)}."
        raise StoreError(f"no run {name!r} can be read in {place}{bad}" if bad else text)
    names = ", ".join(folder.name for folder in folders[-5:])
    what = "several runs begin with" if matches else "no run"
    raise StoreError(f"{what} {name!r} in {place}; there are {names}. `list` shows all of them.")


def _others(newest: RunInfo, stored: Sequence[RunInfo]) -> tuple[tuple[str, str], ...]:
    """Return name and verdict of the newest run of each kind and subject other than those of
    `newest`, if it did not pass."""
    seen, found = [newest], []
    for run in reversed(stored):
        if run.kind in _NO_VERDICT or any(run.manifest.shares_subject(s.manifest) for s in seen):
            continue
        seen.append(run)
        if run.manifest.verdict not in (Word.PASS, Word.CHANGED):
            found.append((run.folder.name, run.manifest.verdict or "not judged"))
    return tuple(found)


def _is_run(folder: Path) -> bool:
    # Reading the run reports damage. A link to itself is not a folder.
    return os.path.lexists(folder / MANIFEST)


def _newer(
    created: str, stored: Sequence[RunInfo], unreadable: Sequence[tuple[Path, str]]
) -> tuple[tuple[Path, str], ...]:
    """Return the damaged folders that may hold a run made at `created` or later, with the reason.

    They include folders whose age is unknown.
    """
    return tuple((f, why) for f, why in unreadable if _may_be_newer(f, created, stored))


def _may_be_newer(folder: Path, created: str, stored: Sequence[RunInfo]) -> bool:
    """Return whether a damaged folder may hold a run made at `created` or later.

    Its run.json decides; if that is damaged, the later of the dates in the folder's name and in
    what remains of run.json; without such a date, the folder's modification time.
    """
    if folder.name.startswith("."):
        return False
    try:
        manifest = read_manifest(folder)
    except StoreError:
        pass
    else:
        # An intact copy of a readable run does not count. Another run with the same id does: two
        # machines may begin in the same second.
        own = checksum(read_bytes(folder / MANIFEST))
        twins = (r.folder for r in stored if r.manifest.id == manifest.id)
        copied = any(checksum(read_bytes(twin / MANIFEST)) == own for twin in twins)
        return manifest.created >= created and not copied
    if dates := _dates_of(folder):
        # The later date counts: an older one proves nothing, since files may have been moved.
        return max(dates) >= created[:19]
    try:
        changed = datetime.fromtimestamp(folder.lstat().st_mtime, UTC)
        return changed >= datetime.fromisoformat(created)
    except (OSError, TypeError, ValueError):
        return True


def _dates_of(folder: Path) -> list[str]:
    """Return when a damaged run began, according to its folder name and to its damaged run.json.

    There may be none, one or two dates (ISO 8601, without a time zone); two differ if files were
    moved between folders.
    """
    dates = []
    if date := DATED.match(folder.name):
        day, hour, minute, second = date.groups()
        dates.append(f"{day}T{hour}:{minute}:{second}")
    with contextlib.suppress(StoreError):
        created = read_json(folder / MANIFEST).get("created")
        dates += [created[:19]] if isinstance(created, str) else []
    return dates


def withheld(decision: Decision, found: Found) -> Decision:
    """Return the verdict that `gate` reports: `decision`, or INCOMPLETE if `latest` is doubtful.

    PASS and CHANGED become INCOMPLETE if a damaged folder may hold a newer run, or if the run is
    dated in the future.
    """
    if decision.exit_code is ExitCode.PASS and found.ahead > AHEAD:
        sentence = (
            f"Run {found.folder.name} is dated {found.ahead:,.1f} hours ahead of this machine's "
            "clock, so that it would stay the newest. Set the clocks right and measure again, or "
            "name the run to judge."
        )
        return replace(
            decision, word=Word.INCOMPLETE, exit_code=ExitCode.INCOMPLETE, sentence=sentence
        )
    if not found.newer or decision.exit_code is not ExitCode.PASS:
        return decision
    damaged = count(len(found.newer), "newer folder is damaged", "newer folders are damaged")
    sentence = (
        f"{damaged}, so run {found.folder.name}, which is {decision.word}, may not be "
        "the newest. Restore or delete the damaged folders, or name the run to judge."
    )
    return replace(decision, word=Word.INCOMPLETE, exit_code=ExitCode.INCOMPLETE, sentence=sentence)


def _hours_since(created: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(created)).total_seconds() / 3600


def run_line(found: Found, run: Run) -> str:
    """Describe which run was judged and how old it is."""
    created = run.manifest.created
    try:
        hours = _hours_since(created)
    except (TypeError, ValueError):
        return f"judged: run {found.folder.name}, begun at {created}"
    age = f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:,.0f} days"
    unchecked = "" if run.manifest.checksums is not None else (
        f"; stored by schema {run.manifest.migrated_from}, which has no checksums: its files are "
        "unchecked"
    )  # fmt: skip
    return f"judged: run {found.folder.name}, {age} old{unchecked}"


def is_pinned(root: Path, manifest: Manifest) -> bool:
    """Return whether a run below `root` is pinned."""
    return manifest.id in pins.ids_of(root, manifest)


@dataclass(frozen=True)
class JudgedRun:
    """A stored run with its verdict and the history used for it."""

    run: Run
    decision: Decision
    history: History
    unusable_pins: tuple[str, ...] = ()
    """One sentence for each pinned baseline that could not be used."""


def judge(root: Path, run: Run) -> JudgedRun:
    """Judge a run by its history under `root`, by pinned runs, and by the anchors of its machine.

    Pinned runs are those of its class of device. Anchors (oldest passing runs) are used for error
    levels that no pinned run of the machine has.

    Raises:
        StoreError: the root cannot be listed.
    """
    with one_look():
        return _judge(root, run)


def _judge(root: Path, run: Run) -> JudgedRun:
    history = load_history(root, run)
    pinned = pins.pins_of(root, run.manifest)
    anchor = anchor_pins(anchors_of(root, run, pinned), run)
    retired, why = read_retired(pins.retired_home(root, run.manifest))
    decision = decide(
        run,
        history.baseline,
        history.past,
        (*pinned.pins, *anchor),
        unusable=pinned.unusable,
        gone=vanished(run, history.earlier, retired),
    )
    unusable = (*pinned.unusable, *([why] if why else ()))
    bad = [(pins.home(root, run.manifest), reason) for reason in unusable]
    history = replace(history, unreadable=(*history.unreadable, *bad))
    return JudgedRun(run, decision, history, unusable)


def anchors_of(root: Path, run: Run, pinned: pins.Pins) -> tuple[Run, ...]:
    """Return the anchors of a run's machine: its oldest passing runs, to compare error levels with.

    Each error level that no pinned run of the machine has needs an anchor: the oldest run of this
    machine that measured the level and passes when judged without an anchor. Several levels may
    share an anchor.
    """

    def healthy(old: Run) -> bool:
        # Nights stored before runs had a contract may still be anchors.
        decision = decide(old, None, {}, pinned.pins, old_schema_may_pass=True)
        return decision.exit_code is ExitCode.PASS

    return find_anchors(root, without_pinned(run, pinned), healthy)


def without_pinned(run: Run, pinned: pins.Pins) -> Run:
    """Return `run` with only the gates of those error levels that no pinned run of its machine
    has."""
    machine = fingerprint(run.manifest.environment)
    own = [pin for pin in pinned.pins if pin.fingerprint == machine]
    held = {(group, level.work) for pin in own for group, level in pin.groups.items()}
    works = {group: level.work for group, level in levels_of(run, {}).items()}
    gates = group_gates(run.measurements)
    left = [m for group in works for m in gates[group] if (group, works[group]) not in held]
    return replace(run, measurements=tuple(left))


def check_age(folder: Path, hours: float) -> None:
    """Check that a run began at most `hours` ago.

    Raises:
        StoreError: the run is older, is dated in the future by more than `AHEAD` hours, or cannot
            be read.
    """
    # Reading checks that the time is valid.
    age = _hours_since(read_run(folder).manifest.created)
    if age < -AHEAD:
        raise StoreError(
            f"expected a run that began at most {hours:g} hours ago, but {folder.name} is dated "
            f"{-age:.1f} hours in the future. Check the clock of the machine that measured it"
        )
    # Written so that a NaN fails.
    if not age <= hours:
        raise StoreError(
            f"expected a run that began at most {hours:g} hours ago, but {folder.name} is "
            f"{age:.1f} hours old: no newer run was stored. Check the job that measures."
        )


def judge_stored(folder: Path, against: Path | None = None) -> JudgedRun:
    """Judge a stored run against the run in `against` alone; None judges it as `judge` does.

    Raises:
        StoreError: a run cannot be read, or is of a kind without a verdict.
    """
    run = read_judgeable(folder)
    if against is None:
        return judge(folder.parent, run)
    return JudgedRun(run, decide(run, read_judgeable(against), alone=True), History())


def comparison_lines(judged_run: JudgedRun) -> list[str]:
    """Return the lines to show below a verdict.

    They say since when the first failing gate fails and why, which pinned runs and anchors the
    error levels were compared with, and which pinned baselines and runs could not be used.
    """
    lines = [f"levels compared with {text}" for text in judged_run.decision.against]
    return [*_failure_lines(judged_run), *lines, *judged_run.unusable_pins, *_damaged(judged_run)]


def _damaged(judged_run: JudgedRun) -> list[str]:
    """Return a line per damaged run that the verdict had to ignore; beyond `NAMED`, a count."""
    pins_too = set(judged_run.unusable_pins)
    bad = [(f, why) for f, why in judged_run.history.unreadable if why not in pins_too]
    lines = [f"not readable: {folder.name}: {why}" for folder, why in bad[:NAMED]]
    if len(bad) > NAMED:
        lines.append(f"not readable: {count(len(bad) - NAMED, 'more folder')}; `list` names them")
    return lines


def _failure_lines(judged_run: JudgedRun) -> list[str]:
    """Return lines on the first failing gate: since when it fails, its explanation, and commands
    that explain its case.

    Empty if no gate fails.
    """
    run, starts = judged_run.run, judged_run.decision.starts
    if not starts or starts[0].verdict is not Verdict.FAIL:
        return []
    first, lines = starts[0], []
    if (found := since.since_when(first, run, judged_run.history)) is not None:
        lines.append(f"since when: {since.sentence(found, run)}")
        if found.held is not None:
            lines[0] += f" This gate held in run {found.folder}; commits: "
            lines[0] += since.commits(found.held, found.failed)
    # The explanation of a stream names call and stage in its meaning, and has no list of stages.
    accounts = [e for e in run.explanations if e.case == first.case and (e.culprit or e.lines)]
    for e in accounts:
        acting = f"; parameters that act there: {', '.join(e.parameters)}" if e.parameters else ""
        which = f"{e.quantity} is " if e.culprit else ""
        lines.append(f"explained: {which}{e.meaning.rstrip('.')}{acting}")
    lines += [f"elements that break the tolerance: {e.where}" for e in accounts if e.where]
    named = [line for e in accounts for line in e.lines[:1]]
    for line in named:
        lines += [
            f"line: {line.place}: {line.why}",
            *textwrap.indent(line.excerpt, "    ").split("\n"),
        ]
    lines = [text for text in lines if text]
    commands = account_commands(first.case, suite_of(first), run.manifest.fault)
    return [*lines, *(f"{c['label'].split()[0]}: {c['command']}" for c in commands)]


def page_of(folder: Path, page: Path | None = None) -> str:
    """Return the HTML page of a stored run, drawn with this version from the stored data.

    Args:
        folder: folder of the run.
        page: path of the page, for its links to other runs; None for the run's folder.
    """
    from reports.page.render import render

    if read_manifest(folder).kind is RunKind.WATCH:
        from reports.page.watching import render as render_watch

        return render_watch(read_run(folder))
    judged_run = judge_stored(folder)
    runs = runs_from(folder / PAGE if page is None else page, folder)
    return render(judged_run.run, judged_run.decision, judged_run.history, runs)


def runs_from(page: Path, folder: Path) -> str:
    """Return the relative URL from `page` to the folder that contains the run `folder`."""
    address = os.path.relpath(folder.resolve().parent, page.resolve().parent)
    return quote(Path(address).as_posix())


def read_judgeable(folder: Path) -> Run:
    """Read a run of a kind that has a verdict.

    Raises:
        StoreError: it cannot be read, or is a bench, a shard or a watched training.
    """
    run = read_run(folder)
    if advice := _NO_VERDICT.get(run.manifest.kind):
        raise StoreError(
            f"expected a night, or a run of ports, but {folder.name} is a {run.manifest.kind}; "
            f"{advice}."
        )
    return run


def change_lines(changes: Sequence[Change]) -> list[str]:
    """Return a line for each of the first `SHOWN` changes, and one that counts the omitted ones."""
    lines = []
    for change in changes[:SHOWN]:
        before, now = contrast(change.before, change.now)
        place = f"{change.quantity} in {change.case}"
        edge = f" ({edge_name(change.edge)})" if change.edge else ""
        note = f"  {change.note}" if change.note else ""
        size = f"{metric_name(change.metric)} {before} → {now}"
        lines.append(f"{change.what}: {place}{edge}: {size}{note}")
    if len(changes) > SHOWN:
        lines.append(f"and {count(len(changes) - SHOWN, 'more change')}")
    return lines


def explanations_of(run: Run) -> list[dict[str, Any]]:
    """Return the explanations of failing cases as JSON values: stage, elements, lines, commands.

    The commands are those that are shown below a verdict; only cases of a model have any.
    """
    suite = main().suite
    ours = {m.case for m in run.measurements if suite_of(m) == suite}
    return [
        {
            "case": e.case,
            "edge": e.edge,
            "quantity": e.quantity,
            "meaning": e.meaning,
            "parameters": list(e.parameters),
            "elements": e.where,
            "lines": [{"place": x.place, "why": x.why, "excerpt": x.excerpt} for x in e.lines],
            "commands": [
                command["command"]
                for command in (
                    account_commands(e.case, suite, run.manifest.fault) if e.case in ours else ()
                )
            ],
        }
        for e in run.explanations
        if not e.holds
    ]


def as_document(decision: Decision) -> dict[str, Any]:
    """Return a verdict as JSON values."""
    return {
        "verdict": decision.word.value,
        "exit_code": int(decision.exit_code),
        "sentence": decision.sentence,
        "baseline": decision.baseline_id,
        "against": list(decision.against),
        "environment": list(decision.environment),
        "changes": [
            {name: for_json(getattr(change, name)) for name in _CHANGE}
            for change in decision.changes
        ],
    }
