"""A watched training as a run: its manifest, findings, and the document for its page.

Nothing here initialises JAX: in a training with torch, JAX would allocate most of a GPU's memory.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from parity.executors import identity as program
from reports.provenance.code import git_state
from reports.provenance.host import FIELDS, FLAGS, host, threads
from reports.store.manifest import Device, Environment, Manifest, SuiteResult
from reports.store.run import Run
from reports.store.schema import RunKind
from stability.storage.watch_looks import PATIENCE, LeafLook, Watched, error_of

SECTION = "watch"
"""Name of the suite, and key of the watch's document in the manifest's `stability`."""
PACKAGES = {
    "torch": ("torch", "numpy"),
    "transformers": ("torch", "transformers", "accelerate", "numpy"),
    "optax": ("jax", "jaxlib", "optax", "equinox", "numpy"),
}
"""Packages whose versions are stored with the run, by the training's framework."""


@dataclass(frozen=True, slots=True)
class Facts:
    """State of a watch when its run is stored: progress, cost and how it ended.

    Attributes:
        framework: a key of `PACKAGES`.
        steps: number of optimiser steps so far; in torch without skipped ones.
        skipped: in torch, the number of steps that a loss scaler skipped; in optax, the number of
            looks (measurements) that were due but skipped, because all updates were 0 or one was
            not finite.
        seconds: time since the watch began, in seconds.
        cost: part of this time that the watch itself took, in seconds.
        closed: whether the watch was closed, so that the training has ended.
        stopped: when and why the watch switched itself off, such as "after step 9 by ...", or "".
        warned: text of the warning, or "".
        remedied: whether the optimiser uses this project's stochastic rounding or Kahan summation,
            so that unchanged elements lose nothing.
    """

    framework: str
    steps: int
    skipped: int
    seconds: float
    cost: float
    closed: bool
    stopped: str
    warned: str
    remedied: bool


def new_watch_manifest(started: datetime, root: Path, framework: str, device: Device) -> Manifest:
    """Return the manifest of a watch that starts: the training's commit, and the machine.

    Args:
        started: when the watch started, in UTC.
        root: folder of runs, which does not count as a change of the checkout.
        framework: a key of `PACKAGES`.
        device: device of the parameters; one without a name gets that of the processor.
    """
    commit, dirty = git_state(Path.cwd(), root)
    here = host()
    versions = {"python": platform.python_version()}
    for package in PACKAGES[framework]:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return Manifest(
        id=f"{started:%Y-%m-%dT%H-%M-%SZ}-{commit[:7] if commit else 'unversioned'}-watch",
        created=started.isoformat(),
        kind=RunKind.WATCH,
        commit=commit,
        dirty=dirty,
        code=program.code(),
        environment=Environment(
            device=device if device.name else replace(device, name=here["name"]),
            host={field: here[field] for field in FIELDS},
            threads=threads(),
            flags={name: value for name in FLAGS if (value := os.environ.get(name))},
            versions=versions,
        ),
    )


def run_of(manifest: Manifest, watched: Watched, facts: Facts) -> Run:
    """Return the results of a watch, finished or in progress, as a run that can be stored.

    `facts` is the state of the watch. The run has one suite, which is incomplete if the watch is
    unfinished or failed, or has no look (measurement).
    """
    reason = facts.stopped and f"the watch switched itself off {facts.stopped}"
    if not (reason or facts.closed):
        reason = "not closed: the training is still running, or was killed"
    if not (reason or watched.looks):
        reason = f"no look: {facts.steps} steps, the first look is at step {watched.every}"
    suite = SuiteResult(
        SECTION,
        planned=len(watched.leaves),
        executed=sum(not math.isnan(leaf.frozen) for leaf in watched.latest().values()),
        reason=reason,
        status="failed" if reason else "ran",
    )
    return Run(
        replace(
            manifest,
            durations={SECTION: round(facts.seconds, 3)},
            suites=(suite,),
            stability={SECTION: document_of(watched, facts, reason)},
        ),
        findings=tuple(watched.findings(words(facts.framework))),
    )


def words(framework: str) -> str:
    """Return the framework that remedies are written for: "torch" or "jax"."""
    return "jax" if framework == "optax" else "torch"


def document_of(watched: Watched, facts: Facts, reason: str) -> dict[str, Any]:
    """Return the data for the page as JSON values, None for values that were not measured.

    `reason` says why the watch is not complete; "" if it is.
    """
    steps = [look.step for look in watched.looks]
    still = set(watched.frozen())
    latest = watched.latest()
    families = dict.fromkeys(leaf.family for leaf in watched.leaves.values())
    leaves = []
    for name, leaf in watched.leaves.items():
        newest = latest.get(name)
        rows = [look.leaves.get(name) for look in watched.looks]
        leaves.append(
            {
                "name": name,
                "family": leaf.family,
                "dtype": leaf.dtype,
                "shape": list(leaf.shape),
                "followed": len(leaf.places),
                "error": newest and error_of(newest.frozen, newest.elements, leaf.size),
                "still": name in still,
                "why": watched.absent.get(name, ""),
                **_series(rows),
            }
        )
    return {
        "framework": facts.framework,
        "every": watched.every,
        "patience": PATIENCE,
        "steps": steps,
        "total": facts.steps,
        "skipped": facts.skipped,
        "seconds": round(facts.seconds, 3),
        "cost": round(facts.cost, 4),
        "reason": reason,
        "warned": facts.warned,
        "remedied": facts.remedied,
        "families": {
            family: _series([look.families.get(family) for look in watched.looks])
            for family in families
        },
        "leaves": leaves,
        "absent": {n: why for n, why in watched.absent.items() if n not in watched.leaves},
    }


def _series(rows: list[LeafLook | None]) -> dict[str, list[float | None]]:
    parts: Mapping[str, Callable[[LeafLook], float]] = {
        "frozen": lambda row: row.frozen,
        "unchanged": lambda row: row.unchanged,
        "update": lambda row: row.update,
    }
    return {
        name: [None if row is None else _number(part(row)) for row in rows]
        for name, part in parts.items()
    }


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
