"""Finds, for each of many runs, the gates (measurements with a tolerance) that began or ceased to
fail in it.

A gate is followed through the runs of one kind that did the same work. Runs that did not measure it
are skipped. A run with a planted fault is compared with earlier runs, but later runs are never
compared with it.

Only failing rows are read, plus one run of each distinct work, so a year of nights without failures
costs next to nothing, however many gates it has. Source: docs/reports.md "All runs".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from reports.store.gathered import Gathered
from reports.store.index import Line
from reports.store.manifest import Manifest
from reports.store.query import Table
from reports.store.schema import MEASUREMENTS

# Names are long and numerous, so gates are identified by 64-bit hashes: among a billion gates the
# probability of a collision is about 1 in 40.
_KEY = 'hash("case", edge, quantity, metric, identity)'
_FAILING = f"SELECT run, {_KEY} AS key FROM measurements WHERE verdict NOT IN ('pass', 'info')"
_MEASURED = f"""
SELECT run, {_KEY} AS key FROM measurements
WHERE verdict <> 'info' AND {_KEY} IN (SELECT key FROM wanted)
"""
_NAMES = f"""
SELECT {_KEY} AS key, any_value("case") AS "case", any_value(edge) AS edge,
       any_value(quantity) AS quantity, any_value(metric) AS metric
FROM measurements
WHERE verdict NOT IN ('pass', 'info') AND {_KEY} IN (SELECT key FROM wanted)
GROUP BY ALL
"""
_NEVER, _HELD, _FAILED = -1, 0, 1
_Pair = tuple[np.ndarray, np.ndarray]
"""Gates that began to fail, and gates that ceased to fail."""


@dataclass(frozen=True, slots=True)
class GateName:
    """Name of a gate, without the identity (hash) of the work behind it."""

    case: str
    edge: str
    quantity: str
    metric: str


@dataclass(frozen=True, slots=True)
class Step:
    """Gates whose verdict changed between one earlier run and this one.

    Attributes:
        before: folder name of the earlier run.
        began: gates that held in the earlier run and fail or cannot be compared in this one.
        ceased: gates that failed or could not be compared in the earlier run and hold in this one.
    """

    before: str
    began: tuple[GateName, ...] = ()
    ceased: tuple[GateName, ...] = ()


@dataclass(frozen=True, slots=True)
class GateChanges:
    """Changes of the gates of one run.

    Attributes:
        steps: one per earlier run in which a changed gate was last measured, the newest first.
        first: number of failing gates that no earlier run measured.
        dropped: number of gates that failed in the previous complete run on this class of device
            and that this run did not measure, so they are neither fixed nor failing.
        known: whether the failing gates of the run could be read; if not, the other fields are
            empty or 0.
    """

    steps: tuple[Step, ...] = ()
    first: int = 0
    dropped: int = 0
    known: bool = True


@dataclass
class _Followed:
    """State of all gates that ever fail in runs of one kind, after the runs processed so far.

    Attributes:
        last: `_HELD` or `_FAILED` when the gate was last measured, `_NEVER` before; one per gate.
        run: index of the run that last measured the gate, one per gate.
        failing: failing gates of the newest complete run, by subject (ports) and class of device.
    """

    last: np.ndarray
    run: np.ndarray
    failing: dict[object, np.ndarray] = field(default_factory=dict)


def follow_gates(root: Path, lines: Sequence[Line]) -> dict[str, GateChanges]:
    """Return the gate changes of each run by folder name; runs without changes have no entry.

    A run that could not be read has an entry with `known` False.

    Args:
        root: folder of the runs.
        lines: index lines of the readable runs, oldest first.
    """
    gated = [(line, line.manifest) for line in lines if line.manifest is not None and line.gates]
    # If no run of a kind has a failing gate, none began or ceased to fail.
    kinds = {manifest.kind for line, manifest in gated if line.broken}
    runs = [(line, manifest) for line, manifest in gated if manifest.kind in kinds]
    if not runs:
        return {}
    gathered = Gathered(root, {})
    with _table(root, gathered, [line for line, _ in runs if line.broken]) as table:
        answer, _ = table.ask(_FAILING)
        broken = [i for i, (line, _) in enumerate(runs) if line.broken]
        keys, ids = np.unique(answer["key"], return_inverse=True)
        failing = _by_run(answer["run"], ids, broken)
        # The index counted failing gates by their numbers; a different count means a damaged file,
        # and none means one that could not be read.
        lost = {run for run in broken if len(failing[run]) != runs[run][0].broken}
        measured = _measured(root, gathered, runs, keys)
        found, wanted = _walk(runs, failing, lost, measured, len(keys))
        names = _names(table, keys[wanted])
    return {
        runs[run][0].name: GateChanges(
            tuple(
                Step(
                    runs[before][0].name,
                    tuple(names[int(keys[i])] for i in began),
                    tuple(names[int(keys[i])] for i in ceased),
                )
                for before, (began, ceased) in sorted(steps.items(), reverse=True)
            ),
            first,
            dropped,
            run not in lost,
        )
        for run, (steps, first, dropped) in found.items()
    }


def _table(root: Path, gathered: Gathered, lines: Iterable[Line]) -> Table:
    chosen = list(lines)
    return Table(
        [str(root / line.name / MEASUREMENTS) for line in chosen],
        [str(gathered.path(line.gathered)) if line.gathered else "" for line in chosen],
    )


def _by_run(runs: np.ndarray, ids: np.ndarray, broken: Sequence[int]) -> dict[int, np.ndarray]:
    order = np.argsort(runs, kind="stable")
    ends = np.searchsorted(runs[order], np.arange(1, len(broken)))
    return {
        run: np.unique(part) for run, part in zip(broken, np.split(ids[order], ends), strict=True)
    }


def _measured(
    root: Path, gathered: Gathered, runs: Sequence[tuple[Line, Manifest]], keys: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the indices in `keys` (hashes of gates) of the gates that runs measured.

    The result has one array per `_work` of the runs.
    Runs with equal `_work` measured the same gates, so only one of them is queried. If that run
    cannot be read, their `_work` is left out.
    """
    one_of = {_work(line): line for line, _ in runs}
    with _table(root, gathered, one_of.values()) as table:
        table.database.register("wanted", pa.table({"key": pa.array(keys, pa.uint64())}))
        answer, unread = table.ask(_MEASURED)
    ids = np.searchsorted(keys, answer["key"])
    parts = _by_run(answer["run"], ids, range(len(one_of)))
    return {work: parts[n] for n, work in enumerate(one_of) if n not in unread}


def _work(line: Line) -> str:
    # Runs of equal work measured the same gates. If the work is unknown, each run counts as a
    # different work.
    return line.work or f"run {line.name}"


def _walk(
    runs: Sequence[tuple[Line, Manifest]],
    failing: Mapping[int, np.ndarray],
    lost: set[int],
    measured: Mapping[str, np.ndarray],
    gates: int,
) -> tuple[dict[int, tuple[dict[int, _Pair], int, int]], np.ndarray]:
    """Return the gate changes of runs by index of the run, and the indices of all changed gates.

    Runs without changes have no entry. The changes of a run are a `_Pair` for each earlier run, by
    its index, and the numbers `first` and `dropped` of `GateChanges`. A run in `lost`, or added to
    it because its gates could not be read, has an empty entry.

    Args:
        runs: Runs, oldest first.
        failing: Indices of the gates that fail, by index of the run.
        lost: Indices of runs that could not be read; more are added.
        measured: Indices of the gates that a run measured, by its `_work`.
        gates: Number of gates.
    """
    followed: dict[object, _Followed] = {}
    found: dict[int, tuple[dict[int, _Pair], int, int]] = {}
    named: list[np.ndarray] = []
    none = np.array([], np.int64)
    for i, (line, manifest) in enumerate(runs):
        if manifest.kind not in followed:
            followed[manifest.kind] = _Followed(np.full(gates, _NEVER), np.full(gates, _NEVER))
        past = followed[manifest.kind]
        there = measured.get(_work(line))
        if i in lost or there is None:
            found[i] = ({}, 0, 0)
            lost.add(i)
            continue
        fails = np.isin(there, failing.get(i, none), assume_unique=True)
        before = past.last[there]
        began, ceased = there[fails & (before == _HELD)], there[~fails & (before == _FAILED)]
        steps: dict[int, _Pair] = {}
        for run in np.unique(past.run[np.concatenate([began, ceased])]):
            pair = began[past.run[began] == run], ceased[past.run[ceased] == run]
            steps[int(run)] = pair
            named += pair
        first = int((fails & (before == _NEVER)).sum())
        stream = manifest.subject, manifest.environment.device.kind
        dropped = 0
        if not manifest.fault:
            past.last[there] = np.where(fails, _FAILED, _HELD)
            past.run[there] = i
            if not manifest.selected:
                dropped = int((~np.isin(past.failing.get(stream, none), there)).sum())
                past.failing[stream] = there[fails]
        if steps or first or dropped:
            found[i] = steps, first, dropped
    return found, np.unique(np.concatenate([none, *named]))


def _names(table: Table, keys: np.ndarray) -> dict[int, GateName]:
    if not len(keys):
        return {}
    table.database.register("wanted", pa.table({"key": pa.array(keys, pa.uint64())}))
    answer, _ = table.ask(_NAMES)
    columns = (answer[name].tolist() for name in ("key", "case", "edge", "quantity", "metric"))
    return {int(key): GateName(*names) for key, *names in zip(*columns, strict=True)}
