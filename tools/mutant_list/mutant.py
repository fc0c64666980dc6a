"""The class `Mutant`: one small edit of one file, and the tests that should fail because of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A bug that a careful person could make, as an edit of the source."""

    name: str
    file: str
    """Path of the edited file, relative to the root of the repository."""
    fault: str
    """The bug in words, one line."""
    old: str
    """Text that occurs exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """Tests to run first: files or ids of tests as pytest names them, relative to the root."""
    night: tuple[str, ...] = ()
    """Cases of a night in which the bug could show; empty if no night can show it."""
    equivalent: str = ""
    """Why no test can distinguish the mutant from the original; such a mutant is a control."""

    @property
    def package(self) -> str:
        """Package of the edited file."""
        return PurePosixPath(self.file).parts[0]

    def source(self, root: Path = ROOT) -> str:
        """Return the text of the file with the bug in it.

        Raises:
            ValueError: the file does not contain the old text exactly once.
        """
        text = (root / self.file).read_text(encoding="utf-8")
        if (times := text.count(self.old)) != 1:
            raise ValueError(
                f"mutant {self.name}: expected its old text once in {self.file}, found it {times} "
                "times. The code moved on: mend the mutant, or remove it with a reason."
            )
        return text.replace(self.old, self.new)


Row = tuple[str, str, str, str, str] | tuple[str, str, str, str, str, str]
"""Name, fault, old text, new text, tests, and cases of a night if any. Several tests or cases are
separated by spaces.

A test is named by its file alone, wherever that lies under `tests/`: no two files there share a
name."""


@cache
def _test_files() -> dict[str, str]:
    return {p.name: p.relative_to(ROOT).as_posix() for p in (ROOT / "tests").rglob("test_*.py")}


def of(file: str, *rows: Row) -> tuple[Mutant, ...]:
    """Return the mutants of one file."""

    def place(test: str) -> str:
        name, separator, rest = test.partition("::")
        return f"{_test_files().get(name, name)}{separator}{rest}"

    return tuple(
        Mutant(name, file, fault, old, new, tuple(map(place, tests.split())), tuple(night.split()))
        for name, fault, old, new, tests, night in ((*row, "")[:6] for row in rows)
    )
