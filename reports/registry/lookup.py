"""What stored runs say: two of them compared, one of them judged or drawn again.

Source: docs/reports.md "Store", docs/verdicts.md "Comparability", docs/reports.md "Command line".
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from parity.engine.measurement import Verdict
from parity.megalodon.cases import SUITE
from reports.provenance.host import fingerprint
from reports.store.manifest import Manifest, read_manifest
from reports.store.reader import checksum, read_bytes, read_json
from reports.store.runs import Run, RunInfo, list_runs, one_look, read_run
from reports.store.schema import MANIFEST, PAGE, RunKind, StoreError
from reports.store.shared import address_of
from reports.text import contrast, count, edge_name, for_json, metric_name
from reports.verdict import pins, since
from reports.verdict.anchors import anchor_pins, find_anchors
from reports.verdict.changes import Change
from reports.verdict.decide import Decision, ExitCode, Word, decide
from reports.verdict.document import account_commands, suite_of
from reports.verdict.history import History, load_history

_NO_VERDICT = {
    RunKind.BENCH: "its numbers are on the next nightly's page",
    RunKind.SHARD: "`merge` it with the others first",
    RunKind.WATCH: "its page shows what was measured, and `open` shows the page",
}
_DATED = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d)-(\d\d)-(\d\d)Z")
"""How the ids begin that a run gets by itself: with the time at which it began."""
_CHANGE = ("what", "case", "edge", "quantity", "metric", "before", "now", "tolerance", "note")
SHOWN = 20
"""Changes that are listed in the terminal."""
AHEAD = 1.0
"""Hours that a run may be dated ahead of the clock: two machines' clocks differ by seconds."""
NAMED = 5
"""Damaged runs that are named below a verdict."""


@dataclass(frozen=True)
class Found:
    """A run that was asked for by a name.

    Attributes:
        folder: of the run.
        newer: with a reason, damaged folders that may hold a newer run than `latest` found: the
            verdict of an older one is no answer then.
        ahead: hours by which `latest` is dated ahead of the clock.
    """

    folder: Path
    newer: tuple[tuple[Path, str], ...] = ()
    ahead: float = 0.0


def find_run(root: Path, name: str) -> Path:
    """Return the folder of a run: a path, its id, the beginning of its id, `latest` or `pinned`.

    `latest` is the newest run that has a verdict: a bench or a shard has none.

    Raises:
        StoreError: there is none, several begin so, or a damaged run may be newer than `latest`.
    """
    found = look_up(root, name)
    if found.newer:
        folder, why = found.newer[0]
        raise StoreError(
            f"expected the newest run, but {folder.name} may be newer than {found.folder.name} and "
            f"cannot be read: {why}. Restore or delete it, or name the run that is meant"
        )
    return found.folder


def look_up(root: Path, name: str) -> Found:
    """Return what `find_run` does, and for `latest` the damaged runs that may be newer."""
    # A folder of that name in the current folder does not stand for the newest run.
    if name not in ("latest", "pinned") and _is_run(Path(name)):
        return Found(Path(name))
    if name == "blessed":
        raise StoreError("a pinned run is now named 'pinned', not 'blessed'")
    # A whole name needs no list, and may be that of a damaged run, which reading it then names.
    if name not in ("latest", "pinned") and _is_run(root / name) and name == Path(name).name:
        return Found(root / name)
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
        created = next(run.manifest.created for run in stored if run.folder == matches[0])
        return Found(matches[0], _newer(created, stored, unreadable), -_hours_since(created))
    folders, place = matches or [run.folder for run in stored], address_of(root)
    bad = "".join(f"; {folder.name} is damaged: {why}" for folder, why in unreadable[-3:])
    if not folders:
        text = f"no run {name!r}: there are no runs in {place} yet; `nightly` makes one."
        raise StoreError(f"no run {name!r} can be read in {place}{bad}" if bad else text)
    names = ", ".join(folder.name for folder in folders[-5:])
    what = "several runs begin with" if matches else "no run"
    raise StoreError(f"{what} {name!r} in {place}; there are {names}. `list` shows all of them.")


def _is_run(folder: Path) -> bool:
    # One that is damaged is named by whoever reads it; a link to itself is no folder.
    return os.path.lexists(folder / MANIFEST)


def _newer(
    created: str, stored: Sequence[RunInfo], unreadable: Sequence[tuple[Path, str]]
) -> tuple[tuple[Path, str], ...]:
    """Return the damaged folders that may hold a newer run, or whose age cannot be told."""
    return tuple((f, why) for f, why in unreadable if _may_be_newer(f, created, stored))


def _may_be_newer(folder: Path, created: str, stored: Sequence[RunInfo]) -> bool:
    """Whether a damaged folder may hold a run made at `created` or later: by what its run.json
    says and the date in its name, or where neither tells, by when the folder was changed.
    """
    if folder.name.startswith("."):
        return False
    try:
        manifest = read_manifest(folder)
    except StoreError:
        pass
    else:
        # A whole copy of a run that can be read is no run of its own. Another run of the same id
        # is one: two machines may begin in one second.
        own = checksum(read_bytes(folder / MANIFEST))
        twins = (r.folder for r in stored if r.manifest.id == manifest.id and r.folder != folder)
        copied = any(checksum(read_bytes(twin / MANIFEST)) == own for twin in twins)
        return manifest.created >= created and not copied
    if dates := _dates_of(folder):
        # A date as old as the run's is no proof of an older one: somebody may have moved files.
        return max(dates) >= created[:19]
    try:
        changed = datetime.fromtimestamp(folder.lstat().st_mtime, UTC)
        return changed > datetime.fromisoformat(created)
    except (OSError, TypeError, ValueError):
        return True


def _dates_of(folder: Path) -> list[str]:
    """Return when a damaged run began: by its folder's name, and by what is left of its run.json.

    The two differ where files were moved between folders.
    """
    dates = []
    if date := _DATED.match(folder.name):
        day, hour, minute, second = date.groups()
        dates.append(f"{day}T{hour}:{minute}:{second}")
    with contextlib.suppress(StoreError):
        created = read_json(folder / MANIFEST).get("created")
        dates += [created[:19]] if isinstance(created, str) else []
    return dates


def withheld(decision: Decision, found: Found) -> Decision:
    """Return the verdict that `gate` gives: INCOMPLETE in place of a green one where a newer run is
    damaged, because what is asked for is the newest.
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
        f"{damaged}, so that run {found.folder.name}, which is {decision.word}, is not known to be "
        "the newest. Restore or delete what is damaged, or name the run to judge."
    )
    return replace(decision, word=Word.INCOMPLETE, exit_code=ExitCode.INCOMPLETE, sentence=sentence)


def _hours_since(created: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(created)).total_seconds() / 3600


def run_line(found: Found, run: Run) -> str:
    """Say which run was judged, and how old it is."""
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
    """Return whether somebody pinned a run below `root`."""
    return manifest.id in pins.pinned_ids(pins.home(root, manifest))


@dataclass(frozen=True)
class JudgedRun:
    """A stored run with its verdict and what it was judged by."""

    run: Run
    decision: Decision
    history: History
    unusable_pins: tuple[str, ...] = ()
    """A sentence for each pinned baseline that was not used."""


def judge(root: Path, run: Run) -> JudgedRun:
    """Return a run's verdict by its history under `root`, by pinned runs of its class of device,
    and by the oldest healthy run of its own machine where nobody pinned one there.

    Raises:
        StoreError: the root cannot be listed.
    """
    with one_look():
        return _judge(root, run)


def _judge(root: Path, run: Run) -> JudgedRun:
    history = load_history(root, run)
    folder = pins.home(root, run.manifest)
    pinned = pins.load(run.manifest.environment.device.kind, folder)
    own = own_pins(root, run, pinned)
    decision = decide(
        run, history.baseline, history.past, (*own, *pinned.pins), unusable=pinned.unusable
    )
    unusable = [(folder, why) for why in pinned.unusable]
    history = replace(history, unreadable=(*history.unreadable, *unusable))
    return JudgedRun(run, decision, history, tuple(pinned.unusable))


def own_pins(root: Path, run: Run, pinned: pins.Pins) -> tuple[pins.Pin, ...]:
    """Return the anchor of a run's machine; none where a pinned run of that machine is."""
    machine = fingerprint(run.manifest.environment)
    if any(pin.fingerprint == machine for pin in pinned.pins):
        return ()
    return anchor_pins(anchors_of(root, run, pinned), run)


def anchors_of(root: Path, run: Run, pinned: pins.Pins) -> tuple[Run, ...]:
    """Return the oldest healthy runs of a run's machine: those that pass without an anchor."""

    def healthy(old: Run) -> bool:
        # Levels of nights that were stored before runs had a contract stay anchors.
        decision = decide(old, None, {}, pinned.pins, old_schema_may_pass=True)
        return decision.exit_code is ExitCode.PASS

    return find_anchors(root, run, healthy)


def check_age(folder: Path, hours: float) -> None:
    """Insist that a run began at most `hours` ago.

    Raises:
        StoreError: it is older, cannot be read, or does not say when it began.
    """
    created = read_run(folder).manifest.created
    try:
        age = _hours_since(created)
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"{folder.name} began at {created!r}, which is no time: {error}"
        ) from error
    # Written so that an age or a limit that is no number is refused.
    if not -AHEAD <= age <= hours:
        raise StoreError(
            f"expected a run that began at most {hours:g} hours ago, but {folder.name} is "
            f"{age:.1f} hours old: nothing was stored since. See what was to measure."
        )


def judge_stored(folder: Path, against: Path | None = None) -> JudgedRun:
    """Return a stored run's verdict, against one other run or against all that `judge` asks.

    Raises:
        StoreError: one of them cannot be read, or holds no measurements.
    """
    run = read_judgeable(folder)
    if against is None:
        return judge(folder.parent, run)
    return JudgedRun(run, decide(run, read_judgeable(against), alone=True), History())


def comparison_lines(judged_run: JudgedRun) -> list[str]:
    """Return what is said below a verdict: since when it fails and what explains it, each run whose
    levels it was held against, and why others were not.
    """
    lines = [f"held against {text}" for text in judged_run.decision.against]
    return [*_failure_lines(judged_run), *lines, *judged_run.unusable_pins, *_damaged(judged_run)]


def _damaged(judged_run: JudgedRun) -> list[str]:
    """Name the damaged neighbours that the verdict did without, the first few with the reason."""
    pins_too = set(judged_run.unusable_pins)
    bad = [(f, why) for f, why in judged_run.history.unreadable if why not in pins_too]
    lines = [f"not used: {folder.name}: {why}" for folder, why in bad[:NAMED]]
    if len(bad) > NAMED:
        lines.append(f"not used: {count(len(bad) - NAMED, 'more folder')}; `list` names them")
    return lines


def _failure_lines(judged_run: JudgedRun) -> list[str]:
    """Return since when the first failure is there, and the command that explains its case."""
    run, starts = judged_run.run, judged_run.decision.starts
    if not starts or starts[0].verdict is not Verdict.FAIL:
        return []
    first, lines = starts[0], []
    if (found := since.since_when(first, run, judged_run.history)) is not None:
        lines.append(f"since when: {since.sentence(found, run)}")
        if found.held is not None:
            lines[0] += f" It held in run {found.folder}; commits: "
            lines[0] += since.commits(found.held, found.failed)
    accounts = [e for e in run.explanations if e.case == first.case and e.culprit]
    lines += [
        f"explained: {e.quantity} is {e.meaning}; parameters that act there: "
        f"{', '.join(e.parameters) or 'none'}"
        for e in accounts
    ]
    lines += [f"elements that break the tolerance: {e.where}" for e in accounts if e.where]
    lines += [f"line: {line.place}: {line.why}" for e in accounts for line in e.lines[:1]]
    commands = account_commands(first.case, run.manifest.fault) if suite_of(first) == SUITE else []
    return [*lines, *(f"{c['label'].split()[0]}: {c['command']}" for c in commands)]


def page_of(folder: Path, page: Path | None = None) -> str:
    """Return the page of a stored run, drawn again by this version from what is stored.

    Args:
        folder: of the run.
        page: where it will lie, for its links to other runs; None for the run's folder.
    """
    from reports.page.render import render

    if read_manifest(folder).kind is RunKind.WATCH:
        from reports.page.watching import render as render_watch

        return render_watch(read_run(folder))
    judged_run = judge_stored(folder)
    runs = runs_from(folder / PAGE if page is None else page, folder)
    return render(judged_run.run, judged_run.decision, judged_run.history, runs)


def runs_from(page: Path, folder: Path) -> str:
    """Return the address of the folder that holds the run `folder`, from where `page` lies."""
    address = os.path.relpath(folder.resolve().parent, page.resolve().parent)
    return quote(Path(address).as_posix())


def read_judgeable(folder: Path) -> Run:
    """Read a run that is to be judged.

    Raises:
        StoreError: it cannot be read, is a bench, or only a part of a nightly.
    """
    run = read_run(folder)
    if advice := _NO_VERDICT.get(run.manifest.kind):
        raise StoreError(
            f"expected a night, or a run of ports, but {folder.name} is a {run.manifest.kind}; "
            f"{advice}."
        )
    return run


def change_lines(changes: Sequence[Change]) -> list[str]:
    """Return one line per change, gravest first, and one that says how many are left out."""
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
