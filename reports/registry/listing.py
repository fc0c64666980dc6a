"""A list of the stored runs. It does not import verdicts and pages, so that it starts quickly.

Source: docs/reports.md "Store".
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reports.registry.shared_index import shared_lines
from reports.store.index import Line
from reports.store.manifest import Manifest
from reports.store.runs import list_lines, why_left_out
from reports.store.shared import storage_of


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run in a list of stored runs.

    Attributes:
        id: name of the run's folder.
        created: start of the run, ISO 8601 in UTC.
        device: class of device, cpu or cuda; "" if unknown.
        reference: kind and commit of the reference; "" without one.
        gates: number of measurements that have a tolerance or could not be compared; 0 for a bench.
        broken: number of gates that do not pass, recomputed from their values and tolerances.
        fault: name of the planted fault; "" without one.
        verdict: verdict when the run was stored, "" without one; `gate` judges it again.
    """

    id: str
    kind: str
    created: str
    device: str
    reference: str
    gates: int
    broken: int
    fault: str
    verdict: str


def summarise_runs(root: Path) -> tuple[list[RunSummary], list[tuple[Path, str]]]:
    """Return the runs under `root`, oldest first, and the unreadable folders with a reason.

    Only runs that the index does not have are read (`reports.store.index`; for a copy of shared
    storage `reports.registry.shared_index`).
    """
    if (storage := storage_of(root)) is not None:
        lines, unreadable = shared_lines(storage)
    else:
        lines, unreadable = list_lines(root)
    first: dict[str, RunSummary] = {}
    named = [(line, line.manifest) for line in lines if line.manifest is not None]
    for line, manifest in sorted(named, key=lambda pair: pair[1].id != pair[0].name):
        own = _summary(line, manifest)
        name = manifest.id
        if first.setdefault(name, own) is not own:
            folder = root / line.name
            unreadable.append((folder, why_left_out(folder, root / first[name].id, name)))
    return sorted(first.values(), key=lambda run: (run.created, run.id)), unreadable


def _summary(line: Line, manifest: Manifest) -> RunSummary:
    environment = manifest.environment
    reference = environment.reference
    return RunSummary(
        id=line.name,
        kind=manifest.kind.value,
        created=manifest.created,
        device=environment.device.kind or "",
        reference=f"{reference.kind or ''} {reference.commit or ''}".strip(),
        gates=line.gates,
        broken=line.broken,
        fault=manifest.fault or "",
        verdict=manifest.verdict,
    )
