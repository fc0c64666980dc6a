"""The page of all runs, in the folder of the runs: built from the index and written atomically.

Source: docs/reports.md "All runs".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from megalodon_jax.files import written_aside
from reports.page import all_runs
from reports.page.all_runs import Entry, Event, GateGroup
from reports.registry.gate_changes import GateChanges, GateName, follow_gates
from reports.store.index import Line
from reports.store.manifest import Manifest
from reports.store.runs import RunInfo, list_lines, without_copies
from reports.store.schema import PAGE, StoreError
from reports.store.shared import address_of
from reports.text import edge_rank
from reports.verdict import since

RUNS_PAGE = "index.html"
SHOWN = 2000
"""Largest number of runs listed individually: six years of nights in 1.5 MB. Older runs are only
counted."""
_DATED = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d)-(\d\d)-(\d\d)Z")


def write_runs_page(root: Path) -> Path:
    """Write the page of the runs under `root` into that folder, and return its path.

    Raises:
        StoreError: the folder does not exist or cannot be listed.
        OSError: the page cannot be written; the old page is kept.
    """
    if not root.is_dir():
        raise StoreError(
            f"expected a folder of runs at {root}, but it does not exist; `nightly` makes one"
        )
    page, text = root / RUNS_PAGE, draw_runs_page(root)
    with written_aside(page) as aside:
        aside.write_text(text, encoding="utf-8")
    return page


def renew_runs_page(root: Path, report: Callable[[str], None]) -> None:
    """Update the page beside the runs; an error is reported and not raised.

    The page is derived data, so an error must not affect storing, judging or drawing a run.
    """
    try:
        write_runs_page(root)
    except Exception as error:
        report(
            f"the page of all runs was not written: {type(error).__name__}: {error}; "
            "`megalodon-numerics list --html` writes it"
        )


def draw_runs_page(root: Path) -> str:
    """Return the page of all runs under `root` as one HTML text."""
    lines, unreadable = list_lines(root)
    by_name = {line.name: line for line in lines}
    infos = [RunInfo(root / n.name, n.manifest, n.work) for n in lines if n.manifest is not None]
    runs = [(by_name[r.folder.name], r.manifest) for r in without_copies(infos, unreadable)]
    older, newest = runs[: max(0, len(runs) - SHOWN)], runs[-SHOWN:]
    changes = follow_gates(root, [line for line, _ in newest])
    manifests = {line.name: manifest for line, manifest in newest}
    entries = [
        _entry(root, line, manifest, changes.get(line.name, GateChanges()), manifests)
        for line, manifest in newest
    ]
    # A damaged folder without a known date may be the newest, so it is listed as such.
    damaged = [Entry(f.name, _dated(f.name), why=why) for f, why in unreadable]
    entries = sorted([*entries, *damaged], key=lambda e: (e.created or "\uffff", e.name))
    omitted = [_entry(root, line, manifest, GateChanges(), {}) for line, manifest in older]
    return all_runs.render(entries, _place(root), omitted)


def _place(root: Path) -> str:
    address = address_of(root)
    return root.resolve().name if address == str(root) else address


def _dated(name: str) -> str:
    found = _DATED.match(name)
    return "{}T{}:{}:{}+00:00".format(*found.groups()) if found else ""


def _entry(
    root: Path,
    line: Line,
    manifest: Manifest,
    changes: GateChanges,
    manifests: dict[str, Manifest],
) -> Entry:
    environment, reference = manifest.environment, manifest.environment.reference
    device = environment.device
    return Entry(
        name=line.name,
        created=manifest.created,
        kind=manifest.kind.value,
        subject=tuple(sorted(manifest.subject)),
        device=f"{device.kind or ''} {device.name or ''}".strip(),
        reference=f"{reference.kind or ''} {(reference.commit or '')[:10]}".strip(),
        commit=manifest.commit or "",
        dirty=manifest.dirty,
        fault=manifest.fault or "",
        selected=len(manifest.selected),
        verdict=manifest.verdict,
        gates=line.gates,
        broken=line.broken,
        page=bool(manifests) and (root / line.name / PAGE).is_file(),
        events=tuple(
            Event(
                before=step.before,
                commits=since.commits(manifests[step.before], manifest),
                began=_groups(step.began),
                ceased=_groups(step.ceased),
            )
            for step in changes.steps
        ),
        first=changes.first,
        dropped=changes.dropped,
        known=changes.known,
    )


def _groups(gates: Sequence[GateName]) -> tuple[GateGroup, ...]:
    """Return gates grouped by case and edge (comparison), in the order of `edge_rank`."""
    groups: dict[tuple[str, str], list[GateName]] = {}
    for gate in gates:
        groups.setdefault((gate.case, gate.edge), []).append(gate)
    found = []
    for (case, edge), members in groups.items():
        least = min(members, key=lambda gate: (gate.quantity, gate.metric))
        found.append(GateGroup(case, edge, len(members), least.quantity, least.metric))
    return tuple(sorted(found, key=lambda group: (edge_rank(group.edge), group.case)))
