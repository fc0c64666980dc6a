"""A history to look at, built from two real runs: the model as it is, and with a known bug.

Equal work gives equal bits, so a night on which nothing changed is the healthy run with another
date. The bug was in the tree for three nights, was repaired, and came back on the last one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from parity.faults import by_name
from reports.nightly.run import Options, nightly
from reports.registry.lookup import page_of
from reports.store.schema import MANIFEST, PAGE
from reports.store.seal import text_of

FAULT = "ema_through_bfloat16"
"""The EMA's parameters rounded to bfloat16: what storage does to long memories."""
LAST = datetime(2026, 11, 20, 21, 30, tzinfo=UTC)
BAD = range(40, 43)
"""Nights before the last one on which the bug was there."""


def demonstrate(
    root: Path,
    cases: Sequence[str],
    nights: int = 70,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[Path, Path]:
    """Fill `root/runs` with nights and return the folders of the last two, green and red.

    Args:
        root: an empty folder.
        cases: what to measure, by name.
        nights: how many, the red one included.
        report: progress.
    """

    def measured(name: str) -> Path:
        return nightly(Options(root / name, tuple(cases), "recorded"), report).folder

    healthy = measured("healthy")
    # It changes weights, which are arguments of what was compiled.
    with by_name(FAULT).planted(compiled=False):
        broken = measured("broken")
    runs = root / "runs"
    runs.mkdir()
    for ago in range(nights - 1, 0, -1):
        _dated(broken if ago in BAD else healthy, runs, ago)
    return _folder(runs, 1), _dated(broken, runs, 0, fault=FAULT)


def _folder(runs: Path, ago: int) -> Path:
    return runs / f"{LAST - timedelta(days=ago):%Y-%m-%dT%H-%M-%SZ}-1a2b3c4"


def _dated(run: Path, runs: Path, ago: int, **changes: Any) -> Path:
    """Store a run again under the date of another night, with the page it then had."""
    folder = _folder(runs, ago)
    shutil.copytree(
        run, folder, copy_function=os.link, ignore=shutil.ignore_patterns(PAGE, MANIFEST)
    )
    manifest = json.loads((run / MANIFEST).read_text(encoding="utf-8"))
    created = (LAST - timedelta(days=ago)).isoformat()
    manifest |= {"id": folder.name, "created": created, "dirty": False, **changes}
    (folder / MANIFEST).write_text(text_of(manifest), encoding="utf-8")
    if ago < 2:
        (folder / PAGE).write_text(page_of(folder), encoding="utf-8")
    return folder
