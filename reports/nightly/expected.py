"""Seconds that the parts of a night are expected to take, for the estimate of the time left.

An estimate and no measurement: it changes no verdict. The parts of the newest night that this kind
of processor ran say most. A first night takes the table below, which compiles everything; the pace
of the parts that are done corrects for a slower machine (`parity.executors.progress`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from reports.provenance.environment import new_manifest
from reports.provenance.host import processor
from reports.store.manifest import read_manifest
from reports.store.runs import run_folders
from reports.store.schema import RunKind, StoreError

FIRST: Mapping[str, float] = {}
"""Seconds of each part of a first night with an empty compilation cache, two parts at a time."""
OTHER = 15.0
"""Seconds of a part that the table does not have, such as a case added since."""
NEWEST = 5
"""Stored runs that are asked for their parts, the newest first."""


def expected_seconds(out: Path, names: Sequence[str]) -> tuple[dict[str, float], bool]:
    """Return the seconds of each part, and whether a night on this kind of processor says so."""
    here = processor(new_manifest(datetime.now(UTC), RunKind.NIGHTLY).environment)
    for folder in sorted(run_folders(out), reverse=True)[:NEWEST]:
        try:
            parts = read_manifest(folder).parts
        except StoreError:
            # Listing the runs names it; an estimate is no place for that.
            continue
        seconds = {part.name: part.seconds for part in parts if part.processor == here}
        if all(seconds.get(name, 0.0) > 0.0 for name in names):
            return {name: seconds[name] for name in names}, True
    return {name: FIRST.get(name, OTHER) for name in names}, False


def cost(expected: Mapping[str, float], workers: int, known: bool) -> str:
    """Return in words what a night will cost: the sum of its parts, shared by the workers."""
    seconds = max(sum(expected.values()) / max(workers, 1), max(expected.values()))
    minutes = f"about {seconds / 60:.0f} minutes" if seconds >= 90 else f"about {seconds:.0f} s"
    if known:
        return f"{minutes}, as the last night on this kind of processor"
    return f"{minutes}: a first night compiles every program, later ones take a third of it"
