"""The page of a night that is still running: `tonight.html` beside the runs, redrawn meanwhile.

It shows how many parts are measured and whether all gates so far hold. It shows no verdict, which
exists once everything is measured. Source: docs/reports.md "While a night runs".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType

from megalodon_jax.files import written_aside
from parity.engine.measure.measurement import Verdict
from parity.executors.executor import Log
from reports.nightly.shards import merge_shards
from reports.page.render import SoFar, notice, render, stopped
from reports.registry.lookup import judge
from reports.store.runs import read_run
from reports.store.schema import TONIGHT, StoreError

EVERY = 15.0
"""Smallest number of seconds between two drawings of the page."""
SHARE = 0.03
"""Largest share of one processor's time that drawing the page takes: the night needs the rest."""
LATEST = 90.0
"""Largest number of seconds after one drawing of the page until the next one is due."""
WAITING = "not measured yet"


class Tonight:
    """Draws the page of a running night. As a context, it writes to the page how the night ended.

    An error while drawing is reported once and stops the drawing, not the night; the page says so.
    """

    def __init__(
        self,
        out: Path,
        parts: int,
        report: Log,
        clock: Callable[[], float] = time.monotonic,
        # Processor time: on a busy machine a drawing takes several times as long in wall time.
        cost: Callable[[], float] = time.thread_time,
    ):
        """Prepare the page; entering the context writes it.

        Args:
            out: folder of the runs.
            parts: number of parts of the night.
            report: receives the path of the page once it shows results, and an error of drawing.
            clock: returns the current time in seconds.
            cost: returns the processor seconds that this thread has used so far.
        """
        self.page = out / TONIGHT
        self.parts = parts
        self._report, self._clock, self._cost = report, clock, cost
        self._folders: list[Path] = []
        self._next = -float("inf")
        self._red = False
        self._told = self._broken = False
        self._finished: Path | None = None

    def __enter__(self) -> Tonight:
        # A page of the night before would be taken for this one's.
        self._write(lambda: notice("The night has begun, and no part is measured yet", seconds=5))
        return self

    def add(self, folder: Path) -> None:
        """Add the run folder of a measured part, and draw the page if it is due.

        It is due `EVERY` to `LATEST` seconds after the last drawing, later if that one took long,
        and at once when the first gate fails.
        """
        self._folders.append(folder)
        # The page says whether all gates hold, so the first failing gate is drawn at once.
        turned = not self._red and not _holds(folder)
        self._red |= turned
        if (self._clock() < self._next and not turned) or self._broken:
            return
        start = self._cost()
        self._draw("running")
        self._next = self._clock() + min(max(EVERY, (self._cost() - start) / SHARE), LATEST)

    def done(self, page: Path) -> None:
        """When the context ends, redirect to `page`, the page of the finished night."""
        self._finished = page

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if (page := self._finished) is not None:
                href = page.relative_to(self.page.parent).as_posix()
                self._write(lambda: notice("The night is done", 0, href))
            elif self._folders and not self._broken:
                state = "interrupted" if kind is KeyboardInterrupt else "ended by an error"
                # An interrupted night is killed after some seconds, and drawing may take longer.
                self._write(lambda: stopped(self.page.read_text(encoding="utf-8"), state))
                self._draw(state)
            else:
                self._write(lambda: notice("The night ended before this page had anything to show"))
        except OSError as failure:
            # The run is stored and judged, or another error is on its way.
            self._report(f"{self.page} is not renewed: {failure}")

    def _draw(self, state: str) -> None:
        try:
            self._write(partial(self._text, state))
        except Exception as error:
            self._broken = True
            self._report(f"{self.page} is not renewed: {type(error).__name__}: {error}")
            if state == "running":
                text = "The page of this night cannot be drawn before its end"
                self._write(lambda: notice(text, 60))
        if not self._told and not self._broken:
            self._told = True
            self._report(f"first page: {self.page.resolve()}; it is updated until the night ends")

    def _text(self, state: str) -> str:
        # `merge_shards` accepts missing shards only with a reason, the same one for all of them.
        reasons = dict.fromkeys(range(1, self.parts + 1), WAITING)
        run = merge_shards(self._folders, mixed=True, reasons=reasons)
        judged = judge(self.page.parent, run)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        progress = SoFar(len(self._folders), self.parts, state, now)
        return render(run, judged.decision, judged.history, ".", progress)

    def _write(self, text: Callable[[], str]) -> None:
        self.page.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(self.page) as aside:
            aside.write_text(text(), encoding="utf-8")


def _holds(folder: Path) -> bool:
    """Return whether every gate of a part holds; True if the run cannot be read."""
    try:
        return all(m.verdict in (Verdict.PASS, Verdict.INFO) for m in read_run(folder).measurements)
    except StoreError:
        # Merging the parts at the end reports the unreadable run.
        return True
