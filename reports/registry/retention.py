"""Deletion of old runs that no later run is compared with.

Source: docs/reports.md "Store".
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from reports.provenance.host import fingerprint
from reports.registry.lookup import anchors_of, is_pinned, without_pinned
from reports.store.runs import RunInfo, list_runs, read_run
from reports.store.schema import FILES, MEASUREMENTS, StoreError
from reports.store.shared import storage_of
from reports.verdict import pins
from reports.verdict.history import load_history


@dataclass(frozen=True)
class Plan:
    """Planned deletion: the runs to delete and the runs to keep.

    Attributes:
        newest: number of runs kept because they are among the newest.
        goes: folders of the runs to delete.
        spared: folders of old runs that are kept, each with the reason.
        unreadable: folders that cannot be read and are kept, each with the error.
    """

    newest: int
    goes: tuple[Path, ...]
    spared: tuple[tuple[Path, str], ...]
    unreadable: tuple[tuple[Path, str], ...]


def plan(root: Path, keep: int) -> Plan:
    """Plan a deletion of old runs under `root`.

    Kept are the newest `keep` runs of each kind, subject and class of device, the baseline of the
    newest of each, the pinned runs, and the anchors of every machine (its oldest passing runs, with
    which later ones are compared). Unreadable folders are kept too: they might be restored.

    Raises:
        StoreError: the root cannot be listed.
    """
    stored, unreadable = list_runs(root)
    groups: dict[object, list[RunInfo]] = {}
    for run in stored:
        device = run.manifest.environment.device.kind
        groups.setdefault((run.kind, run.manifest.subject, device), []).append(run)
    newest = {run.folder for runs in groups.values() for run in runs[-keep:]}
    baselines = _baselines(root, groups.values())
    anchors = _anchors(root, stored)
    goes: list[Path] = []
    spared: list[tuple[Path, str]] = []
    for run in stored:
        name = run.manifest.id
        if run.folder in newest:
            continue
        if is_pinned(root, run.manifest):
            spared.append((run.folder, "pinned"))
        elif name in anchors:
            spared.append((run.folder, f"anchor of the machine of {anchors[name]}"))
        elif name in baselines:
            spared.append((run.folder, f"baseline of {baselines[name]}"))
        else:
            goes.append(run.folder)
    return Plan(len(newest), tuple(goes), tuple(spared), tuple(unreadable))


def _baselines(root: Path, groups: Iterable[list[RunInfo]]) -> dict[str, str]:
    """Return the baseline of the newest run of each of `groups`: id of the baseline -> id of the
    newest run. The runs of a group are ordered oldest first."""
    baselines: dict[str, str] = {}
    for runs in groups:
        if MEASUREMENTS in FILES[runs[-1].kind]:
            baseline = load_history(root, read_run(runs[-1].folder)).baseline
            if baseline is not None:
                baselines[baseline.id] = runs[-1].manifest.id
    return baselines


def _anchors(root: Path, stored: Iterable[RunInfo]) -> dict[str, str]:
    """Return the anchors of all machines: id of the anchor -> id of the machine's newest run.

    Anchors are the oldest passing runs of a machine, with which its later runs are compared.
    """
    newest: dict[tuple[object, ...], RunInfo] = {}
    for run in stored:
        machine = fingerprint(run.manifest.environment)
        if machine is not None and MEASUREMENTS in FILES[run.kind] and run.manifest.whole:
            newest[run.kind, run.manifest.subject, machine] = run
    anchors: dict[str, str] = {}
    for run in newest.values():
        pinned = pins.pins_of(root, run.manifest)
        read = read_run(run.folder)
        if not without_pinned(read, pinned).measurements:
            continue
        # A machine's only run will be the anchor of the machine's next run.
        for old in anchors_of(root, read, pinned) or (read,):
            anchors.setdefault(old.id, read.id)
    return anchors


def delete(folder: Path) -> None:
    """Delete a run. It is renamed first, so an interrupted deletion leaves no partial run.

    Raises:
        StoreError: the folder cannot be changed.
    """
    if (storage := storage_of(folder.parent)) is not None:
        storage.delete(folder.name)
    aside = folder.with_name(f".pruned-{folder.name}")
    try:
        os.rename(folder, aside)
        shutil.rmtree(aside)
    except OSError as error:
        raise StoreError(
            f"expected to delete {folder}, but {error.strerror or error}; the remaining files are "
            "no longer a run. Make the folder writable and prune again"
        ) from error


def clean(root: Path) -> None:
    """Delete the remains of interrupted deletions, here and on shared storage.

    Raises:
        StoreError: the shared storage raises an error.
    """
    for aside in root.glob(".pruned-*"):
        shutil.rmtree(aside, ignore_errors=True)
    if (storage := storage_of(root)) is not None:
        storage.clean()
