"""When a gate began to fail: the last run in which it held, the first in which it failed, and
the commits between them.

Source: docs/verdicts.md "Since when".
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from parity.engine.measure.measurement import Measurement
from reports.store.manifest import Manifest
from reports.store.runs import Run
from reports.text import count, label
from reports.verdict.history import History

SHORT = 10
"""Number of digits of a commit's hash that are shown."""


@dataclass(frozen=True, slots=True)
class Since:
    """Two runs between which a gate began to fail."""

    held: Manifest | None
    """The newest earlier run in which the gate held; None if it held in none."""
    failed: Manifest
    """The oldest run of the current failing streak."""
    runs: int
    """Length of the streak in runs, the judged run included."""
    folder: str = ""
    """Folder name of the run `held`; empty if there is none."""


def since_when(m: Measurement, run: Run, history: History) -> Since | None:
    """Return since when the failing gate `m` of `run` fails; None if no earlier run measured it.

    Only the newest streak counts: if a gate passed in between, the streak starts after that. Runs
    that did not measure the gate are skipped, which widens the range of commits.
    """
    shares = history.series.get(m.key, ())
    runs = zip(history.runs, history.manifests, shares, strict=False)
    measured = [(name, manifest, share) for name, manifest, share in runs if share is not None]
    if not measured:
        return None
    failed, streak = run.manifest, 1
    for name, manifest, share in reversed(measured):
        # A NaN share did not hold.
        if share <= 1:
            return Since(manifest, failed, streak, name)
        failed, streak = manifest, streak + 1
    return Since(None, failed, streak)


def sentence(since: Since, run: Run) -> str:
    """Describe in one sentence for how many runs a gate has failed, without names of runs."""
    if since.held is None:
        return f"It failed in every run that measured it: {count(since.runs, 'run')}."
    if since.runs > 1:
        return f"It failed in {since.runs:,} runs in a row."
    planted = run.manifest.fault
    return f"It fails here first{f': {label(planted, 60)} is planted' if planted else ''}."


def commit_range(before: Manifest, after: Manifest) -> str:
    """Return the commits from one run to another as a git range, such as 0123456789..abcdef0123.

    Empty if a commit is unknown or both commits are equal.
    """
    if not before.commit or not after.commit or before.commit == after.commit:
        return ""
    return f"{before.commit[:SHORT]}..{after.commit[:SHORT]}"


def commits(before: Manifest, after: Manifest, changed: bool = True) -> str:
    """Describe the commits between two runs; without any, blame the environment or the machine.

    Args:
        before: Manifest of the earlier run.
        after: Manifest of the later run.
        changed: Whether the results of the runs differ; if not, nothing is suspected.
    """
    unclean = [name for name, m in (("earlier", before), ("later", after)) if m.dirty]
    which = "both runs" if len(unclean) == 2 else f"the {''.join(unclean)} run"
    aside = f" ({which} had uncommitted changes)" if unclean else ""
    if between := commit_range(before, after):
        return f"{between}{aside}"
    if before.commit and before.commit == after.commit:
        planted = after.fault != before.fault
        known = planted or unclean or not changed
        suspect = "" if known else ": not the code, so the environment or the machine"
        return f"none, both runs are of {before.commit[:SHORT]}{aside}{suspect}"
    return "not known"


def log_command(before: Manifest, after: Manifest) -> str:
    """Return the git command that lists the commits between two runs; empty without a range."""
    between = commit_range(before, after)
    return f"git log --oneline {shlex.quote(between)}" if between else ""
