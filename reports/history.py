"""Earlier runs: a query over the run folders, never a database that can be lost.

Source: spec/reports.md "Store" and "Comparability".
"""

from __future__ import annotations

import glob
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import pyarrow as pa

from reports.store import (
    MEASUREMENTS,
    Run,
    RunKind,
    StoreError,
    kind_of,
    list_runs,
    read_manifest,
    read_run,
)

WINDOW = 90
"""Runs a sparkline looks back over."""

Key = tuple[str, str, str, str]
"""Case, edge, quantity, metric."""

_KEY = ("case", "edge", "quantity", "metric", "identity")
# `isnan` orders NaN above every number, so the worst of a series that holds a NaN is that NaN.
_QUERY = """
SELECT old."case", old.edge, old.quantity, old.metric, max(old.fraction), bool_and(isnan(tolerance))
FROM read_parquet(?) AS old
SEMI JOIN today USING ("case", edge, quantity, metric, identity)
GROUP BY ALL
"""


@dataclass(frozen=True)
class History:
    """What earlier runs say about this one.

    `benches` are the newest bench and those before it that timed the same work, oldest first.
    `series` holds, for each gated key, one worst share of tolerance per entry of `runs`, oldest
    first, None where that run has no comparable measurement.
    """

    baseline: Run | None = None
    runs: tuple[str, ...] = ()
    series: Mapping[Key, tuple[float | None, ...]] = field(default_factory=dict)
    unreadable: tuple[tuple[Path, str], ...] = ()
    benches: tuple[Run, ...] = ()


def _today(run: Run) -> pa.Table:
    return pa.table(
        {name: pa.array([getattr(m, name) for m in run.measurements], pa.string()) for name in _KEY}
    )


def _earlier(root: Path, run: Run) -> tuple[dict[RunKind, list[Path]], list[tuple[Path, str]]]:
    folders, unreadable = list_runs(root)
    kept: dict[RunKind, list[Path]] = {kind: [] for kind in RunKind}
    for folder in folders:
        manifest = read_manifest(folder)
        # A run with a planted fault says nothing about the code it ran.
        if manifest["created"] < run.manifest["created"] and not manifest.get("fault"):
            kept[kind_of(manifest)].append(folder)
    return kept, unreadable


def _benches(folders: list[Path], unreadable: list[tuple[Path, str]]) -> tuple[Run, ...]:
    """Return the last bench of `folders` and those it shares an identity with, oldest first."""
    found: list[Run] = []
    wanted: set[str] = set()
    for folder in reversed(folders):
        try:
            run = read_run(folder)
        except StoreError as error:
            unreadable.append((folder, str(error)))
            continue
        identities = {t.identity for t in run.timings}
        wanted = wanted or identities
        if identities & wanted:
            found.append(run)
        if len(found) == WINDOW:
            break
    return tuple(reversed(found))


def load_history(root: Path, run: Run) -> History:
    """Find under `root` the baseline of a nightly, the trend of each of its gates, and the benches.

    The baseline is the newest earlier nightly that shares at least one measurement with equal
    identity. Runs with a planted fault are left out.
    Runs that cannot be read are named in `unreadable` and skipped. Raises StoreError where `root`
    itself cannot be listed.
    """
    earlier, unreadable = _earlier(root, run)
    baseline: Run | None = None
    worst: list[tuple[str, dict[Key, float]]] = []
    with duckdb.connect() as database:
        database.register("today", _today(run))
        for folder in reversed(earlier[RunKind.NIGHTLY]):
            # A path is a glob pattern to DuckDB, and a folder name may hold brackets.
            path = glob.escape(str(folder / MEASUREMENTS))
            try:
                rows = database.execute(_QUERY, [path]).fetchall()
                if rows and baseline is None:
                    baseline = read_run(folder)
            except (duckdb.Error, StoreError) as error:
                unreadable.append((folder, str(error)))
                continue
            if len(worst) < WINDOW - 1:
                gated = {(c, e, q, m): value for c, e, q, m, value, info in rows if not info}
                worst.append((folder.name, gated))
            elif baseline is not None:
                break
    benches = _benches(earlier[RunKind.BENCH], unreadable)
    worst.reverse()
    keys = sorted({key for _, values in worst for key in values})
    return History(
        baseline=baseline,
        runs=tuple(name for name, _ in worst),
        series={key: tuple(values.get(key) for _, values in worst) for key in keys},
        unreadable=tuple(unreadable),
        benches=benches,
    )


def worst_over(
    history: History, keys: set[Key], now: float | None
) -> tuple[tuple[float | None, ...], tuple[str, ...]]:
    """Return the worst share per run over `keys`, with today's `now` last, and the run names."""
    columns = [history.series[key] for key in sorted(keys & history.series.keys())]
    past: list[float | None] = []
    for values in zip(*columns, strict=True):
        present = [v for v in values if v is not None]
        bad = any(math.isnan(v) for v in present)
        past.append(math.nan if bad else max(present, default=None))
    return (*past, now), history.runs
