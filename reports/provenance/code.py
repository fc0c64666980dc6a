"""State at the start of a night: code, inputs and commit, which must not change until its end."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec

from parity.executors.identity import Watch, code, stale_bytecode
from parity.executors.inputs import changed, contents
from reports.store.schema import StoreError

PACKAGES = Path(__file__).parents[2]
P = ParamSpec("P")


@dataclass(frozen=True)
class Start:
    """State of the files on disk when a night started: digests, and git's commit."""

    code: str
    """Digest of the packages and their data files (`parity.executors.identity`)."""
    inputs: Mapping[str, str]
    """Digests of the other files and folders that the night reads, by path as given."""
    commit: str | None
    """Git commit of this project; None outside a checkout."""
    dirty: bool
    """Whether this project's checkout has uncommitted changes; False outside a checkout."""
    watch: Watch = field(default_factory=Watch, compare=False)

    @classmethod
    def now(cls, inputs: Iterable[str | Path | None] = ()) -> Start:
        """Return the state of the code and the inputs now.

        Args:
            inputs: Files and folders that will be read; None entries are ignored.

        Raises:
            StoreError: the imported packages or Python's stored bytecode differ from the sources on
                disk.
        """
        if stale := stale_bytecode():
            raise StoreError(
                f"expected Python to run the sources of the packages, but its stored bytecode of "
                f"{', '.join(stale[:5])} is of another source with the same size and time. Delete "
                f"the folders __pycache__ below {PACKAGES} and run the same command again"
            )
        names = [str(name) for name in inputs if name is not None]
        start = cls(code(), contents(names), *git_state(PACKAGES))
        start.check()
        return start

    def content(self, place: Path | None) -> str:
        """Return the digest of the input at `place` when the night started; "" for None."""
        return "" if place is None else self.inputs[str(place)]

    def checked_before(self, step: Callable[P, None]) -> Callable[P, None]:
        """Return a progress callback that calls `check`, at most once a second, and then `step`."""

        def checked(*args: P.args, **keywords: P.kwargs) -> None:
            self.check(now=False)
            step(*args, **keywords)

        return checked

    def check(self, now: bool = True) -> None:
        """Raise an error if the code or an input changed since the start.

        Args:
            now: Check code and inputs immediately; otherwise only the code, at most once a second.

        Raises:
            StoreError: something changed; the message names it and says what to do.
        """
        files = self.watch.changed(now) or (changed(self.inputs) if now else [])
        if files:
            more = f" and {len(files) - 5} more" if len(files) > 5 else ""
            raise StoreError(
                f"expected the code and the inputs not to change during the night (code "
                f"{self.code}), but these changed: {', '.join(files[:5])}{more}. No run was "
                "stored, because its parts would be of different programs. Run the same command "
                "again to measure everything with the current files (with --executor, --no-resume "
                "deletes what was measured); or restore these files, and --executor resumes"
            )


def git_state(folder: Path, aside: Path | None = None) -> tuple[str | None, bool]:
    """Return (commit, dirty) of the checkout that contains `folder`; (None, False) without one.

    `dirty` means uncommitted changes outside `aside`, the folder of runs: .gitignore need not name
    that folder.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        runs = None if aside is None else aside.resolve()
        # Runs stored in the root of the checkout are not excluded: that would hide every change.
        inside = runs is not None and Path(git("rev-parse", "--show-toplevel")) in runs.parents
        paths = ["--", ":/", f":(exclude,literal){runs}"] if inside else []
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", *paths))
    except (OSError, subprocess.CalledProcessError):
        return None, False
