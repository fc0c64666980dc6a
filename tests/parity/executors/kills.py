"""Sweeps whose drivers are killed at random: run as a program, it prints what became of them.

    python -m tests.parity.executors.kills FOLDER KILLS SEED [path]

With "path" items know their input by its path alone, as before issue 35.

Drivers are forked from this process, so that each begins within milliseconds.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from parity.executors.identity import Identity
from parity.executors.inputs import contents
from parity.executors.item import Answer, Item, perform
from parity.executors.sweep import Answers, run

MODULE = "tests.parity.executors.kills"
ITEMS = 10
"""Items of a sweep."""
LINES, LATER = 2 * ITEMS + 3, 0.004
"""Most lines of the log, and most seconds after the last of them, after which a driver is killed.

Lines, not seconds from the start: on a busy machine no sweep would come to its end."""
CHANGED = 0.3
"""Share of kills after which the input has another content."""


class InProcess:
    """An executor of one thread: what it runs ends with the driver."""

    name, workers = "thread", 1

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)

    def start(self, items: Sequence[Item]) -> list[Future[Answer]]:
        """Start items."""
        here = Identity.here()
        return [self.pool.submit(perform, item, here) for item in items]

    def running(self) -> Mapping[str, tuple[str, float]]:
        """Return nothing: nobody asks."""
        return {}

    def close(self) -> None:
        """Wait for what runs."""
        self.pool.shutdown(cancel_futures=True)


def measure(folder: Path, source: str, log: str, name: str) -> str:
    """Return what the input holds, leave it in a file, and note that this was done."""
    note(log, "ran", name)
    text = Path(source).read_text(encoding="utf-8")
    time.sleep(0.002)
    (folder / "content").write_text(text, encoding="utf-8")
    return text


def note(log: str, what: str, value: object) -> None:
    """Add a line to a log, whole or not at all."""
    line = json.dumps([os.getpid(), what, value]) + "\n"
    with open(log, "ab", buffering=0) as file:
        file.write(line.encode())


def drive(folder: Path, source: str, log: str, by_path: bool) -> None:
    """Run a sweep; note what was stored at the start, each answer, and the whole at the end."""
    words = {"source": source, "log": log}
    inputs = {} if by_path else contents([source])
    items = [
        Item(f"part {i}", f"{MODULE}:measure", {**words, "name": f"part {i}"}, folder=True,
             inputs=inputs)
        for i in range(ITEMS)
    ]  # fmt: skip
    with Answers.opened(folder) as answers:
        note(log, "known", [item.name for item in items if answers.read(item) is not None])
        found: list[Any] = []
        for answer in run(items, InProcess(), answers):
            note(log, "answer", answer.name)
            found.append([answer.name, answer.value])
        left = [(answers.files(item) / "content").read_text("utf-8") for item in items]
        note(log, "whole", [found, left])
        answers.discard()
        note(log, "end", "")


def sweeps(folder: Path, kills: int, seed: int, by_path: bool = False) -> dict[str, Any]:
    """Kill so many drivers at random moments; return counts, and every broken promise in words."""
    generator, counts, wrong = random.Random(seed), Counter[str](), []
    source, log = folder / "input", folder / "log"
    version, kept = 0, set[str]()
    source.write_text(f"{version:06d}", encoding="utf-8")
    # What a driver would import, JAX among it, is there before it is forked.
    Identity.here()
    importlib.import_module("megalodon_jax.files")
    importlib.import_module(MODULE)
    while counts["kills"] < kills or kept:
        log.write_bytes(b"")
        pid = os.fork()
        if pid == 0:
            drive(folder / "answers", str(source), str(log), by_path)
            os._exit(0)
        lines, later = generator.randint(0, LINES), generator.uniform(0, LATER)
        done = 0
        while counts["kills"] < kills and log.read_bytes().count(b"\n") < lines and not done:
            time.sleep(0.0005)
            done = os.waitpid(pid, os.WNOHANG)[0]
        if not done:
            time.sleep(later)
            if counts["kills"] < kills:
                os.kill(pid, signal.SIGKILL)
                counts["kills"] += 1
            os.waitpid(pid, 0)
        kept = judged(log, f"{version:06d}", kept, counts, wrong)
        if generator.random() < CHANGED:
            # In place and of the same size, as somebody copies over a checkpoint.
            version += 1
            counts["changed with parts kept"] += bool(kept)
            source.write_text(f"{version:06d}", encoding="utf-8")
            kept = set()
    return {"counts": counts, "wrong": wrong}


def judged(
    log: Path, version: str, kept: set[str], counts: Counter[str], wrong: list[str]
) -> set[str]:
    """Hold what a driver did to the promises; return the parts that must be there afterwards."""
    seen: dict[str, list[Any]] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        _, what, value = json.loads(line)
        seen.setdefault(what, []).append(value)
    if "known" not in seen:
        return kept
    [known], answered = map(set, seen["known"]), seen.get("answer", [])
    counts["parts taken"] += len(known)
    if lost := kept - known:
        wrong.append(f"lost {sorted(lost)}")
    if twice := [name for name, n in Counter(answered).items() if n > 1]:
        wrong.append(f"answered twice {twice}")
    if again := known & set(seen.get("ran", [])):
        wrong.append(f"measured again {sorted(again)}")
    for found, left in seen.get("whole", []):
        counts["whole"] += 1
        names = [name for name, _ in found]
        if sorted(names) != sorted(f"part {i}" for i in range(ITEMS)):
            wrong.append(f"a whole sweep of {names}")
        if {text for _, text in found} | set(left) != {version}:
            wrong.append(f"content {found} {left} in place of {version}")
    # While it deletes them, a killed driver may leave any of them: they have become a run.
    return set() if "whole" in seen else known | set(answered)


if __name__ == "__main__":
    where, number, first, *more = sys.argv[1:]
    print(json.dumps(sweeps(Path(where), int(number), int(first), more == ["path"])))
