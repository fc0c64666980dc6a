"""Writes runs: the numbers first, atomically; verdict and page later.

Source: docs/reports.md "Store".
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megalodon_jax.files import folder_written_aside, written_aside
from parity.engine.measure.measurement import Measurement
from reports.store.explanations import write_explanations
from reports.store.reader import PARQUET_BYTES, checksum, read_bytes
from reports.store.run import Run
from reports.store.schema import (
    FILES,
    FINDINGS,
    MANIFEST,
    MEASUREMENTS,
    PAGE,
    TIMINGS,
    VERDICT,
    StoreError,
    arrow_schema,
)
from reports.store.seal import text_of
from reports.store.shared import ABANDONED, Storage, storage_of
from reports.store.tensors import write_tensors
from reports.store.timings import Timing
from stability.core.findings import Finding

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
Rows = tuple[Measurement, ...] | tuple[Finding, ...] | tuple[Timing, ...]


def _table(name: str, rows: Rows) -> pa.Table:
    schema = arrow_schema(name)
    # str() of a StrEnum is its value; other values are stored unchanged.
    columns = {
        field.name: [
            str(getattr(row, field.name)) if field.type == pa.string() else getattr(row, field.name)
            for row in rows
        ]
        for field in schema
    }
    return pa.table(columns, schema=schema)


def _check_rows(run: Run) -> dict[str, Rows]:
    kind = run.manifest.kind
    rows = {MEASUREMENTS: run.measurements, FINDINGS: run.findings, TIMINGS: run.timings}
    foreign = [name for name, part in rows.items() if part and name not in FILES[kind]]
    if foreign:
        raise StoreError(
            f"expected a run of kind {kind} to hold rows for {', '.join(FILES[kind])} only, "
            f"received rows for {', '.join(foreign)}; set the manifest's kind to what was run"
        )
    return {name: rows[name] for name in FILES[kind]}


@contextmanager
def _refusals_named(root: Path) -> Iterator[None]:
    """Context that turns errors of the file system into a StoreError with folder and advice."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"expected a folder that can be written at {root}, but {error.strerror or error} "
            f"({error.filename or root}); nothing was stored. Give a writable folder with --out, "
            "or free some space"
        ) from error


def check_writable(root: Path) -> None:
    """Raise StoreError if `root` cannot hold a run; called before anything expensive starts."""
    probe = root / f".partial-{uuid.uuid4().hex[:8]}"
    with _refusals_named(root):
        root.mkdir(parents=True, exist_ok=True)
        probe.mkdir()
        probe.rmdir()
    if (storage := storage_of(root)) is not None:
        storage.check_writable()


def write_run(root: Path, run: Run, draw: Callable[[Run], str] | None = None) -> Path:
    """Store a run as `root/<id>`, add the page that `draw` returns for it, and return the folder.

    All files are written to a hidden sibling folder, which is then renamed, so an interrupted or
    failed write leaves no run. run.json is written last and has the checksum of every other file. A
    run is never overwritten: if the id is taken, as when two writers start in the same second, the
    folder and the run become `<id>-2`. If `root` is a copy of shared storage, the run is sent there
    before it appears in the copy (`reports.store.shared`). The page is drawn after the numbers are
    stored; without `draw`, neither page nor verdict is added.

    Raises:
        StoreError: the id is not a valid folder name, the rows do not match the run's kind, or the
            root cannot be written.
        RuntimeError: `draw` failed; the run is stored without its page.
    """
    if not _ID.fullmatch(run.id):
        raise StoreError(
            "expected a run id of letters, digits, '.', '_' and '-' that starts with a letter or a "
            f"digit, received {run.id!r}; give the manifest an id that is a valid folder name"
        )
    parts, storage = _check_rows(run), storage_of(root)
    with _refusals_named(root):
        root.mkdir(parents=True, exist_ok=True)
        name, partial = _claim(root, run.id, storage)
    try:
        run = replace(run, manifest=replace(run.manifest, id=name))
        with _refusals_named(root):
            _write_files(partial, run, parts)
            if storage is None:
                folder, partial = partial.rename(root / name), None
            else:
                whole, partial = partial, None
                # `publish` keeps the run in any case, and may have to give it another name.
                folder = storage.publish(whole, name)
                run = replace(run, manifest=replace(run.manifest, id=folder.name))
    finally:
        # Also after Ctrl-C. After a rename, another writer may already own the hidden name.
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
    if draw is not None:
        add_page(folder, run, draw)
    return folder


def rewrite_run(folder: Path, run: Run, page: str) -> None:
    """Replace the stored state of a run that is still being measured.

    Folder and page are exchanged together, so a reader sees the earlier or the later state. Only
    for the runs of a training (`reports.watching`): any other run is never changed.

    Raises:
        StoreError: the rows do not match the run's kind, or the folder cannot be written.
    """
    parts = _check_rows(run)
    with _refusals_named(folder), folder_written_aside(folder) as aside:
        _write_files(aside, run, parts)
        add_verdict(aside, run.manifest.verdict, page)


def _write_files(partial: Path, run: Run, parts: dict[str, Rows]) -> None:
    """Write the files of a run, run.json last."""
    for file, rows in parts.items():
        pq.write_table(_table(file, rows), partial / file)
    write_tensors(partial, run.tensors)
    write_explanations(partial, run.explanations)
    paths = sorted(partial.iterdir())
    files = {path.name: checksum(read_bytes(path, PARQUET_BYTES)) for path in paths}
    manifest = replace(run.manifest, files=files)
    (partial / MANIFEST).write_text(text_of(manifest.to_json()), encoding="utf-8")


def add_page(folder: Path, run: Run, draw: Callable[[Run], str]) -> None:
    """Add the page that `draw` returns for a stored run, and the verdict of its manifest.

    Raises:
        RuntimeError: `draw` failed; the verdict is stored without a page.
        StoreError: the folder or the shared storage cannot be written.
    """
    try:
        page = draw(run)
    except Exception as error:
        add_verdict(folder, run.manifest.verdict)
        raise RuntimeError(
            f"the run is stored in {folder}, but its page could not be drawn: {error!r}. "
            f"`megalodon-numerics report {folder}` draws it again"
        ) from error
    add_verdict(folder, run.manifest.verdict, page)


def add_verdict(folder: Path, word: str, page: str | None = None) -> None:
    """Add the verdict `word` and, if given, the page to a stored run, each file atomically.

    Neither is part of the run, whose files are not changed.

    Raises:
        StoreError: the folder or the shared storage cannot be written.
    """
    document: dict[str, object] = {"verdict": word}
    with _refusals_named(folder):
        if page is not None:
            content = page.encode("utf-8", "replace")
            document["files"] = {PAGE: checksum(content)}
            with written_aside(folder / PAGE) as aside:
                aside.write_bytes(content)
        # Ties the verdict to this run.json: an edited one has no verdict.
        document["run"] = checksum(read_bytes(folder / MANIFEST))
        with written_aside(folder / VERDICT) as aside:
            aside.write_text(text_of(document), encoding="utf-8")
    if (storage := storage_of(folder.parent)) is not None:
        for name in (PAGE, VERDICT):
            if (folder / name).is_file():
                storage.put(folder / name, f"{folder.name}/{name}")


def _claim(root: Path, run_id: str, storage: Storage | None) -> tuple[str, Path]:
    """Claim the first free name; return it and the hidden folder that claims it.

    Only one writer can create the hidden folder. A hidden folder without writes for `ABANDONED`
    seconds belongs to a killed writer and is deleted. Anything else that has the hidden folder's
    name, such as a file, is kept, and the next name is tried.
    """
    for turn in itertools.count(1):
        name = run_id if turn == 1 else f"{run_id}-{turn}"
        partial = root / f".partial-{name}"
        with suppress(OSError):
            # Every new file updates the modification time of the folder.
            # Opening a pipe, which is the first step of deleting, would wait for a writer.
            if partial.is_dir() and time.time() - partial.lstat().st_mtime > ABANDONED:
                shutil.rmtree(partial)
        with suppress(FileExistsError):
            partial.mkdir()
            try:
                if not os.path.lexists(root / name) and (storage is None or storage.claim(name)):
                    return name, partial
            except StoreError:
                # The storage does not answer. The run is kept and claims a name when it is sent.
                return name, partial
            partial.rmdir()
    raise AssertionError("unreachable: every name is taken")
