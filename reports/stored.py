"""What stored runs say: a list of them, two of them compared, one of them judged or drawn again.

Source: spec/reports.md "Store", "Comparability" and "Command line".
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from parity.results import Verdict
from reports.changes import Change
from reports.history import load_history
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
from reports.text import contrast, count, edge_name, metric_name
from reports.verdicts import Decision, decide

_COUNTS = "SELECT verdict, count(*) FROM read_parquet(?) GROUP BY verdict"
SHOWN = 20
"""Changes that are listed in the terminal."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One run in a list."""

    id: str
    kind: str
    created: str
    device: str
    reference: str
    gates: int
    """Measurements held to a tolerance, or that could not be; 0 for a bench."""
    broken: int
    fault: str


def find_run(root: Path, name: str) -> Path:
    """Return the folder of a run: a path, its id, the beginning of its id, or `latest`.

    Raises:
        StoreError: there is none, or several begin so.
    """
    if (Path(name) / "run.json").is_file():
        return Path(name)
    folders, _ = list_runs(root)
    if name == "latest" and folders:
        return folders[-1]
    found = [folder for folder in folders if folder.name.startswith(name)]
    exact = [folder for folder in found if folder.name == name]
    if len(exact or found) == 1:
        return (exact or found)[0]
    listed = ", ".join(folder.name for folder in (found or folders)[-5:]) or "none"
    what = "several runs begin with" if found else "no run"
    raise StoreError(f"{what} {name!r} in {root}; there are {listed}. `list` shows all of them.")


def listed(root: Path) -> tuple[list[Listed], list[tuple[Path, str]]]:
    """Return the runs under `root`, oldest first, and those that cannot be read with a reason."""
    folders, unreadable = list_runs(root)
    with duckdb.connect() as database:
        return [_entry(folder, database) for folder in folders], unreadable


def _entry(folder: Path, database: duckdb.DuckDBPyConnection) -> Listed:
    manifest, counts = read_manifest(folder), {}
    if kind_of(manifest) is RunKind.NIGHTLY:
        # A path is a glob pattern to DuckDB, and a folder name may hold brackets.
        path = glob.escape(str(folder / MEASUREMENTS))
        counts = dict(database.execute(_COUNTS, [path]).fetchall())
    gates = sum(n for verdict, n in counts.items() if verdict != Verdict.INFO)
    reference = manifest.get("reference") or {}
    return Listed(
        id=folder.name,
        kind=kind_of(manifest).value,
        created=manifest["created"],
        device=str((manifest.get("device") or {}).get("kind", "")),
        reference=f"{reference.get('kind', '')} {reference.get('commit') or ''}".strip(),
        gates=gates,
        broken=gates - counts.get(Verdict.PASS.value, 0),
        fault=str(manifest.get("fault") or ""),
    )


def judged(folder: Path, against: Path | None = None) -> tuple[Run, Decision]:
    """Return a nightly and its verdict, against another run or against its own baseline.

    Raises:
        StoreError: one of them cannot be read, or is not a nightly.
    """
    run = _nightly(folder)
    if against is not None:
        return run, decide(run, _nightly(against))
    return run, decide(run, load_history(folder.parent, run).baseline)


def page_of(folder: Path) -> str:
    """Return the page of a stored nightly, drawn again by this version from what is stored."""
    from reports.page.render import render

    run = _nightly(folder)
    history = load_history(folder.parent, run)
    return render(run, decide(run, history.baseline), history)


def _nightly(folder: Path) -> Run:
    run = read_run(folder)
    if kind_of(run.manifest) is not RunKind.NIGHTLY:
        raise StoreError(
            f"expected a nightly, {folder.name} is a {kind_of(run.manifest)}; its numbers are on "
            "the next nightly's page."
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
        "environment": list(decision.environment),
        "changes": [
            {
                "what": change.what.value,
                "case": change.case,
                "edge": change.edge,
                "quantity": change.quantity,
                "metric": change.metric,
                "before": _finite(change.before),
                "now": _finite(change.now),
                "tolerance": _finite(change.tolerance),
                "note": change.note,
            }
            for change in decision.changes
        ],
    }


def _finite(value: float | None) -> float | None:
    # JSON has no NaN; one that was written anyway could not be read back elsewhere.
    return value if value is not None and abs(value) < float("inf") else None
