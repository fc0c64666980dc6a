"""A list of the stored runs. It imports nothing of verdicts and pages: a list is to come at once.

Source: docs/reports.md "Store".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from parity.engine.measurement import Verdict
from reports.registry.index import RunSummary, summaries
from reports.registry.shared_index import shared_summaries
from reports.store.query import Table
from reports.store.runs import RunInfo, read_infos, run_folders
from reports.store.schema import FILES, MEASUREMENTS
from reports.store.shared import storage_of

_COUNTS = "SELECT run, verdict, count(*) AS rows FROM measurements GROUP BY ALL"


def summarise_runs(root: Path) -> tuple[list[RunSummary], list[tuple[Path, str]]]:
    """Return the runs under `root`, oldest first, and those that cannot be read with a reason.

    Only what the index beside the runs does not know is read (`reports.registry.index`), and of a
    copy of shared storage what the index there does not know (`reports.registry.shared_index`).
    """
    if (storage := storage_of(root)) is not None:
        lines, unreadable = shared_summaries(storage, _examined)
    else:
        lines, unreadable = summaries(root, run_folders(root), _examined)
    first: dict[str, RunSummary] = {}
    for line in sorted(lines, key=lambda line: line.summary.id != line.name):
        own = first.setdefault(line.name, line.summary)
        if own is not line.summary:
            why = f"a copy of run {line.name} in {root / own.id}; delete one of them"
            unreadable.append((root / line.summary.id, why))
    return sorted(first.values(), key=lambda run: (run.created, run.id)), unreadable


def _examined(
    folders: Sequence[Path],
) -> tuple[dict[Path, tuple[RunSummary, str]], list[tuple[Path, str]]]:
    """Read runs for the index: by folder a summary and the run's id."""
    stored, unreadable = read_infos(folders)
    gated = [run for run in stored if MEASUREMENTS in FILES[run.kind]]
    with Table([str(run.folder / MEASUREMENTS) for run in gated]) as table:
        answer, broken = table.ask(_COUNTS)
    unreadable += [(gated[i].folder, why) for i, why in broken.items()]
    counts: dict[Path, dict[str, int]] = {}
    for i, verdict, rows in zip(*(answer[c] for c in ("run", "verdict", "rows")), strict=True):
        counts.setdefault(gated[int(i)].folder, {})[str(verdict)] = int(rows)
    damaged = {gated[i].folder for i in broken}
    return {
        run.folder: (_entry(run, counts.get(run.folder, {})), run.manifest.id)
        for run in stored
        if run.folder not in damaged
    }, unreadable


def _entry(run: RunInfo, counts: Mapping[str, int]) -> RunSummary:
    gates = sum(n for verdict, n in counts.items() if verdict != Verdict.INFO)
    manifest, environment = run.manifest, run.manifest.environment
    reference = environment.reference
    return RunSummary(
        id=run.folder.name,
        kind=run.kind.value,
        created=manifest.created,
        device=environment.device.kind or "",
        reference=f"{reference.kind or ''} {reference.commit or ''}".strip(),
        gates=gates,
        broken=gates - counts.get(Verdict.PASS.value, 0),
        fault=manifest.fault or "",
        verdict=manifest.verdict,
    )
