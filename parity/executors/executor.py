"""Interfaces of executors and of progress callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from parity.executors.item import Answer, Item

Log = Callable[[str], None]
"""Callback that receives one line of progress, as text."""


@runtime_checkable
class Executor(Protocol):
    """Runs work items (`Item`) in parallel.

    An item that fails, or cannot run, is reported by its `Answer`; its future raises no exception.
    """

    name: str
    """Kind of executor: "local" or "ray"."""

    @property
    def workers(self) -> int:
        """Largest number of work items that run at a time."""
        ...

    def start(self, items: Sequence[Item]) -> list[Future[Answer]]:
        """Start work items and return the futures of their answers, in the same order."""
        ...

    def running(self) -> Mapping[str, tuple[str, float]]:
        """Return the work item that each busy worker runs, by name of the worker, as (name of the
        item, start time); times as of `time.time`."""
        ...

    def close(self) -> None:
        """Kill all running work items and start no further ones; their futures get no answer."""
        ...
