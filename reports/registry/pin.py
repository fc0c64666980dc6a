"""Pinning: a person declares the error levels of a run good, as a reviewed diff of a text file.

Source: docs/reports.md "Command line".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from reports.provenance.code import git_state
from reports.registry.lookup import read_judgeable
from reports.store.schema import RunKind, StoreError
from reports.text import number
from reports.verdict import pins
from reports.verdict.decide import ExitCode, decide
from reports.verdict.history import load_history
from reports.verdict.levels import Group, Level
from reports.verdict.pins import Pin

PINNABLE = (RunKind.NIGHTLY, RunKind.PORT)
"""Kinds of run that can be pinned; a session of tests has no fixed set of measurements."""


@dataclass(frozen=True)
class PinDiff:
    """A written pinned baseline, the path of its file, and the pin that it replaced or None."""

    pin: Pin
    path: Path
    before: Pin | None

    def lines(self) -> list[str]:
        """Describe the diff in lines: how many error levels moved, how many are new or were
        removed, and the ten moves by the largest factor, up or down.

        A level moves if its geometric mean or its largest value does; the one that moved further is
        listed.
        """
        old: Mapping[Group, Level] = self.before.groups if self.before else {}
        new = self.pin.groups
        moved = {g: _move(old[g], new[g]) for g in new.keys() & old.keys()}
        moved = {group: move for group, move in moved.items() if move.factor != 1.0}
        came, went = new.keys() - old.keys(), old.keys() - new.keys()
        report = [f"{len(moved)} levels moved, {len(came)} are new, {len(went)} were removed"]
        for group, move in sorted(moved.items(), key=lambda item: (-item[1].size, item[0]))[:10]:
            values = f"{number(move.before)} → {number(move.now)}, {move.factor:.2f} times"
            report.append(f"  {' | '.join(group)}: {move.what}{values}")
        return report


@dataclass(frozen=True)
class _Move:
    """Change of a level's geometric mean, or of its largest value, between two pins."""

    before: float
    now: float
    what: str = ""

    @property
    def factor(self) -> float:
        return self.now / self.before

    @property
    def size(self) -> float:
        """The factor or, if it is below 1, its inverse."""
        return max(self.factor, 1 / self.factor)


def _move(before: Level, now: Level) -> _Move:
    """Return the change of the geometric mean, or that of the largest value if it is greater."""
    typical = _Move(before.typical, now.typical)
    worst = _Move(before.worst, now.worst, "largest value ")
    return worst if worst.size > typical.size else typical


def pin_run(folder: Path, reason: str, pins_folder: Path | None = None) -> PinDiff:
    """Pin a stored night or run of ports: later runs may not drift from its error levels.

    Args:
        folder: Folder of the run.
        reason: Why these levels are right, for a reviewer.
        pins_folder: Folder to write to; None for `reports.verdict.pins.home`.

    Raises:
        StoreError: `reason` is empty; there is no checkout, or it has uncommitted changes or had
            them when the run was made; the run is of another kind, ran only some cases, has a
            planted fault or does not pass; or the folder cannot be written.
    """
    if not reason.strip():
        raise StoreError("expected a reason that a reviewer can judge, received none; use --reason")
    run = read_judgeable(folder)
    root = folder.parent
    home = pins_folder or pins.home(root, run.manifest)
    # The levels of a port are committed with the port's code.
    code = pins.beside(root) if run.manifest.subject else Path(__file__).parent
    commit, dirty = git_state(code, root)
    if commit is None or dirty:
        state = "has uncommitted changes" if dirty else "is not a git checkout"
        raise StoreError(
            f"expected a clean checkout, so that the diff shows only the pinning, but the tree "
            f"{state}; commit or stash first"
        )
    manifest = run.manifest
    decision = decide(run, None)
    refusals = {
        f"is a run of kind {manifest.kind}": manifest.kind not in PINNABLE,
        "was made from a tree with uncommitted changes": manifest.dirty,
        f"has the planted fault {manifest.fault}": bool(manifest.fault),
        "ran only some cases": bool(manifest.selected),
        f"is {decision.word}: {decision.sentence}": decision.exit_code is not ExitCode.PASS,
    }
    why = [what for what, holds in refusals.items() if holds]
    if why:
        raise StoreError(
            f"expected a complete, healthy run to pin, but {run.id} {'; '.join(why)}; pin another"
        )
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    past = load_history(root, run).past
    pin = pins.pin_of(run, past, reason.strip(), today)
    path = pins.file_of(pin, home)
    before = pins.read(path)
    # Earlier versions wrote the pin to another folder, which several ports may share: move it.
    old = None if pins_folder else pins.old_home(root, manifest)
    moved = old / path.name if old is not None else None
    if moved is not None and (there := pins.read(moved)) and pins.is_of(there, manifest):
        before = before or there
    else:
        moved = None
    try:
        pins.write(pin, path)
        if moved is not None:
            moved.unlink()
    except OSError as error:
        raise StoreError(
            f"expected a folder that can be written at {path.parent}, but "
            f"{error.strerror or error}; nothing was pinned"
        ) from error
    return PinDiff(pin, path, before)
