"""`--watch`: repeat a command whenever a source file changes, until Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import click

from parity.executors.interrupts import end_with

ROOT = Path(__file__).parents[2]
"""Folder that contains this project's packages, in a checkout or as installed."""
MODEL = ROOT / "megalodon_jax"
"""Folder whose changes repeat a `nightly`."""
POLL = 0.5
"""Seconds between two checks for changed files; a check takes some milliseconds."""

watch_option = click.option(
    "--watch",
    is_flag=True,
    help="Run again whenever the model's or port's source changes; Ctrl-C ends.",
)


def without_watch() -> list[str]:
    """Return the arguments of the running command without --watch."""
    return [argument for argument in sys.argv[1:] if argument != "--watch"]


def watch(folder: Path, arguments: Iterable[str]) -> int:
    """Run a command now and after each change of a Python file below `folder`, until Ctrl-C.

    Return the exit code of the last run. `arguments` follow the program's name. Each run is a new
    process, because imported and compiled programs do not change with their source.
    """
    arguments, code = list(arguments), 0
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # -P: a folder `reports` in the current folder must not be imported in place of ours.
    command = [sys.executable, "-P", "-m", "reports.cli", *arguments]
    try:
        while True:
            before = _stamps(folder)
            code = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}).returncode
            click.echo(f"exit code {code}; watching {folder} (Ctrl-C ends)", err=True)
            while not (changed := _changed(before, _stamps(folder))):
                time.sleep(POLL)
            click.echo(f"changed: {', '.join(path.name for path in changed[:3])}", err=True)
    except KeyboardInterrupt:
        # Ctrl-C is the normal end of watching, so the exit code is that of the last run.
        end_with(code)
        return code


def _stamps(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return the modification time (ns) and size (bytes) of every Python file below a folder."""
    stamps: dict[Path, tuple[int, int]] = {}
    for parent, folders, files in os.walk(folder):
        # Environments and caches hold thousands of irrelevant files.
        folders[:] = [f for f in folders if not f.startswith((".", "__pycache__"))]
        for path in (Path(parent) / name for name in files if name.endswith(".py")):
            try:
                state = path.stat()
            except FileNotFoundError:
                # Editors rename files while saving.
                continue
            stamps[path] = state.st_mtime_ns, state.st_size
    return stamps


def _changed(before: dict[Path, tuple[int, int]], now: dict[Path, tuple[int, int]]) -> list[Path]:
    return sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))
