"""Sweep: runs items on an executor and stores every answer, so that a killed driver can resume.

Only the driver writes. Each answer is one line, appended to a file and never changed. Files that an
item wrote are stored in a folder beside the file, before the line is appended. So a driver that is
killed at any moment leaves only complete answers, and the next driver continues from them. Items
that failed or were not run are not stored, and run again. Each line has a checksum of the answer
and its files; an answer that was edited, or whose files changed, is discarded.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from parity.executors.executor import Executor, Log
from parity.executors.inputs import digest_of_file
from parity.executors.item import Answer, Item, ItemError, State
from parity.executors.progress import Progress

ANSWERS, LOCK = "answers.jsonl", ".lock"
"""Names of the file of answers and of the lock file in a sweep's folder."""
# `fsync` after each answer would take some milliseconds. Without `fsync` a killed driver loses
# nothing, since the operating system has the data, but a power failure loses the latest answers.
SYNCED_EVERY = 1.0
"""Seconds between two `fsync`s: a power failure may lose the answers of so many seconds."""


def open_executor(text: str = "local", address: str | None = None) -> Executor:
    """Return an executor by name.

    Args:
        text: `local`, `local:N` with N workers, or `ray`.
        address: address of the Ray cluster (`RayExecutor`); None with `local`.

    Raises:
        ItemError: the name is not one of these, an address was given with `local`, or Ray is not
            available.
    """
    kind, _, count = text.partition(":")
    if kind == "local" and (not count or (count.isdecimal() and int(count))):
        if address:
            raise ItemError(
                f"expected no address with the executor {text!r}, received {address!r}; only the "
                "executor ray has one."
            )
        from parity.executors.local import LocalExecutor

        return LocalExecutor(int(count) if count else None)
    if text == "ray":
        from parity.executors.cluster import RayExecutor

        return RayExecutor(address)
    raise ItemError(f"expected the executor local, local:N or ray, received {text!r}.")


class Answers:
    """Stored answers of a sweep, in a folder that only one driver at a time may use.

    `Answers.opened` gives an instance.
    """

    def __init__(self, folder: Path, file: TextIO, lines: Mapping[str, str]) -> None:
        # Not at the top, because `megalodon_jax` imports JAX, and not in `write`, where the import
        # would delay the first answer.
        from megalodon_jax import files

        self.folder, self.disk = folder, files
        self._file, self._lines = file, dict(lines)
        self._synced = time.monotonic()
        self.damaged: list[str] = []
        """Names of items whose stored answer was damaged: they are run again."""

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator[Answers]:
        """Return a context manager that locks a folder and gives its stored answers.

        The folder is made if it does not exist. The system releases the lock when the process ends
        for any reason, so a lock is never left behind.

        Raises:
            ItemError: another driver uses the folder, its file system cannot lock files, or its
                `answers.jsonl` holds something other than stored answers.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOCK).open("a+", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                lock.seek(0)
                raise ItemError(
                    f"expected {folder} for this driver alone, and {lock.read().strip()} has it; "
                    "wait until that driver ends, or choose another folder with --out"
                ) from error
            except OSError as error:
                # Some network file systems have no locks. Without one, two drivers could append to
                # one file.
                raise ItemError(
                    f"expected a file system that can lock {folder / LOCK}, received {error}; "
                    "choose a folder on another file system with --out"
                ) from error
            lock.truncate(0)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            lock.write(f"process {os.getpid()} on {platform.node()} since {now}")
            lock.flush()
            for left in folder.glob(".*.partial"):
                # Left by a driver that was killed while it wrote.
                shutil.rmtree(left, ignore_errors=True)
            lines = _whole_lines(folder / ANSWERS)
            with (folder / ANSWERS).open("a", encoding="utf-8") as file:
                yield cls(folder, file, lines)

    def read(self, item: Item) -> Answer | None:
        """Return the stored answer of an item, without files; None if there is none.

        If the checksum does not match, the stored answer is dropped, the item's name is added to
        `damaged`, and the result is None.
        """
        key = _key(item)
        if key not in self._lines:
            return None
        line = json.loads(self._lines[key])
        files = {
            name: digest_of_file(path) for name, path in sorted(_files_below(self.folder / key))
        }
        if line != _line(key, line.get("answer"), files):
            del self._lines[key]
            self.damaged.append(item.name)
            return None
        return Answer.from_json(line["answer"])

    def files(self, item: Item) -> Path:
        """Return the folder with the files that an item wrote; it may not exist."""
        return self.folder / _key(item)

    def write(self, item: Item, answer: Answer) -> None:
        """Store an item's answer and its files; do nothing if an answer is already stored."""
        key = _key(item)
        if key in self._lines:
            return
        if item.folder:
            # If the folder exists without a line, a driver was killed between writing folder and
            # line: replace the folder.
            with self.disk.folder_written_aside(self.folder / key) as aside:
                for name, content in answer.files.items():
                    (aside / name).parent.mkdir(parents=True, exist_ok=True)
                    (aside / name).write_bytes(content)
        sums = {name: hashlib.sha256(content).hexdigest() for name, content in answer.files.items()}
        line = json.dumps(_line(key, answer.to_json(), sums if item.folder else {}))
        self._file.write(f"{line}\n")
        self._file.flush()
        self._lines[key] = line
        if time.monotonic() - self._synced > SYNCED_EVERY:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def discard(self) -> None:
        """Delete all answers and their files, once they are stored elsewhere or not wanted."""
        self._lines.clear()
        self._file.truncate(0)
        for path in self.folder.iterdir():
            if path.name not in (LOCK, ANSWERS):
                shutil.rmtree(path, ignore_errors=True)


def _line(key: str, answer: Any, files: Mapping[str, str]) -> dict[str, Any]:
    """Return the JSON object of a stored line: key, answer and a checksum.

    The checksum covers key, answer and `files`, the digests of the answer's files by relative path.
    """
    facts = json.dumps([key, answer, dict(files)], sort_keys=True)
    checksum = hashlib.sha256(facts.encode()).hexdigest()
    return {"key": key, "answer": answer, "checksum": checksum}


def _files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path


def _key(item: Item) -> str:
    """Return the key of an item's answer: name in filename-safe characters, and digest."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", item.name).lstrip(".")[:100]
    return f"{name}-{item.digest()}"


def _whole_lines(path: Path) -> dict[str, str]:
    """Return the lines of a file of answers, by key; an incomplete last line is cut off the file.

    Raises:
        ItemError: a line is no JSON object with a key.
    """
    content = path.read_bytes() if path.is_file() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    try:
        lines = whole.decode("utf-8").splitlines()
        return {json.loads(line)["key"]: line for line in lines}
    except (ValueError, KeyError, TypeError) as error:
        raise ItemError(
            f"expected the stored results of items in {path}, one JSON object per line, but "
            f"reading them gave {error!r}; delete the folder {path.parent}, so that all items run "
            "again"
        ) from error


def run(
    items: Sequence[Item],
    executor: Executor,
    answers: Answers | None = None,
    report: Log = lambda line: None,
) -> Generator[Answer, None, None]:
    """Yield the answer of every item once: stored answers first, others as items finish.

    Args:
        items: items to run, with unique names.
        executor: runs the items; it is always closed at the end.
        answers: stored answers, whose items are not run again; answers of items that succeed are
            added. None: store nothing.
        report: receives a line for each item, and the progress every `progress.EVERY` seconds.

    Raises:
        ItemError: two items have the same name, or an argument is not a JSON value.
    """
    if twice := [name for name, n in Counter(item.name for item in items).items() if n > 1]:
        raise ItemError(f"expected items with different names, received twice: {', '.join(twice)}.")
    known = {item.name: answers.read(item) for item in items} if answers else {}
    waiting = [item for item in items if known.get(item.name) is None]
    try:
        if answers and answers.damaged:
            report(f"  stored answers are damaged, running again: {', '.join(answers.damaged)}")
        if len(waiting) < len(items):
            report(f"  {len(items) - len(waiting)} of {len(items)} items have stored answers")
        yield from (answer for answer in known.values() if answer is not None)
        with Progress(executor, waiting, report) as progress:
            futures = dict(zip(executor.start(waiting), waiting, strict=True))
            for future in as_completed(futures):
                item, answer = futures.pop(future), future.result()
                if answers and answer.state is State.DONE:
                    answers.write(item, answer)
                progress.done(answer)
                yield answer
    finally:
        executor.close()


def collect(
    items: Sequence[Item],
    executor: Executor,
    folder: Path | None = None,
    report: Log = lambda line: None,
) -> list[Answer]:
    """Run items and return their answers, in the order of the items; all must succeed.

    Args:
        items: items to run, with unique names.
        executor: runs the items; closed at the end.
        folder: where to store answers, so that a killed driver can be started again; None: nowhere.
        report: as in `run`.

    Raises:
        RuntimeError: items failed or were not run; the message has the first five with reasons.
        ItemError: as in `run`, or another driver uses `folder`.
    """
    with Answers.opened(folder) if folder else nullcontext() as answers:
        known = {answer.name: answer for answer in run(items, executor, answers, report)}
    if bad := [a for a in known.values() if a.state is not State.DONE]:
        reasons = "; ".join(f"{a.name}: {a.reason}" for a in bad[:5])
        raise RuntimeError(f"{len(bad)} of {len(items)} items have no answer: {reasons}")
    return [known[item.name] for item in items]
