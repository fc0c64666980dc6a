"""Earlier values of a run's gates, queried from the run folders, without a separate database.

Source: docs/reports.md "Store", docs/verdicts.md "Comparability".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from parity.engine.measure.measurement import Key
from parity.tolerances import NOISE_WINDOW
from reports.provenance.host import fingerprint
from reports.store.manifest import Manifest, read_manifest
from reports.store.query import Columns, Table
from reports.store.runs import Run, RunInfo, list_runs, read_run
from reports.store.schema import MEASUREMENTS, RunKind, StoreError
from reports.verdict.vanished import Earlier, Group, Seen, comparable, group_of

WINDOW = 90
"""Number of runs in a trend, the judged run included."""

_KEY = ("case", "edge", "quantity", "metric", "identity")
# `isnan` orders NaN above every number, so the worst of a series that holds a NaN is that NaN.
_QUERY = """
SELECT run, today.row AS key, max(fraction) AS share, max(value) AS value,
       bool_and(deterministic) IS FALSE AS varied, bool_and(isnan(tolerance)) AS info
FROM measurements JOIN today USING ("case", edge, quantity, metric, identity)
GROUP BY ALL
"""
# Runs are numbered from the newest.
_GROUPS = """
SELECT "case", edge, kind, min(run) AS run, max(suite) AS suite FROM measurements
WHERE NOT isnan(tolerance) AND kind IS NOT NULL
GROUP BY ALL
"""


@dataclass(frozen=True, slots=True)
class Past:
    """Values of a gate in the earlier runs on this machine in which all gates of its case held."""

    values: tuple[float, ...] = ()
    """The newest values, at most `parity.tolerances.NOISE_WINDOW`, oldest first."""
    varied: bool = False
    """Whether a replay in one of the runs with these `values` gave different bits."""


@dataclass(frozen=True)
class History:
    """Earlier runs of the same kind as the judged one: baseline, trends and noise."""

    baseline: Run | None = None
    """Run to compare with (`load_history`); None if no earlier run shares a measurement."""
    runs: tuple[str, ...] = ()
    """Folder names of the earlier runs in a trend, oldest first."""
    series: Mapping[Key, tuple[float | None, ...]] = field(default_factory=dict)
    """Error divided by tolerance of each gate in each of `runs`; None where a run has no comparable
    measurement."""
    unreadable: tuple[tuple[Path, str], ...] = ()
    """Folders and files that could not be read, each with the reason."""
    benches: tuple[Run, ...] = ()
    """The newest bench (run that times work) and earlier ones of the same work, oldest first."""
    past: Mapping[Key, Past] = field(default_factory=dict)
    """Earlier values of each gate that does not repeat: no replay in this run gave equal bits, or a
    replay in a recent earlier run on this machine gave other bits."""
    manifests: tuple[Manifest, ...] = ()
    """Manifests of `runs`, in the same order."""
    earlier: Earlier = field(default_factory=Earlier)
    """Suites and groups of gates of complete earlier runs, which this run must have too."""


def _keys(run: Run) -> list[Key]:
    return [m.key for m in run.measurements]


def _today(run: Run) -> pa.Table:
    columns = {n: pa.array([getattr(m, n) for m in run.measurements], pa.string()) for n in _KEY}
    return pa.table(columns | {"row": pa.array(range(len(run.measurements)), pa.int32())})


def _earlier(root: Path, run: Run) -> tuple[dict[RunKind, list[RunInfo]], list[tuple[Path, str]]]:
    stored, unreadable = list_runs(root)
    by_kind: dict[RunKind, list[RunInfo]] = {kind: [] for kind in RunKind}
    for old in stored:
        if _before(old.manifest, run.manifest):
            by_kind[old.kind].append(old)
    return by_kind, unreadable


def _before(old: Manifest, new: Manifest) -> bool:
    """Return whether the run `old` is earlier than `new` and may be part of its history.

    A run with a planted fault may not, nor may one of the same kind with other ports. Runs of
    another kind may: the page shows benches.
    """
    # A run with a planted fault is no evidence about the code without it.
    mixed = old.kind is new.kind and not old.shares_subject(new)
    return old.created < new.created and not (old.fault or mixed)


def _benches(stored: Sequence[RunInfo], unreadable: list[tuple[Path, str]]) -> tuple[Run, ...]:
    """Return the newest bench of `stored` and those that timed the same work, oldest first."""
    benches: list[Run] = []
    wanted: set[str] = set()
    for old in reversed(stored):
        try:
            run = read_run(old.folder)
        except StoreError as error:
            unreadable.append((old.folder, str(error)))
            continue
        identities = {t.identity for t in run.timings}
        wanted = wanted or identities
        if identities & wanted:
            benches.append(run)
        if len(benches) == WINDOW:
            break
    return tuple(reversed(benches))


def load_history(root: Path, run: Run) -> History:
    """Find under `root` the baseline of a run, the trend of each of its gates, and the benches.

    The baseline is the newest earlier run of the same kind and subject that shares at least one
    measurement of equal identity (hash of the work). The search goes back `WINDOW` - 1 runs at a
    time and prefers in each such block a run on the same machine (equal fingerprints). Runs with a
    planted fault are skipped. Runs that cannot be read are skipped and listed in `unreadable`.

    Raises:
        StoreError: `root` itself cannot be listed.
    """
    earlier, unreadable = _earlier(root, run)
    baseline: Run | None = None
    window: list[RunInfo] = []
    answer: Columns = {}
    newest_first = earlier[run.manifest.kind][::-1]
    seen: set[str] = set()
    for start in range(0, len(newest_first), WINDOW - 1):
        part = newest_first[start : start + WINDOW - 1]
        if start and not (part := [old for old in part if old.work not in seen]):
            continue
        with Table([str(old.folder / MEASUREMENTS) for old in part]) as table:
            table.database.register("today", _today(run))
            columns, broken = table.ask(_QUERY)
        unreadable += [(part[i].folder, why) for i, why in broken.items()]
        # If one run shares no measurement with today's, no run of the same work does.
        answered = {*broken, *columns["run"].tolist()}
        seen |= {old.work for i, old in enumerate(part) if old.work and i not in answered}
        if start == 0:
            window, answer = part, columns
        baseline = _newest(run, part, columns, unreadable)
        if baseline is not None:
            break
    # Before `History` is built, since this appends unreadable benches to `unreadable`.
    benches = _benches(earlier[RunKind.BENCH], unreadable)
    return History(
        baseline=baseline,
        runs=tuple(old.folder.name for old in reversed(window)),
        series=_series(_keys(run), len(window), answer),
        unreadable=tuple(unreadable),
        benches=benches,
        past=_past(run, window, answer),
        manifests=tuple(old.manifest for old in reversed(window)),
        earlier=_work(run, newest_first, _damaged(root, run, unreadable)),
    )


def _damaged(root: Path, run: Run, unreadable: Sequence[tuple[Path, str]]) -> list[Manifest]:
    """Return the manifests of earlier runs that have an intact run.json and another, damaged file.

    The seal (checksum) of run.json shows that it is unchanged, so the planned work is known even if
    the numbers are lost.
    """
    found: list[Manifest] = []
    for folder in {folder for folder, _ in unreadable}:
        with suppress(StoreError):
            old = read_manifest(folder)
            alike = old.kind is run.manifest.kind and _before(old, run.manifest)
            # A copied folder has another name than its run. A run.json of an older schema has no
            # seal, so it may have been changed.
            if alike and old.id == folder.name and old.checksums is not None:
                found.append(old)
    return found


def _work(run: Run, stored: Sequence[RunInfo], damaged: Sequence[Manifest]) -> Earlier:
    """Return the suites and groups of gates that `run` must have, because earlier runs had them.

    The gates of a group have the same case, edge and kind (`reports.verdict.vanished.group_of`).

    Only complete runs count, the newest `WINDOW` - 1 of `stored` and `damaged` together. Runs of
    selected cases between them do not use up this window.

    Args:
        run: The run to judge.
        stored: Earlier runs of its kind and subject, newest first.
        damaged: Manifests of earlier runs whose numbers are lost; the work that they planned
            counts.
    """
    if run.manifest.selected:
        return Earlier()
    whole = [old for old in stored if comparable(old.manifest, run.manifest)]
    planned = [old for old in damaged if comparable(old, run.manifest)]
    dates = sorted(old.created for old in (*planned, *(old.manifest for old in whole)))
    oldest = dates[-(WINDOW - 1) :][0] if dates else ""
    whole = [old for old in whole if old.manifest.created >= oldest]
    planned = [old for old in planned if old.created >= oldest]
    suites: dict[str, Seen] = {}
    for old in (*planned, *(old.manifest for old in whole)):
        when = Seen(old.id, old.created)
        suites |= {suite.name: _newer(suites.get(suite.name), when) for suite in old.suites}
    groups: dict[Group, Seen] = {}
    for group, when in (*_planned(planned), *_measured(run.manifest.kind, whole)):
        groups[group] = _newer(groups.get(group), when)
    return Earlier(suites, groups)


def _newer(one: Seen | None, other: Seen) -> Seen:
    # Runs that began in the same second are in the order of their names, as in a list of runs.
    if one is None or (one.created, one.run) < (other.created, other.run):
        return other
    return one


def _planned(runs: Sequence[Manifest]) -> Iterator[tuple[Group, Seen]]:
    """Yield the groups of gates in the contracts of runs, each with the run that planned it."""
    for old in runs:
        for line in old.contract:
            group = group_of(old.kind, line.case, line.edge, line.kind)
            yield group, Seen(old.id, old.created, line.suite)


def _measured(kind: RunKind, runs: Sequence[RunInfo]) -> Iterator[tuple[Group, Seen]]:
    """Yield the groups of gates that runs measured, each with the newest run that measured it."""
    if not runs:
        return
    with Table([str(old.folder / MEASUREMENTS) for old in runs]) as table:
        columns, _ = table.ask(_GROUPS)
    names = ("case", "edge", "kind", "suite", "run")
    rows = zip(*(columns[name].tolist() for name in names), strict=True)
    for case, edge, sort, suite, turn in rows:
        old = runs[turn].manifest
        yield group_of(kind, case, edge, sort), Seen(old.id, old.created, suite or "")


def _newest(
    run: Run, stored: Sequence[RunInfo], answer: Columns, unreadable: list[tuple[Path, str]]
) -> Run | None:
    """Return the newest run of `stored` that shares work with `run`, or None.

    A run of the same machine is preferred. Runs that cannot be read are added to `unreadable`.
    `answer` is the result of `_QUERY`: the positions in `stored` (newest first) of the runs that
    share work.
    """
    machine = fingerprint(run.manifest.environment)

    def elsewhere(turn: int) -> bool:
        return machine is None or fingerprint(stored[turn].manifest.environment) != machine

    turns = set(answer.get("run", np.array([], int)).tolist())
    for turn in sorted(turns, key=lambda turn: (elsewhere(turn), turn)):
        try:
            return read_run(stored[turn].folder)
        except StoreError as error:
            unreadable.append((stored[turn].folder, str(error)))
    return None


def _series(keys: Sequence[Key], runs: int, answer: Columns) -> dict[Key, tuple[float | None, ...]]:
    gated = ~answer["info"].astype(bool) if answer else np.array([], bool)
    if not gated.any():
        return {}
    table = np.full((len(keys), runs), None, object)
    # The query counts from the newest run, the series from the oldest.
    table[answer["key"][gated], runs - 1 - answer["run"][gated]] = answer["share"][gated]
    return {keys[row]: tuple(table[row]) for row in np.unique(answer["key"][gated]).tolist()}


def _past(run: Run, window: Sequence[RunInfo], answer: Columns) -> dict[Key, Past]:
    machine = run.manifest.environment.machine
    alike = [i for i, old in enumerate(window) if old.manifest.environment.machine == machine]
    if not answer:
        return {}
    # If a gate of a case failed in a run, the values of that case in that run show a bug, not
    # noise, and a repaired run must not be judged by them. A share that is NaN did not hold.
    cases = {m.case: i for i, m in enumerate(run.measurements)}
    case = np.array([cases[m.case] for m in run.measurements])[answer["key"]]
    at = answer["run"].astype(np.int64) * len(run.measurements) + case
    broken = ~(answer["share"] <= 1) & ~answer["info"].astype(bool)
    recent = np.isin(answer["run"], alike) & ~np.isin(at, at[broken])
    rows, runs = answer["key"][recent], answer["run"][recent]
    values, varied = answer["value"][recent], answer["varied"][recent].astype(bool)
    noisy = {i for i, m in enumerate(run.measurements) if m.deterministic is not True}
    # As in the table of docs/verdicts.md "Comparability": a gate is also noisy if it varied in one
    # of the newest runs, whether its case held there or not.
    newest_runs = np.isin(answer["run"], alike[:NOISE_WINDOW]) & answer["varied"].astype(bool)
    noisy |= set(answer["key"][newest_runs].tolist())
    entries: dict[int, list[tuple[int, float, bool]]] = {}
    for row, turn, value, other in zip(rows, runs, values, varied, strict=True):
        if int(row) in noisy:
            entries.setdefault(int(row), []).append((-int(turn), float(value), bool(other)))
    keys = _keys(run)
    newest = {row: sorted(past)[-NOISE_WINDOW:] for row, past in entries.items()}
    return {
        keys[row]: Past(tuple(v for _, v, _ in past), any(o for *_, o in past))
        for row, past in newest.items()
        if not math.isnan(run.measurements[row].tolerance)
    }


def worst_over(
    history: History, keys: set[Key], now: float | None
) -> tuple[tuple[float | None, ...], tuple[str, ...]]:
    """Return the largest share (error / tolerance) of several gates in each run of a trend.

    Args:
        history: Earlier runs.
        keys: Names of the gates.
        now: Largest share in the judged run.

    Returns:
        The shares of the earlier runs, oldest first, and `now` as the last one; and the names of
        the earlier runs. A share is None where a run measured none of the gates `keys`, and NaN if
        one of them has a NaN.
    """
    columns = [history.series[key] for key in keys & history.series.keys()]
    past: list[float | None] = []
    for values in zip(*columns, strict=True):
        present = [v for v in values if v is not None]
        bad = any(math.isnan(v) for v in present)
        past.append(math.nan if bad else max(present, default=None))
    return (*past, now), history.runs
