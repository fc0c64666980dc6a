"""File with the digests of a run's steps, and the first value in which two such files differ.

The file is text. A line of JSON has the names of the values, and each step has a line after it. A
continued run appends to the file. A line that a killed process left incomplete is ignored. Source:
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

SCHEMA = 2
"""Version of the file and of the digests in it."""


class LogError(ValueError):
    """A file of digests cannot be read; the message names the file, the line and the reason."""


class DigestLog:
    """Writer of digests to a file, one line per step; a context manager that closes the file."""

    def __init__(self, path: Path | str, about: Mapping[str, str] | None = None) -> None:
        """Open a file to append digests to; a missing file is created.

        Args:
            path: the file; its folder must exist.
            about: facts that tell runs apart, such as commit or number of devices.

        Raises:
            LogError: the file exists and does not hold digests.
        """
        self.path, self.about = Path(path), dict(about or {})
        self._names: tuple[str, ...] | None = None
        if self.path.exists() and self.path.stat().st_size:
            read_log(self.path)
        self._file: IO[str] = self.path.open("a", encoding="utf-8")
        if self.path.stat().st_size and not self.path.read_bytes().endswith(b"\n"):
            # An incomplete line of a killed process is ended, so that the next one starts anew.
            self._file.write("\n")

    def write(self, step: int, digests: Digests) -> None:
        """Append the digests of a step to the file; waits until they are computed."""
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
        """Return this writer."""
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
    """Contents of a file of digests."""

    steps: Mapping[int, Mapping[str, str]]
    """Hexadecimal digests by step, then by name in order of computation."""
    about: Mapping[str, str] = field(default_factory=dict)
    """Facts about the run, as passed to `DigestLog`."""
    repeated: tuple[int, ...] = ()
    """Steps that the run computed more than once with different values, as after a restart; `steps`
    has the last values."""


def read_log(path: Path | str) -> Log:
    """Read a file of digests.

    Raises:
        LogError: the file cannot be read, holds no digests, or has a damaged line other than an
            incomplete one of a killed process.
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
            # A killed process leaves an incomplete line. If the run continued, the next line has
            # the names again; any other next line means that this line was damaged.
            after = next((each for each in lines[number:] if each.strip()), "")
            if not after or after.startswith('{"schema"'):
                continue
            raise LogError(
                f"{path}, line {number} is damaged, expected JSON: {error}; copy the file again, "
                "or repeat the run"
            ) from error
        if isinstance(entry, dict) and "schema" in entry:
            names, about = _head(entry, path, number), dict(entry.get("about") or {})
            continue
        step, found = _step(entry, names, path, number)
        if step in steps and steps[step] != found:
            repeated[step] = None
        steps[step] = found
    if names is None:
        raise LogError(f"{path} holds no digests: expected a file that `DigestLog` wrote")
    return Log(steps, about, tuple(repeated))


def _head(entry: dict[str, Any], path: Path, number: int) -> list[str]:
    names = entry.get("names")
    if entry["schema"] != SCHEMA or not isinstance(names, list) or len({*names}) < len(names):
        raise LogError(
            f"{path}, line {number}: expected schema {SCHEMA} and a list of distinct names; repeat "
            "the run with this version of `DigestLog`"
        )
    return names


def _step(
    entry: Any, names: list[str] | None, path: Path, number: int
) -> tuple[int, dict[str, str]]:
    try:
        step, text = entry["step"], entry["digests"]
        if names is None or not isinstance(step, int) or len(bytes.fromhex(text)) != 8 * len(names):
            raise ValueError(
                "expected an integer as step, and 16 hexadecimal digits for each of the names above"
            )
    except (KeyError, TypeError, ValueError) as error:
        raise LogError(f"{path}, line {number} holds no step's digests: {error}") from error
    return step, {name: text[16 * i : 16 * i + 16] for i, name in enumerate(names)}


@dataclass(frozen=True)
class Answer:
    """Result of comparing two runs: the first value that differs, and the values not compared."""

    steps: int
    """Number of steps that both runs have."""
    values: int
    """Smallest number of values that both runs have in a common step."""
    most: int
    """Largest number of values that both runs have in a common step."""
    step: int | None = None
    """First step with a difference; None if there is no difference."""
    names: tuple[str, ...] = ()
    """Names of the values that differ in `step`, in order of computation."""
    shared: int = 0
    """Number of values that both runs have in `step`."""
    before: str = ""
    """Name of the value computed just before the first of `names`; "" if there is none."""
    after_equal: bool = False
    """Whether both runs have step `step - 1`; its values are then equal."""
    alone: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Steps that only the first run has, and steps that only the second has."""
    unnamed: tuple[str, ...] = ()
    """Names that only one of the runs has, in a step that both have."""
    repeated: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Steps that the first run computed twice with different values, and those of the second."""

    @property
    def compared(self) -> bool:
        """Whether the runs have a step in common, and a value in common in every such step."""
        return bool(self.steps and self.values)

    @property
    def equal(self) -> bool:
        """Whether all compared values are equal; False if nothing was compared."""
        return self.compared and self.step is None

    @property
    def whole(self) -> bool:
        """Whether both runs have the same steps and names, and neither has two digests for a value.

        Two digests come from a step that was computed twice, with different values.
        """
        return not (any(self.alone) or self.unnamed or any(self.repeated))

    def sentence(self) -> str:
        """Return text on the first difference, and on steps and names that only one run has.

        The text also lists steps that a run computed twice with different values.
        """
        if not self.compared:
            return "The two runs have no value in common: nothing was compared."
        if self.step is None:
            values = f"{self.values:,}" + (f" to {self.most:,}" if self.most > self.values else "")
            said = f"Equal: {values} values in each of {self.steps:,} steps."
        else:
            behind = f", right behind {self.before}, which is equal" if self.before else ""
            if self.names[0].startswith(PARAMETER) and self.after_equal:
                behind = ": by the update before it, since all values of the step before are equal"
            said = (
                f"They part at step {self.step}, at {self.names[0]}{behind}; "
                f"{len(self.names):,} of {self.shared:,} values of that step differ."
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
    """Return an `Answer`: the earliest step in which two runs differ, and the values that differ.

    Only steps and names that both runs have are compared.
    """
    common = sorted(first.steps.keys() & second.steps.keys())
    unnamed: dict[str, None] = {}
    found: dict[str, Any] = {}
    counts = []
    for step in common:
        one, other = first.steps[step], second.steps[step]
        alone = one.keys() ^ other.keys()
        unnamed |= dict.fromkeys(name for name in (*one, *other) if name in alone)
        shared = [name for name in one if name in other]
        counts.append(len(shared))
        if not found and (differ := [name for name in shared if one[name] != other[name]]):
            place = shared.index(differ[0])
            found = {
                "step": step,
                "names": tuple(differ),
                "shared": len(shared),
                "before": shared[place - 1] if place else "",
                "after_equal": step - 1 in common,
            }
    return Answer(
        len(common),
        min(counts, default=0),
        max(counts, default=0),
        **found,
        alone=(
            tuple(sorted(first.steps.keys() - second.steps.keys())),
            tuple(sorted(second.steps.keys() - first.steps.keys())),
        ),
        unnamed=tuple(unnamed),
        repeated=(first.repeated, second.repeated),
    )
