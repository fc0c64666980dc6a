"""Sweep: runs items on an executor and stores every answer as it arrives, so that none runs twice.

Only the driver writes. An answer is one line appended to a file, and never changed. Files that
items leave behind are stored in folders beside it, each before the line that refers to it. So a
driver killed at any moment leaves complete answers only, and the next one resumes from them. Failed
items and items not run are not stored, and are tried again. Each line has a checksum of itself and
its files: an answer that was edited or lost a file is discarded.
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
# Syncing each answer would take some milliseconds. A killed driver loses nothing, since the system
# has the data; only a power failure can lose it.
SYNCED_EVERY = 1.0
"""Seconds of answers that a power failure may lose."""


def open_executor(text: str = "local", address: str | None = None) -> Executor:
    """Return the executor named `local`, `local:N` or `ray`.

    Raises:
        ItemError: the name is not one of these, or the executor is not available here.
    """
    kind, _, count = text.partition(":")
    if kind == "local" and (not count or (count.isdecimal() and int(count))):
        if address:
            raise ItemError(f"expected no address with {text!r}, received {address!r}.")
        from parity.executors.local import LocalExecutor

        return LocalExecutor(int(count) if count else None)
    if text == "ray":
        from parity.executors.cluster import RayExecutor

        return RayExecutor(address)
    raise ItemError(f"expected the executor local, local:N or ray, received {text!r}.")


class Answers:
    """Stored answers of a sweep in a folder, which only one driver at a time may hold."""

    def __init__(self, folder: Path, file: TextIO, lines: Mapping[str, str]) -> None:
        # Imported here, not at the top, because it imports JAX; and not at the first answer, which
        # would be delayed.
        from megalodon_jax import files

        self.folder, self.disk = folder, files
        self._file, self._lines = file, dict(lines)
        self._synced = time.monotonic()
        self.damaged: list[str] = []
        """Names of items whose stored answer was damaged: they are run again."""

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator[Answers]:
        """Lock the folder and open its answers within this context.

        The system releases the lock when the process ends for any reason, so nobody has to remove
        it.

        Raises:
            ItemError: another driver holds the folder, or its file is no file of answers.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOCK).open("a+", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                lock.seek(0)
                raise ItemError(
                    f"expected {folder} for this driver alone, and {lock.read().strip()} has it; "
                    "wait for it, or give another --out"
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
        """Return the stored answer of an item, without its files; None if there is none, or if it
        was damaged.
        """
        key = _key(item)
        if key not in self._lines:
            return None
        line = json.loads(self._lines[key])
        files = {
            name: digest_of_file(path) for name, path in sorted(_files_below(self.folder / key))
        }
        if line != _line(key, line["answer"], files):
            del self._lines[key]
            self.damaged.append(item.name)
            return None
        return Answer.from_json(line["answer"])

    def files(self, item: Item) -> Path:
        """Return the folder of the files an item left."""
        return self.folder / _key(item)

    def write(self, item: Item, answer: Answer) -> None:
        """Store an answer; an existing one is not changed."""
        key = _key(item)
        if key in self._lines:
            return
        if item.folder:
            # A folder without a line was left by a driver killed in between: replace it.
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
        """Delete all answers, after they became a run or are no longer wanted."""
        self._lines.clear()
        self._file.truncate(0)
        for path in self.folder.iterdir():
            if path.name not in (LOCK, ANSWERS):
                shutil.rmtree(path, ignore_errors=True)


def _line(key: str, answer: Any, files: Mapping[str, str]) -> dict[str, Any]:
    """Return the line of an answer, with its checksum."""
    facts = json.dumps([key, answer, dict(files)], sort_keys=True)
    checksum = hashlib.sha256(facts.encode()).hexdigest()
    return {"key": key, "answer": answer, "checksum": checksum}


def _files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path


def _key(item: Item) -> str:
    """Return the key of an answer: its item's name in filename-safe characters, and its digest."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", item.name).lstrip(".")[:100]
    return f"{name}-{item.digest()}"


def _whole_lines(path: Path) -> dict[str, str]:
    """Return the answers of a file by key, and cut off an incomplete last line.

    Raises:
        ItemError: a line is not an answer.
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
            f"expected answers of a sweep in {path}, one JSON object a line, and {error!r}; delete "
            f"{path.parent}, and the sweep begins anew"
        ) from error


def run(
    items: Sequence[Item],
    executor: Executor,
    answers: Answers | None = None,
    report: Log = lambda line: None,
) -> Generator[Answer, None, None]:
    """Yield the answer of every item once: stored ones first, others as they finish.

    Args:
        items: items to run, with unique names.
        executor: runs them; it is always closed at the end.
        answers: stores answers, and tells which items need not run again.
        report: receives a line for each item, and the progress from time to time.

    Raises:
        ItemError: two items have one name, or an argument is not a JSON value.
    """
    if twice := [name for name, n in Counter(item.name for item in items).items() if n > 1]:
        raise ItemError(f"expected every item's name once, received twice: {', '.join(twice)}.")
    known = {item.name: answers.read(item) for item in items} if answers else {}
    waiting = [item for item in items if known.get(item.name) is None]
    try:
        if answers and answers.damaged:
            report(f"  damaged, so measured again: {', '.join(answers.damaged)}")
        if len(waiting) < len(items):
            report(f"  {len(items) - len(waiting)} of {len(items)} items are there already")
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
    """Return the answers of all items, in their order; fail unless all are done.

    Args:
        items: items to run.
        executor: runs them; closed at the end.
        folder: stores answers, so that a killed driver can be started again.
        report: as in `run`.

    Raises:
        RuntimeError: some items have no answer; the message names them with their reasons.
    """
    with Answers.opened(folder) if folder else nullcontext() as answers:
        known = {answer.name: answer for answer in run(items, executor, answers, report)}
    if bad := [a for a in known.values() if a.state is not State.DONE]:
        reasons = "; ".join(f"{a.name}: {a.reason}" for a in bad[:5])
        raise RuntimeError(f"{len(bad)} of {len(items)} items have no answer: {reasons}")
    return [known[item.name] for item in items]
