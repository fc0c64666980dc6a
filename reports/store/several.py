"""Reads many new runs in several processes, to speed up the first listing of thousands of runs.

Parsing JSON and Parquet holds Python's lock, so threads would not help. A helper process writes its
results as a separate index, whose lines are trusted like those of the index: only while the files
of their run are unchanged. The calling process reads the runs that a helper failed to read.
Source: docs/reports.md "Store".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from parity.executors.interrupts import run_module
from parity.executors.machine import threads
from reports.store.gathered import Gathered
from reports.store.index import Line, learn, read_lines, signature_of, unknown_folders, write_lines

SHARE = 1_000
"""Smallest number of runs per process: a helper takes 2 s to start, as long as reading so many."""
AHEAD = 0.6
"""Fraction of SHARE that the calling process reads in addition, while the helpers start."""
MOST = 4
"""Largest number of processes, the calling one included: each may take 500 MB."""
LONGEST = 1_800.0
"""Seconds after which a helper is stopped and its runs are read by the calling process."""


def learn_together(root: Path, folders: Sequence[Path], keep: bool) -> list[Line]:
    """Return index lines of the folders that the index of `root` lacks, read in several processes.

    Empty, so that `read_index` reads the folders in this process, if there are fewer than 2 * SHARE
    of them or only one processor.

    Args:
        root: folder of runs.
        folders: folders in it that may be runs.
        keep: whether to write the gates of the runs to combined files (`reports.store.gathered`).
    """
    new = unknown_folders(root, folders)
    processes = min(threads(), MOST, len(new) // SHARE)
    if processes < 2:
        return []
    # Every helper's share is spread over all runs, since older ones may be smaller.
    ahead = int(AHEAD * SHARE)
    shares = [new[ahead:][i::processes] for i in range(processes)]
    shares[0] += new[:ahead]
    with (
        TemporaryDirectory(prefix="megalodon-numerics-") as place,
        ThreadPoolExecutor(processes - 1) as helpers,
    ):
        asked = [
            helpers.submit(_ask, root, share, keep, Path(place) / str(i))
            for i, share in enumerate(shares[1:])
        ]
        lines = _learn(root, shares[0], keep)
        for answer in asked:
            lines += answer.result()
    return lines


def _learn(root: Path, folders: Sequence[Path], keep: bool) -> list[Line]:
    # Signatures come first: a file that changes while it is read must not fit the line.
    return learn(Gathered(root, {}), {folder: signature_of(folder) for folder in folders}, keep)


def _ask(root: Path, folders: Sequence[Path], keep: bool, place: Path) -> list[Line]:
    """Read folders in a helper process and return their index lines; empty if the helper failed.

    The processes exchange data through files next to the path `place`.
    """
    names, answer = place.with_suffix(".names"), place.with_suffix(".lines")
    content = json.dumps([folder.name for folder in folders])
    names.write_text(content, encoding="utf-8")
    # The helper imports from where this process does, and never from the current folder.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "JAX_PLATFORMS": "cpu"}
    arguments = (str(root), str(names), str(answer), "keep" if keep else "")
    try:
        run_module("reports.store.several", arguments, environment, LONGEST)
    except (OSError, subprocess.SubprocessError):
        return []
    # The helper writes its answer last and atomically; if it failed, the file is missing.
    return read_lines(answer)


def _help(root: str, names: str, answer: str, keep: str) -> None:
    folders = [Path(root) / name for name in json.loads(Path(names).read_text(encoding="utf-8"))]
    write_lines(Path(answer), _learn(Path(root), folders, bool(keep)))


if __name__ == "__main__":
    _help(*sys.argv[1:])
