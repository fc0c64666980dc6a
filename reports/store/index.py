"""The index of a folder of runs: a cache of the fields that listings need, for fast listing.

The run folders are the truth. A line of the index is valid only while every file of its run has the
size, times and inode that it was made from; otherwise the run is read and checked again. An index
that was made by other rules (`RULES`) is not used: they may accept what is damaged now. Without an
index, listing ten thousand runs once takes about a minute. Source: docs/reports.md "Store".
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megalodon_jax.files import written_aside
from reports.store.examine import Examined, examine_all
from reports.store.gathered import Gathered, forget, gather
from reports.store.manifest import Environment, Manifest, SuiteResult
from reports.store.reader import read_bytes
from reports.store.schema import StoreError

INDEX = ".index.json"
INDEX_BYTES = 512 * 2**20
"""Largest index, in bytes, that is read; 10,000 runs need some 10 MB."""
# 2: every field of run.json has its type, at every depth.
RULES = 2
"""Version of the rules by which a run counts as damaged; to be raised when they change."""
AT_ONCE = 512
"""Runs per batch: their gates are written before the next batch, to limit memory."""
# Fields of a manifest that no list needs, which are nearly all of its bytes.
_BULKY: dict[str, Any] = {
    **dict.fromkeys(
        ("tolerances", "seams", "times", "cases", "ports", "parts", "plan", "contract"), ()
    ),
    "spreads": {},
    "stability": {},
    **dict.fromkeys(("workload", "checkpoint", "files")),
}
_SHARED = ("environment", "suites")
"""Fields that most runs have in common; the index stores each distinct text once."""
_PLAIN = tuple(f.name for f in fields(Manifest) if f.name not in (*_BULKY, *_SHARED))
"""Fields of a manifest that lists need and that differ between most runs."""


@dataclass(frozen=True, slots=True)
class Line:
    """One folder in the index.

    Attributes:
        name: name of the folder.
        signature: hash of sizes and times of its files (`signature_of`); "" for a run that is not
            on this machine.
        why: why the folder is not a readable run; "" if it is one.
        manifest: manifest without fields that no list needs; None if the run is not readable.
        gates: number of measurements that have a tolerance or could not be compared; 0 for a bench.
        broken: number of gates that do not pass, recomputed from their values and tolerances.
        work: hash of the gates and their identities, without values.
        gathered: name of the combined file (`reports.store.gathered`) that has the run's gates; ""
            if there is none.
    """

    name: str
    signature: str
    why: str = ""
    manifest: Manifest | None = None
    gates: int = 0
    broken: int = 0
    work: str = ""
    gathered: str = ""


_seen: dict[Path, tuple[tuple[int, ...], dict[str, Line], dict[str, str]]] = {}
"""Last index that this process has read, by folder of runs: inode, size and times of its file; its
lines by folder name; `Gathered.verified`."""


def read_index(
    root: Path, folders: Iterable[Path], keep: bool = True, more: Sequence[Line] = ()
) -> list[Line]:
    """Return an index line for each of these folders of `root`, sorted by name.

    Only folders that the index does not know, or whose files changed, are read and checked.

    Args:
        root: folder of runs.
        folders: folders in it that may be runs.
        keep: whether to write new lines to the index, if the folder is writable.
        more: lines that `learn` returned for folders that the index may not know. Like lines of the
            index, they are valid only while the files of their run are unchanged.
    """
    known, verified = _load(root)
    known = known | {line.name: line for line in more}
    gathered = Gathered(root, verified)
    lines: dict[str, Line] = {}
    new: dict[Path, str] = {}
    for folder in folders:
        signature = signature_of(folder)
        line = known.get(folder.name)
        if line is None or line.signature != signature or not gathered.holds(line.gathered):
            new[folder] = signature
        else:
            lines[folder.name] = line
    changed = bool(new or more) or len(lines) < len(known)
    lines |= {line.name: line for line in learn(gathered, new, keep)}
    if changed and keep:
        lines = compact(gathered, lines)
        _save(root, lines, gathered)
    return [lines[name] for name in sorted(lines)]


def compact(gathered: Gathered, lines: dict[str, Line]) -> dict[str, Line]:
    """Merge small combined files of gates if there are too many; return the updated index lines."""
    members: dict[str, list[str]] = {}
    for line in lines.values():
        if line.gathered:
            members.setdefault(line.gathered, []).append(line.name)
    moved = gathered.merge(members)
    return {
        name: replace(line, gathered=moved.get(name, line.gathered)) for name, line in lines.items()
    }


def learn(gathered: Gathered, folders: Mapping[Path, str], keep: bool = True) -> list[Line]:
    """Read folders, check every file of their runs, and return an index line for each.

    Args:
        gathered: the combined files, each with the gates of many runs.
        folders: folders that may be runs, each with its `signature_of` from before it is read.
        keep: whether to write the gates of the runs to a combined file.
    """
    paths = list(folders)
    lines: list[Line] = []
    for start in range(0, len(paths), AT_ONCE):
        with _no_collection():
            found = examine_all(paths[start : start + AT_ONCE])
        place = gather(gathered, found) if keep else ""
        lines += [_line(it, folders[gathered.root / it.name], place) for it in found]
    return lines


@contextmanager
def _no_collection() -> Iterator[None]:
    """Context without Python's cyclic garbage collector: manifests of a batch are kept and hold no
    cycles, and scanning them repeatedly would take a tenth of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def unknown_folders(root: Path, folders: Iterable[Path]) -> list[Path]:
    """Return the folders of `root` that have no line in its index."""
    known, _ = _load(root)
    return [folder for folder in folders if folder.name not in known]


def _line(found: Examined, signature: str, place: str) -> Line:
    manifest = None if found.manifest is None else slim(found.manifest)
    return Line(
        name=found.name,
        signature=signature,
        why=found.why,
        manifest=manifest,
        gates=found.gates,
        broken=found.broken,
        work=found.work,
        gathered=place if found.rows is not None else "",
    )


def slim(manifest: Manifest) -> Manifest:
    """Return a manifest without the large fields, which lists and histories of runs do not show."""
    return replace(manifest, **_BULKY)


def signature_of(folder: Path) -> str:
    """Return a hash of names, sizes, times and inodes, which changes with any file of a folder.

    A folder that cannot be listed has the signature "unreadable: <number of the error>".
    """
    parts = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    status = entry.stat()
                except OSError as error:
                    # A link that leads nowhere hides no change of the other files.
                    parts.append(f"{entry.name}: {error.errno}")
                    continue
                # The time of modification can be set back, the time of the last status change
                # cannot.
                times = f"{status.st_mtime_ns}.{status.st_ctime_ns}"
                kind = stat.S_IFMT(status.st_mode)
                parts.append(f"{entry.name}:{kind}:{status.st_size}:{times}:{status.st_ino}")
    except OSError as error:
        return f"unreadable: {error.errno}"
    return hashlib.blake2b("\n".join(sorted(parts)).encode("utf-8", "surrogateescape"),
                           digest_size=12).hexdigest()  # fmt: skip


def read_lines(path: Path) -> list[Line]:
    """Return the lines of an index; empty if it is missing, damaged or of another version."""
    return list(_read(path)[0].values())


def write_lines(
    path: Path, lines: Sequence[Line], verified: Mapping[str, str] | None = None
) -> None:
    """Write an index; do nothing if the folder is not writable.

    Args:
        path: path of the index.
        lines: its lines.
        verified: state of each combined file when its checksum was verified (`Gathered.verified`).
    """
    texts: dict[str, int] = {}

    def place(value: object) -> int:
        return texts.setdefault(json.dumps(value, sort_keys=True), len(texts))

    rows = []
    for line in lines:
        rest = None
        if (manifest := line.manifest) is not None:
            # Not `to_json`, which copies every field: for ten thousand runs that takes seconds.
            rest = {name: value for name in _PLAIN if (value := getattr(manifest, name))}
            environment = place(_environment(manifest.environment))
            suites = place([_flat(suite) for suite in manifest.suites])
            rest |= {"environment": environment, "suites": suites}
        numbers = (line.gates, line.broken, line.work, line.gathered)
        rows.append((line.name, line.signature, line.why, rest, *numbers))
    document = {"lines": rows, "texts": list(texts), "verified": dict(verified or {})}
    document["rules"] = RULES
    content = json.dumps(document).encode()
    try:
        with written_aside(path) as aside:
            # A checksum, because a damaged line would otherwise be trusted forever.
            aside.write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
    except OSError:
        # Without write permission the list still works, only slower.
        return


def _environment(environment: Environment) -> dict[str, Any]:
    """Return an environment as JSON values."""
    parts = _flat(environment)
    return parts | {name: _flat(parts[name]) for name in ("device", "reference")}


def _flat(row: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name. Unlike `asdict` it copies no values, which would
    take a tenth of the time of an index."""
    return {f.name: getattr(row, f.name) for f in fields(row)}


def _read(path: Path) -> tuple[dict[str, Line], dict[str, str]]:
    try:
        digest, _, content = read_bytes(path, INDEX_BYTES).partition(b"\n")
        if hashlib.sha256(content).hexdigest().encode() != digest:
            return {}, {}
        # The document's nesting depth needs no check: the checksum shows that this program wrote
        # it.
        document = json.loads(content)
        if document["rules"] != RULES:
            return {}, {}
        shared = [json.loads(text) for text in document["texts"]]
        environments: dict[int, Environment] = {}
        suites: dict[int, tuple[SuiteResult, ...]] = {}
        lines = {}
        for name, signature, why, rest, *numbers in document["lines"]:
            manifest = None
            if rest is not None:
                at, ran = rest.pop("environment"), rest.pop("suites")
                if at not in environments:
                    environments[at] = Environment.from_json(shared[at])
                if ran not in suites:
                    suites[ran] = tuple(SuiteResult(**row) for row in shared[ran])
                manifest = Manifest.from_json(
                    rest, environment=environments[at], suites=suites[ran]
                )
            lines[name] = Line(name, signature, why, manifest, *numbers)
        return lines, document["verified"]
    except (StoreError, ValueError, KeyError, TypeError):
        # An invalid index counts as missing: it is derived from the runs.
        return {}, {}


def _load(root: Path) -> tuple[dict[str, Line], dict[str, str]]:
    """Return the index lines by folder name, and the stored `Gathered.verified` of combined files.

    Both are empty if there is no valid index. They are cached in this process.
    """
    path = root / INDEX
    try:
        status = path.stat()
    except OSError:
        return {}, {}
    key = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if (seen := _seen.get(root)) is not None and seen[0] == key:
        return seen[1], seen[2]
    lines, verified = _read(path)
    # Cache one index only: alternating between folders reads them again.
    _seen.clear()
    _seen[root] = (key, lines, verified)
    return lines, verified


def _save(root: Path, lines: Mapping[str, Line], gathered: Gathered) -> None:
    write_lines(root / INDEX, list(lines.values()), gathered.verified)
    forget(gathered, {line.gathered for line in lines.values()})
