"""State of one watch of a training: when to look, the single warning, and the stored run.

The training has priority: after an error the watch reports it once and switches itself off, and the
run stores the step after which nothing was measured.
"""

from __future__ import annotations

import atexit
import functools
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import ParamSpec, TypeAlias

from reports.page.watching import render
from reports.store.manifest import Device, Manifest
from reports.store.run import Run
from reports.store.schema import PAGE
from reports.store.shared import is_address, storage_of
from reports.store.writer import check_writable, rewrite_run, write_run
from reports.watching.document import Facts, new_watch_manifest, run_of, words
from stability.storage.watch_jax_loop import JaxLooks
from stability.storage.watch_looks import Seen, Watched
from stability.storage.watch_torch_loop import TorchLooks

WRITING = 0.005
"""Largest fraction of the training time spent on writing the run: half of the one percent that a
watch may cost. After the first look, the warning and the end the run is always written."""
P = ParamSpec("P")
Source: TypeAlias = TorchLooks | JaxLooks


def to_stderr(line: str) -> None:
    """Print a line to stderr, above the progress bars of tqdm if there are any."""
    bars = sys.modules.get("tqdm")
    if bars is not None and hasattr(bars, "tqdm"):
        # A line printed beside a bar would begin at its end.
        bars.tqdm.write(line, file=sys.stderr)
        sys.stderr.flush()
    else:
        print(line, file=sys.stderr, flush=True)


class Session:
    """State of one watch of a training: its measurements, its single warning and its run.

    Attributes:
        watched: the measurements.
        folder: folder of the run; None until the first look (measurement).
        warned: text of the warning; "" if none was given so far.
        stopped: why the watch switched itself off or could not store its run; "" if neither.
        on_close: called once when the watch ends, to remove its hook.
    """

    def __init__(
        self,
        out: str | Path,
        every: int,
        framework: str,
        report: Callable[[str], None],
    ) -> None:
        """Check the arguments; `begin` starts the watch.

        Args:
            out: folder of runs.
            every: optimiser steps from look (measurement) to look; the first is at step `every`.
            framework: a key of `reports.watching.document.PACKAGES`.
            report: receives the text of a warning about the training (parameters that no longer
                move) and of errors of the watch itself.

        Raises:
            ValueError: `every` is not a positive integer, or `out` is a URL such as `s3://...` or
                a folder prepared as shared storage.
            StoreError: `out` cannot be written.
        """
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every={every!r} must be a whole number of steps, 1 or more.")
        self._root = Path(out)
        if is_address(str(out)) or storage_of(self._root) is not None:
            raise ValueError(
                f"expected a folder of this machine, received {out}: a watch rewrites its run "
                "while the training goes on, and runs on shared storage never change. Give a "
                "local folder, such as 'runs'."
            )
        check_writable(self._root)
        self._every, self._framework, self._report = every, framework, report
        self._next, self._open = every, True
        self._begun = time.perf_counter()
        self._started = datetime.now(UTC)
        self._cost = self._written = self._writing = 0.0
        self.watched = Watched({}, every)
        self.folder: Path | None = None
        self.warned = self.stopped = ""
        self.on_close: Callable[[], None] = lambda: None
        self._source: Source | None = None
        self._manifest = Manifest("", "")

    def begin(self, source: Source, device: Device) -> None:
        """Start watching `source`, whose parameters are on `device`.

        The watch is closed at the latest when the process exits.
        """
        self._source = source
        self.watched.leaves = {leaf.name: leaf for leaf in source.leaves}
        self.watched.absent = dict(source.absent)
        self._manifest = new_watch_manifest(self._started, self._root, self._framework, device)
        self._begun = time.perf_counter()
        atexit.register(self.close)

    @property
    def page(self) -> Path | None:
        """Path of the run's page; None before the first look (measurement)."""
        return None if self.folder is None else self.folder / PAGE

    @property
    def on(self) -> bool:
        """Whether the watch still measures: neither closed nor switched off by an error."""
        return self._open and not self.stopped

    def due(self, step: int) -> bool:
        """Return whether a look (measurement) is due at the step with this number (from 1 on)."""
        return step >= self._next

    def guard(self, hook: Callable[P, None]) -> Callable[P, None]:
        """Wrap a training's hook: its time counts as cost, and an error switches the watch off.

        Once the watch is off or closed, the wrapped hook does nothing.
        """

        @functools.wraps(hook)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
            if not self.on:
                return
            start = time.perf_counter()
            try:
                hook(*args, **kwargs)
            except Exception as error:
                self.fail(error)
            self._cost += time.perf_counter() - start

        return guarded

    def take(self, step: int, seen: dict[str, Seen], absent: dict[str, str]) -> None:
        """Evaluate a look (measurement), and give the warning if it is the first that needs one.

        The run is stored at the first look and with the warning. At other looks it is stored only
        if storing it last took less than the fraction `WRITING` of the time since then.

        Args:
            step: number of the step.
            seen: sampled elements before and after the step, by name of the parameter.
            absent: reason by name of each parameter that could not be sampled.
        """
        self._next = step + self._every
        self.watched.look(step, seen, absent)
        news = self._warning()
        if news:
            self.warned = news
        if news or self.folder is None or self._may_write():
            self._write()
        if news:
            self._report(f"megalodon-numerics: {news} Page: {self.page}")

    def _warning(self) -> str:
        """Return the warning if this look (measurement) is the first that needs one, else ""."""
        if self.warned or (self._source is not None and self._source.remedied):
            return ""
        return self.watched.warning(words(self._framework))

    def fail(self, error: BaseException) -> None:
        """Switch the watch off because of an error: report it, and store the measurements so far.

        Does nothing if the watch is off already.
        """
        if self.stopped:
            return
        step = 0 if self._source is None else self._source.step
        why = f"{type(error).__name__}: {error}"
        self.stopped = f"after step {step} by {why}"
        self._report(
            f"megalodon-numerics: the watch switched itself off ({why}). The training goes on; "
            f"nothing is measured after step {step}."
        )
        self._finish()

    def close(self) -> None:
        """End the watch and store the run as finished; later steps are ignored."""
        if not self._open:
            return
        self._open = False
        if not self.stopped:
            self._finish()

    def _finish(self) -> None:
        atexit.unregister(self.close)
        try:
            self.on_close()
            if self._source is not None:
                self._write()
        except Exception as error:
            if not self.stopped:
                self.stopped = f"{type(error).__name__}: {error}"
                self._report(
                    f"megalodon-numerics: the watch ended, but its run was not stored "
                    f"({self.stopped})."
                )

    def _may_write(self) -> bool:
        return WRITING * (time.perf_counter() - self._written) > self._writing

    def _write(self) -> None:
        start = time.perf_counter()
        run = self._run()
        if self.folder is None:
            self.folder = write_run(self._root, run, render)
        else:
            rewrite_run(self.folder, run, render(run))
        self._written = time.perf_counter()
        self._writing = self._written - start

    def _run(self) -> Run:
        source = self._source
        assert source is not None
        facts = Facts(
            framework=self._framework,
            steps=source.step,
            skipped=source.skipped,
            seconds=time.perf_counter() - self._begun,
            cost=max(0.0, self._cost - source.waited),
            closed=not self._open,
            stopped=self.stopped,
            warned=self.warned,
            remedied=source.remedied,
        )
        run = run_of(self._manifest, self.watched, facts)
        if self.folder is not None:
            run = replace(run, manifest=replace(run.manifest, id=self.folder.name))
        return run
