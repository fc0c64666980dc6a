"""A sweep: items on an executor, with every answer stored as it comes, and none asked twice.

The driver alone writes: an answer becomes a folder of its own, written aside and renamed, and never
changed. So a driver that is killed at any moment leaves whole answers or none, and the next one
goes on from them. What failed or was not run is no answer, and is tried again.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, runtime_checkable

from parity.executors.item import Answer, Item, ItemError, State
from parity.executors.progress import Progress

ANSWER, FILES, LOCK = "answer.json", "files", ".lock"
Report = Callable[[str], None]


@runtime_checkable
class Executor(Protocol):
    """Runs items: `start` gives each a future of its answer, and raises for none of them."""

    name: str

    @property
    def workers(self) -> int:
        """How many items run at a time, at most."""
        ...

    def start(self, items: Sequence[Item]) -> list[Future[Answer]]:
        """Start items; the futures are theirs, in their order."""
        ...

    def running(self) -> Mapping[str, tuple[str, float]]:
        """Return by worker the item it is at and the time it began."""
        ...

    def close(self) -> None:
        """End what runs."""
        ...


def open_executor(text: str = "local", address: str | None = None) -> Executor:
    """Return the executor that `local`, `local:N` or `ray` names.

    Raises:
        ItemError: it is none of them, or cannot be had here.
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
    """The answers of a sweep in a folder, which one driver at a time may have."""

    def __init__(self, folder: Path) -> None:
        # Not above, for it brings JAX along; not when the first answer comes, which would wait.
        from megalodon_jax import files

        self.folder, self.disk = folder, files

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator[Answers]:
        """Context with the folder's answers, while no other driver can have it.

        The system's lock goes with its process, however that ends: nobody has to remove it.

        Raises:
            ItemError: another driver has it.
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
                # Of a driver that was killed while it wrote.
                shutil.rmtree(left, ignore_errors=True)
            yield cls(folder)

    def path(self, item: Item) -> Path:
        """Return where the answer of an item lies, whether it is there or not."""
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", item.name).lstrip(".")[:100]
        return self.folder / f"{name}-{item.digest()}"

    def read(self, item: Item) -> Answer | None:
        """Return the stored answer of an item, without its files; None where there is none."""
        path = self.path(item) / ANSWER
        return Answer.from_json(self.disk.read_json_object(path)) if path.is_file() else None

    def files(self, item: Item) -> Path:
        """Return the folder with what an item left."""
        return self.path(item) / FILES

    def write(self, item: Item, answer: Answer) -> None:
        """Store an answer; one that is there stays what it is."""
        path = self.path(item)
        if path.exists():
            return
        with self.disk.folder_written_aside(path) as aside:
            for name, content in answer.files.items():
                file = aside / FILES / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            text = json.dumps(answer.to_json(), indent=1)
            (aside / ANSWER).write_text(text, encoding="utf-8")

    def discard(self) -> None:
        """Delete every answer: they became a run, or are not wanted."""
        for path in self.folder.iterdir():
            if path.name != LOCK:
                shutil.rmtree(path, ignore_errors=True)


def run(
    items: Sequence[Item],
    executor: Executor,
    answers: Answers | None = None,
    report: Report = lambda line: None,
) -> Iterator[Answer]:
    """Yield the answer of every item once, those that are stored first, others as they come.

    Args:
        items: what to do; names are unique.
        executor: who does it. It is closed at the end, however that comes.
        answers: where answers are stored, and which items need not be run again.
        report: gets a line for each item, and how it goes now and then.

    Raises:
        ItemError: two items have one name, or an argument is no JSON value.
    """
    if twice := [name for name, n in Counter(item.name for item in items).items() if n > 1]:
        raise ItemError(f"expected every item's name once, received twice: {', '.join(twice)}.")
    known = {item.name: answers.read(item) for item in items} if answers else {}
    waiting = [item for item in items if known.get(item.name) is None]
    try:
        if len(waiting) < len(items):
            report(f"  {len(items) - len(waiting)} of {len(items)} items are there already")
        yield from (answer for answer in known.values() if answer is not None)
        with Progress(executor, len(waiting), report) as progress:
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
    report: Report = lambda line: None,
) -> list[Answer]:
    """Return the answers of items in their order, where all of them are needed.

    Args:
        items: what to do.
        executor: who does it; closed at the end.
        folder: where answers are stored, so that a driver that is killed can be started again.
        report: as `run`.

    Raises:
        RuntimeError: some items have no answer; the message names them with their reasons.
    """
    with Answers.opened(folder) if folder else nullcontext() as answers:
        known = {answer.name: answer for answer in run(items, executor, answers, report)}
    if bad := [a for a in known.values() if a.state is not State.DONE]:
        reasons = "; ".join(f"{a.name}: {a.reason}" for a in bad[:5])
        raise RuntimeError(f"{len(bad)} of {len(items)} items have no answer: {reasons}")
    return [known[item.name] for item in items]
