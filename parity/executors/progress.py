"""Progress of a sweep: the item each worker runs, the slowest items, and the time left."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from parity.executors.executor import Executor
from parity.executors.item import Answer, Item, State
from parity.executors.pace import Pace

EVERY, REDRAWN = 30.0, 0.5
"""Seconds between two lines of progress, and between two redraws of the table on a terminal."""
LINES = 200
"""Largest sweep, in items, in which every finished item gets a line; in a larger one, only items
that failed, were not run or were retried get a line."""


class Progress:
    """Context manager that reports progress while items run, as a table or as lines.

    The table is shown if stderr is a terminal and `report.quiet` is False.

    Args:
        executor: runs the items.
        items: the items that will run.
        report: receives lines of text, unless the table is shown.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        executor: Executor,
        items: Sequence[Item],
        report: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.executor, self.planned, self.report = executor, len(items), report
        self.clock, self.start = clock, clock()
        self.pace = Pace({item.name: item.expected for item in items})
        self.slowest: list[tuple[float, str]] = []
        self._over = threading.Event()
        self._live: Any = None

    def __enter__(self) -> Progress:
        """Start reporting."""
        # No table if `report` discards lines or draws a progress bar itself.
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
        """Stop reporting."""
        self._over.set()
        if self._live is not None:
            self._live.stop()

    def done(self, answer: Answer) -> None:
        """Record the answer of an item, and report it in a line.

        In a sweep of more than `LINES` items, items that succeed at the first attempt get no line.
        """
        self.pace.done(answer.name, answer.seconds)
        self.slowest = sorted([*self.slowest, (answer.seconds, answer.name)], reverse=True)[:3]
        well = answer.state is State.DONE and answer.attempts == 1
        if well and self.planned > LINES:
            return
        text = answer.reason or f"{answer.seconds:.1f} s on {answer.place}"
        if answer.state is State.DONE and answer.attempts > 1:
            text += f", after {answer.attempts - 1} workers died"
        state = "" if answer.state is State.DONE else f"{answer.state}: "
        self._say(f"  {len(self.pace.seconds)}/{self.planned} {answer.name}: {state}{text}")

    def estimate(self) -> float | None:
        """Return the estimated seconds left; None if too little is known (`Pace.estimate`)."""
        return self.pace.estimate(*self._running())

    def lines(self) -> list[str]:
        """Return the progress as lines: counts and time left, a line per worker, slowest items."""
        now = self.clock()
        head = f"{len(self.pace.seconds)} of {self.planned} in {now - self.start:.0f} s"
        if left := self.pace.words(*self._running()):
            head += f", {left}"
        rows = [
            f"{worker}: {name} for {now - since:.0f} s"
            for worker, (name, since) in sorted(self.executor.running().items())
        ]
        slow = ", ".join(f"{name} {seconds:.1f} s" for seconds, name in self.slowest)
        return [head, *rows, *([f"slowest: {slow}"] if slow else [])]

    def _running(self) -> tuple[dict[str, float], int]:
        """Return the seconds since the start of each running item, and the number of workers."""
        now = self.clock()
        ages = {name: now - since for name, since in self.executor.running().values()}
        return ages, self.executor.workers

    def table(self) -> Any:
        """Return `lines` as a `rich` table for a terminal."""
        from rich.table import Table
        from rich.text import Text

        head, *rows = self.lines()
        table = Table(head, box=None)
        for row in rows:
            # `Text`, because names of items may look like markup.
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
