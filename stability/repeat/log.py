"""Digests of the steps of a run in a file, and the first value in which two runs differ.

The file is text: a line of JSON for each step, after a line with the names of its values. A run
that is continued appends; a last line that a killed process left incomplete is not counted. Source:
docs/training.md "Where two runs part".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import jax
import numpy as np

from stability.repeat.digests import PARAMETER, Digests

SCHEMA = 1


class LogError(ValueError):
    """A file of digests cannot be read; the message says where and why."""


class DigestLog:
    """Writes digests, one line a step; a context manager."""

    def __init__(self, path: Path | str, about: Mapping[str, str] | None = None) -> None:
        """Open a file to append to.

        Args:
            path: The file; its folder must exist.
            about: Facts to tell runs apart, such as commit or number of devices.

        Raises:
            LogError: the file holds something else.
        """
        self.path, self.about = Path(path), dict(about or {})
        self._names: tuple[str, ...] | None = None
        if self.path.exists() and self.path.stat().st_size:
            read_log(self.path)
        self._file: IO[str] = self.path.open("a", encoding="utf-8")
        if self.path.stat().st_size and not self.path.read_bytes().endswith(b"\n"):
            # What a killed process left is ended, so that the next line is a line.
            self._file.write("\n")

    def write(self, step: int, digests: Digests) -> None:
        """Append the digests of a step, and wait for them to be computed."""
        if digests.names != self._names:
            self._names = digests.names
            head = {"schema": SCHEMA, "about": self.about, "names": [*digests.names]}
            self._file.write(json.dumps(head) + "\n")
        values = np.asarray(jax.device_get(digests.values)).astype(">u4")
        self._file.write(json.dumps({"step": int(step), "digests": values.tobytes().hex()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> DigestLog:
        """Return the log itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()


@dataclass(frozen=True)
class Log:
    """A file of digests: values by name, in order, for each step."""

    steps: Mapping[int, Mapping[str, str]]
    about: Mapping[str, str] = field(default_factory=dict)
    repeated: tuple[int, ...] = ()
    """Steps that the run computed again with other values, as after a restart."""


def read_log(path: Path | str) -> Log:
    """Read a file of digests.

    Raises:
        LogError: the file is none, or a line other than an unfinished one is damaged.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise LogError(f"expected a file of digests at {path}: {error}") from error
    steps: dict[int, dict[str, str]] = {}
    repeated: dict[int, None] = {}
    names: list[str] | None = None
    about: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            # A process that is killed leaves part of a line; what is appended later starts a new
            # one, whose first line has the names again.
            after = next((each for each in lines[number:] if each.strip()), "")
            if not after or after.startswith('{"schema"'):
                continue
            raise LogError(f"{path}, line {number} is not JSON: {error}") from error
        if isinstance(entry, dict) and "schema" in entry:
            names, about = _head(entry, path, number), dict(entry.get("about") or {})
            continue
        step, found = _step(entry, names, path, number)
        if step in steps and steps[step] != found:
            repeated[step] = None
        steps[step] = found
    if names is None:
        raise LogError(f"expected digests in {path}, which `DigestLog` writes, but there are none")
    return Log(steps, about, tuple(repeated))


def _head(entry: dict[str, Any], path: Path, number: int) -> list[str]:
    names = entry.get("names")
    if entry["schema"] != SCHEMA or not isinstance(names, list) or len({*names}) < len(names):
        raise LogError(
            f"{path}, line {number}: expected schema {SCHEMA} and a list of different names"
        )
    return names


def _step(
    entry: Any, names: list[str] | None, path: Path, number: int
) -> tuple[int, dict[str, str]]:
    try:
        step, text = entry["step"], entry["digests"]
        if names is None or not isinstance(step, int) or len(bytes.fromhex(text)) != 8 * len(names):
            raise ValueError("step and digests do not fit the names above")
    except (KeyError, TypeError, ValueError) as error:
        raise LogError(f"{path}, line {number} is no step: {error}") from error
    return step, {name: text[16 * i : 16 * i + 16] for i, name in enumerate(names)}


@dataclass(frozen=True)
class Answer:
    """Comparison of two runs: the first value that differs, and what could not be compared."""

    steps: int
    """Steps that both runs have."""
    values: int
    """Values by name that both have in every step compared; those of the first step."""
    step: int | None = None
    """The first step with a difference."""
    names: tuple[str, ...] = ()
    """Values that differ in that step, in order; the first is where the runs part."""
    before: str = ""
    """The last value in front of the first one, which is equal; "" if there is none."""
    after_equal: bool = False
    """Whether the step before it is in both runs, and equal."""
    alone: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Steps that only the first run or only the second has."""
    unnamed: tuple[str, ...] = ()
    """Names that only one run has in a common step."""
    repeated: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Steps that a run computed twice, with different values."""

    @property
    def compared(self) -> bool:
        """Whether the runs have a value of a step in common."""
        return bool(self.steps and self.values)

    @property
    def equal(self) -> bool:
        """Whether all that both runs have is equal."""
        return self.compared and self.step is None

    @property
    def whole(self) -> bool:
        """Whether each run has every step and name of the other, and one value for each."""
        return not (any(self.alone) or self.unnamed or any(self.repeated))

    def sentence(self) -> str:
        """Say where the runs part, and what was not compared."""
        if not self.compared:
            return "The two runs have no value in common: nothing was compared."
        if self.step is None:
            said = f"Equal: {self.values:,} values in each of {self.steps:,} steps."
        else:
            behind = f", right behind {self.before}, which is equal" if self.before else ""
            if self.names[0].startswith(PARAMETER) and self.after_equal:
                behind = ": by the update before it, since all values of the step before are equal"
            said = (
                f"They part at step {self.step}, at {self.names[0]}{behind}; "
                f"{len(self.names):,} of {self.values:,} values of that step differ."
            )
        for which, steps in zip(("first", "second"), self.alone, strict=True):
            if steps:
                said += f" Only the {which} run has steps {_some(steps)}."
        if self.unnamed:
            said += f" Only one run has {_some(self.unnamed)}."
        for which, steps in zip(("first", "second"), self.repeated, strict=True):
            if steps:
                said += f" The {which} run computed steps {_some(steps)} twice, with other values."
        return said


def _some(names: tuple[Any, ...], most: int = 5) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def compare_logs(first: Log, second: Log) -> Answer:
    """Return the first value in which two runs differ, by step and by order of computation."""
    common = sorted(first.steps.keys() & second.steps.keys())
    unnamed: dict[str, None] = {}
    found: dict[str, Any] = {}
    least: int | None = None
    for step in common:
        one, other = first.steps[step], second.steps[step]
        alone = one.keys() ^ other.keys()
        unnamed |= dict.fromkeys(name for name in (*one, *other) if name in alone)
        shared = [name for name in one if name in other]
        least = len(shared) if least is None else min(least, len(shared))
        if not found and (differ := [name for name in shared if one[name] != other[name]]):
            place = shared.index(differ[0])
            found = {
                "step": step,
                "names": tuple(differ),
                "before": shared[place - 1] if place else "",
                "after_equal": step - 1 in common,
            }
    return Answer(
        len(common),
        least or 0,
        **found,
        alone=(
            tuple(sorted(first.steps.keys() - second.steps.keys())),
            tuple(sorted(second.steps.keys() - first.steps.keys())),
        ),
        unnamed=tuple(unnamed),
        repeated=(first.repeated, second.repeated),
    )
