"""Cost of a whole night of this version, compared with another commit on the same machine.

Both versions run with recordings, in turn: a first night, which compiles every program, and a
second one, which finds the programs stored. Seconds are processor seconds, since wall time depends
on what else the machine does.
"""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from parity.executors.executor import Log
from reports.bench.figures import row
from reports.store.timings import Timing

ROOT = Path(__file__).parents[2]
NIGHTS = ("first night", "second night")
RECORDED = ("--reference", "recorded")
DONE = (0, 1, 4)
"""Exit codes of a night that ran all its parts, whatever its verdict."""
NONE = "no compiled programs were stored"
"""Reason why the ratio of numbers of compiled programs is missing."""
_PACKAGES = ("megalodon_numerics", "reports.cli")
"""Packages that `python -m` runs with the command `nightly`; a version has one of them. The newer
name comes first."""


class NightsError(ValueError):
    """The nights of this version or of the other commit could not be measured."""


def bench_nights(
    commit: str, shared: Mapping[str, str], report: Log, options: Sequence[str] = ()
) -> list[Timing]:
    """Return the rows (`Timing`) about a first and a second night, of this version and of `commit`.

    They are the processor seconds and the number of compiled programs of each version, and the
    ratios `commit` / this version. The second night of a version finds the programs that its first
    one compiled.

    Args:
        commit: name or hash of the other commit.
        shared: dtype, device and identity of the rows.
        report: called with a line after each night.
        options: options of `nightly` for both versions, such as `--case plain`; empty for a whole
            night.

    Raises:
        NightsError: this is no checkout, the commit does not exist, or a night stores no run or
            does not run all its parts.
    """
    with tempfile.TemporaryDirectory(prefix="nights-") as folder:
        known = check_commit(commit)
        # The hash, not the given name: `main` is another commit tomorrow, and a trend must not mix
        # both.
        name = known[:9]
        trees = {"ours": ROOT, "theirs": _checkout(known, Path(folder) / "tree")}
        for tree in trees.values():
            _package(tree)
        rows = []
        for night in NIGHTS:
            cost = {}
            for side, tree in trees.items():
                cost[side] = seconds, programs = _night(tree, Path(folder) / side, options)
                of = "this version" if side == "ours" else name
                report(f"  {night} of {of}: {seconds:.0f} s of processor, {programs} programs")
            work = f"{night} against {name}"
            (ours, own), (theirs, others) = cost["ours"], cost["theirs"]
            rows += [
                row(work, "night_seconds", ours, shared),
                row(work, "commit_seconds", theirs, shared),
                row(work, "commit_ratio", theirs / ours, shared),
                row(work, "night_programs", own, shared),
                row(work, "commit_programs", others, shared),
                row(work, "programs_ratio", others / own if own else math.nan, shared, note=NONE),
            ]
    return rows


def check_commit(commit: str) -> str:
    """Return the full hash of a commit of this checkout.

    Raises:
        NightsError: this is no checkout, or it has no such commit.
    """
    return _git(commit, "-C", str(ROOT), "rev-parse", "--verify", "-q", f"{commit}^{{commit}}")


def _checkout(commit: str, tree: Path) -> Path:
    """Check a commit out into a new folder; the user's checkout is not changed."""
    _git(commit, "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(tree))
    _git(commit, "-C", str(tree), "checkout", "--quiet", "--detach", commit)
    return tree


def _git(commit: str, *arguments: str) -> str:
    # Git hooks set GIT_DIR, which overrides -C and would make git work on the user's checkout.
    environment = {n: v for n, v in os.environ.items() if not n.startswith("GIT_")}
    done = subprocess.run(
        ("git", *arguments), capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        said = done.stderr.strip()[-300:] or "no such commit"
        raise NightsError(
            f"bench --nights: expected a commit of the checkout {ROOT}, got {commit}: {said}. "
            "Fetch it, or give another one."
        )
    return done.stdout.strip()


def _night(tree: Path, place: Path, options: Sequence[str]) -> tuple[float, int]:
    """Run a night; return its processor seconds, and how many programs JAX's cache then holds.

    Raises:
        NightsError: the night stored no run, or not all parts ran. A night with a failing verdict
            counts: it did all the work.
    """
    package = _package(tree)
    programs, runs = place / "programs", place / "runs"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH")))),
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "JAX_ENABLE_COMPILATION_CACHE": "1",
        # Older versions do not store small programs by default; both must store all.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    before, stored = _processor_seconds(), _runs(runs)
    done = subprocess.run(
        (sys.executable, "-m", package, "nightly", *RECORDED, *options, "--out", str(runs)),
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = _processor_seconds() - before
    if done.returncode not in DONE or _runs(runs) == stored:
        raise NightsError(
            f"the night of the checkout {tree} did not run all parts or stored no run (exit code "
            f"{done.returncode}): {(done.stderr or done.stdout).strip()[-300:]}"
        )
    return seconds, sum(path.name.endswith("-cache") for path in programs.glob("*"))


def _package(tree: Path) -> str:
    """Return the package in a checkout that `python -m` runs with the command `nightly`.

    Raises:
        NightsError: the checkout has none of `_PACKAGES`.
    """
    found = [p for p in _PACKAGES if (tree / p.replace(".", "/")).is_dir()]
    if not found:
        raise NightsError(
            f"expected one of the packages {', '.join(_PACKAGES)} in the checkout {tree}, which "
            "has none: its nights cannot be run"
        )
    return found[0]


def _runs(folder: Path) -> int:
    return sum(1 for _ in folder.glob("*/run.json"))


def _processor_seconds() -> float:
    """Return user plus system seconds of all ended child processes and of their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
