"""Interface of an executor, and of what receives lines of its progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from parity.executors.item import Answer, Item

Log = Callable[[str], None]
"""Receives one line of progress."""


@runtime_checkable
class Executor(Protocol):
    """Runs items: `start` returns one future per item; a failed item is an answer, no exception."""

    name: str

    @property
    def workers(self) -> int:
        """Largest number of items that run at a time."""
        ...

    def start(self, items: Sequence[Item]) -> list[Future[Answer]]:
        """Start items and return their futures, in the same order."""
        ...

    def running(self) -> Mapping[str, tuple[str, float]]:
        """Return by worker its current item and the start time."""
        ...

    def close(self) -> None:
        """End all running items."""
        ...
