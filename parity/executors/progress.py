"""How a sweep goes: who is at what since when, what was slowest, and when it may be over."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from parity.executors.item import Answer, State

if TYPE_CHECKING:
    from parity.executors.sweep import Executor

EVERY, REDRAWN = 30.0, 0.5
"""Seconds between two lines, and between two pictures on a terminal."""
LINES = 200
"""Items of a sweep that get a line each; of more, only those that did not go well."""


class Progress:
    """Says what becomes of items: a table on a terminal, and lines anywhere."""

    def __init__(self, executor: Executor, planned: int, report: Callable[[str], None]) -> None:
        self.executor, self.planned, self.report = executor, planned, report
        self.start = time.time()
        self.seconds: list[float] = []
        self.slowest: list[tuple[float, str]] = []
        self._over = threading.Event()
        self._live: Any = None

    def __enter__(self) -> Progress:
        """Begin to watch."""
        # Reports that go nowhere, or to a bar of their own, leave the terminal alone.
        if sys.stderr.isatty() and getattr(self.report, "quiet", None) is False:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                get_renderable=self.table,
                console=Console(stderr=True),
                refresh_per_second=1 / REDRAWN,
                transient=True,
            )
            self._live.start()
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Watch no more."""
        self._over.set()
        if self._live is not None:
            self._live.stop()

    def done(self, answer: Answer) -> None:
        """Count an answer, and say what is worth a line."""
        self.seconds.append(answer.seconds)
        self.slowest = sorted([*self.slowest, (answer.seconds, answer.name)], reverse=True)[:3]
        well = answer.state is State.DONE and answer.attempts == 1
        if well and self.planned > LINES:
            return
        text = answer.reason or f"{answer.seconds:.1f} s on {answer.place}"
        if answer.state is State.DONE and answer.attempts > 1:
            text += f", after {answer.attempts - 1} workers died"
        state = "" if answer.state is State.DONE else f"{answer.state}: "
        self._say(f"  {len(self.seconds)}/{self.planned} {answer.name}: {state}{text}")

    def estimate(self) -> float | None:
        """Return the seconds left, items like the median one; None before the first is done."""
        left = self.planned - len(self.seconds)
        if not self.seconds or not left:
            return None if left else 0.0
        typical, now = statistics.median(self.seconds), time.time()
        ages = [now - since for _, since in self.executor.running().values()][:left]
        # What took longer than most will take some longer still.
        rest = [max(typical - age, age / 4) for age in ages] + [typical] * (left - len(ages))
        return max(sum(rest) / max(min(self.executor.workers, left), 1), max(rest))

    def lines(self) -> list[str]:
        """Return how it goes: counts and estimate, each worker, and what took longest."""
        left = self.estimate()
        head = f"{len(self.seconds)} of {self.planned} in {time.time() - self.start:.0f} s"
        if left is not None:
            head += f", about {left:.0f} s left"
        now = time.time()
        rows = [
            f"{worker}: {name} for {now - since:.0f} s"
            for worker, (name, since) in sorted(self.executor.running().items())
        ]
        slow = ", ".join(f"{name} {seconds:.1f} s" for seconds, name in self.slowest)
        return [head, *rows, *([f"slowest: {slow}"] if slow else [])]

    def table(self) -> Any:
        """Return the same for a terminal."""
        from rich.table import Table
        from rich.text import Text

        head, *rows = self.lines()
        table = Table(head, box=None)
        for row in rows:
            # Names are data, and may look like markup.
            table.add_row(Text(row))
        return table

    def _say(self, line: str) -> None:
        if self._live is None:
            self.report(line)
        else:
            self._live.console.print(line, markup=False, highlight=False)

    def _watch(self) -> None:
        while not self._over.wait(EVERY):
            if self._live is None:
                self.report("; ".join(self.lines()))
