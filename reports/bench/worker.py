"""A worker: a process that does a bench's work on request, with its own memory and packages.

Parent and child exchange one JSON line per request and answer; other output of the child goes to
its stderr. This file imports only the standard library, so that a child with another package called
`megalodon_jax` can run it by its path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

Work = Callable[[int], None]
FILE = Path(__file__)


class WorkerError(RuntimeError):
    """A worker could not start or ended early; the message has the last line of its stderr."""


class Worker:
    """The parent's handle of a worker process; leaving its context ends the process.

    Args:
        arguments: Command line of the process after the interpreter.
        python: Interpreter that the process runs.
        environment: Environment variables of the process; None for those of this one.

    Raises:
        WorkerError: the process cannot start. Requests raise it too if the process has ended.
    """

    facts: dict[str, Any]
    """Facts that the process reported when it was ready, the argument `facts` of its `serve`."""

    def __init__(
        self,
        arguments: Sequence[str],
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        # A file, because a pipe that nobody reads would fill up and block the child.
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [python, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=environment,
            )
        except OSError as error:
            self._errors.close()
            raise WorkerError(f"{python} cannot be run: {error}") from error
        try:
            self.facts = self._answer()
        except BaseException:
            self.close()
            raise

    def work(self, name: str) -> Work:
        """Return a function of `count`: the process does the named work `count` times, and the
        function waits for it."""

        def work(count: int) -> None:
            self._ask({"work": name, "count": count})

        return work

    def number(self, name: str) -> float:
        """Return a number that the process measures, by its name in the `numbers` of `serve`."""
        return float(self._ask({"number": name})["value"])

    def close(self) -> None:
        """Kill the worker process and wait until it has ended."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # It has ended; `_answer` reports its last line.
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        self._errors.seek(0)
        last = (self._errors.read().strip().splitlines() or ["without a message"])[-1]
        raise WorkerError(f"the worker process ended with exit code {code}: {last}")


def serve(
    facts: Mapping[str, Any],
    works: Mapping[str, Work],
    numbers: Mapping[str, Callable[[], float]] | None = None,
) -> None:
    """Answer requests on the standard input until it ends; runs in the child.

    Args:
        facts: Facts to report first, as JSON values.
        works: Work that can be requested, by name.
        numbers: Functions that measure the numbers that can be requested, by name; None for none.
    """
    sys.stdout.flush()
    # Redirect stdout to stderr, so that output of libraries is not taken for an answer.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)

        def answer(content: Mapping[str, Any]) -> None:
            answers.write(json.dumps(content) + "\n")
            answers.flush()

        answer(facts)
        for line in sys.stdin:
            request = json.loads(line)
            if "work" in request:
                works[request["work"]](request["count"])
                answer({"done": request["work"]})
            else:
                answer({"value": (numbers or {})[request["number"]]()})


def resident_peak() -> int:
    """Return the peak resident memory of this process in bytes; Linux only."""
    # Not getrusage: its maximum starts at that of the parent process.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024
