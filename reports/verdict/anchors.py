"""The anchor of a machine: its oldest healthy night, with which later nights are compared.

A healthy night is complete, has no planted fault and passes. A machine without a pinned run can
still be compared with itself. Comparing with the newest run would follow a slow drift; the oldest
healthy run does not move. See docs/verdicts.md "Another machine".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from parity.engine.measure.measurement import Measurement
from reports.provenance.host import fingerprint
from reports.store.manifest import Environment
from reports.store.query import Table
from reports.store.runs import Run, RunInfo, list_runs, read_run
from reports.store.schema import MEASUREMENTS, StoreError
from reports.verdict.drift import levels_of
from reports.verdict.levels import Group, group_gates
from reports.verdict.pins import Pin, pin_of

_QUERY = """
SELECT run, todays.level AS level, count(*) AS gates
FROM measurements JOIN todays USING ("case", edge, quantity, metric, identity)
GROUP BY ALL
"""
_KEY = ("case", "edge", "quantity", "metric", "identity")
Healthy = Callable[[Run], bool]
"""Function that returns whether a stored run is healthy, so that it may be an anchor."""


def anchor_pins(chosen: Sequence[Run], run: Run) -> tuple[Pin, ...]:
    """Return a tuple of one `Pin`, with the error levels of all anchors and the id of the oldest.

    A pin holds error levels with which later runs are compared. The tuple is empty if there are no
    anchors.

    Args:
        chosen: Anchors, oldest first. Each group's level is that of the oldest anchor that measured
            the same gates of the group as `run`.
        run: The run that is compared with the anchors.
    """
    todays, levels = _works(run), dict[Group, Any]()
    for old in chosen:
        # An anchor chosen for one group may have measured different gates of another group.
        groups = pin_of(old, {}).groups
        own = {g: it for g, it in groups.items() if todays.get(g, it.work) == it.work}
        levels = {**own, **levels}
    if not chosen:
        return ()
    return (replace(pin_of(chosen[0], {}), groups=levels),)


def find_anchors(root: Path, run: Run, healthy: Healthy) -> tuple[Run, ...]:
    """Return the anchors that `run` is compared with on its own machine, oldest first.

    Each error level (errors of a group of gates) has its own anchor: the oldest healthy run made
    before `run` on the same machine (equal fingerprints, which include versions and reference) that
    measured exactly the same gates of the group, with equal identities (hashes of the work).

    Args:
        root: Folder of runs.
        run: The run to judge.
        healthy: Function that judges a stored run without anchors; returns whether it may be one.

    Raises:
        StoreError: the root cannot be listed.
    """
    todays = group_gates(run.measurements)
    earlier = _earlier(root, run) if todays else []
    if not earlier:
        return ()
    holders = _holders(earlier, list(todays.values()))
    wanted = list(_works(run).items())
    chosen: list[Run] = []
    missing = set(range(len(todays)))
    for info in earlier:
        held = holders.get(_work(info), set())
        if missing & held and (old := _read(info)) and healthy(old):
            # The query asks for today's gates only. A level of further gates is not comparable.
            theirs = _works(old).items()
            held = holders[_work(info)] = {turn for turn in held if wanted[turn] in theirs}
            if missing & held:
                chosen.append(old)
                missing -= held
    return tuple(chosen)


def _works(run: Run) -> dict[Group, str]:
    """Return, for each group of gates of a run, the hash of the work behind them (`Level.work`)."""
    return {group: level.work for group, level in levels_of(run, {}).items()}


def _work(info: RunInfo) -> str:
    """Return a key that is equal for runs that measured the same gates of the same work.

    It is a hash, or if that is unknown, the path of the run's folder.
    """
    return info.work or str(info.folder)


def _holders(
    earlier: Sequence[RunInfo], levels: Sequence[Sequence[Measurement]]
) -> dict[str, set[int]]:
    """Return which groups of gates the earlier runs measured, by `_work` of the run.

    Each of `levels` is the gates of one group, and a group is given by its position in `levels`. A
    run measured a group if it measured all its gates. Of runs with equal `_work` only one is
    queried: most of ten thousand nights measured the same gates.
    """
    asked = list({_work(info): info for info in reversed(earlier)}.values())
    with Table([str(old.folder / MEASUREMENTS) for old in asked]) as table:
        table.database.register("todays", _todays(levels))
        answer, _ = table.ask(_QUERY)
    holders: dict[str, set[int]] = {}
    rows = zip(*(answer[c].tolist() for c in ("run", "level", "gates")), strict=True)
    for turn, level, gates in rows:
        if gates == len(levels[level]):
            holders.setdefault(_work(asked[int(turn)]), set()).add(int(level))
    return holders


def _earlier(root: Path, run: Run) -> list[RunInfo]:
    """Return complete runs before `run` of its kind, ports (if any) and machine, oldest first."""
    here = run.manifest.environment
    machine = fingerprint(here)
    if machine is None:
        return []

    def is_here(environment: Environment) -> bool:
        # Ten thousand fingerprints take a third of a second, and most environments are equal.
        return environment == here or fingerprint(environment) == machine

    return [
        old
        for old in list_runs(root)[0]
        if old.manifest.shares_subject(run.manifest)
        and old.manifest.created < run.manifest.created
        and is_here(old.manifest.environment)
        and old.manifest.whole
    ]


def _read(stored: RunInfo) -> Run | None:
    try:
        return read_run(stored.folder)
    except StoreError:
        # Listing the runs reports it (`reports.verdict.history.History.unreadable`).
        return None


def _todays(groups: Sequence[Sequence[Any]]) -> pa.Table:
    pairs = [(turn, m) for turn, gates in enumerate(groups) for m in gates]
    columns = {n: pa.array([getattr(m, n) for _, m in pairs], pa.string()) for n in _KEY}
    return pa.table(columns | {"level": pa.array([turn for turn, _ in pairs], pa.int32())})
