"""Lines of source code as data: where an operation comes from, and the text around it.

Source: docs/parity.md "From a stage to a line".
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LINES = 4
"""Lines that are named of one stage at most."""
AROUND = 3
"""Lines of an excerpt before and behind the one that is meant."""
_PLACE = re.compile(r"(?P<file>.+):(?P<line>\d+) \(.*\)")


@dataclass(frozen=True, slots=True)
class Line:
    """A line to look at.

    Attributes:
        place: `file:line (function)`.
        why: what makes it suspicious.
        excerpt: the lines around it, numbered, with a mark at it; empty where the file is not here.
    """

    place: str
    why: str = ""
    excerpt: str = ""

    @classmethod
    def at(cls, place: str, why: str = "") -> Line:
        """Return a line with the text around it as it is now: sources change after a run."""
        return cls(place, why, excerpt(place))


def excerpt(place: str, around: int = AROUND) -> str:
    """Return the lines around `file:line (function)`, numbered; empty where there is no such file.

    A file is looked for below the current folder and where modules are.
    """
    found = _PLACE.fullmatch(place)
    if found is None:
        return ""
    line = int(found["line"])
    roots = (Path.cwd(), *map(Path, sys.path))
    path = next((p for p in (root / found["file"] for root in roots) if p.is_file()), None)
    try:
        lines = [] if path is None else path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    if not 0 < line <= len(lines):
        return ""
    first, last = max(1, line - around), min(len(lines), line + around)
    width = len(str(last))
    shown = _dedented(lines[first - 1 : last])
    return "\n".join(
        f"{'>' if n == line else ' '} {n:>{width}}  {text}".rstrip()
        for n, text in enumerate(shown, first)
    )


def _dedented(lines: Sequence[str]) -> list[str]:
    """Return lines without the indentation that all of them have."""
    depth = min((len(x) - len(x.lstrip()) for x in lines if x.strip()), default=0)
    return [x[depth:] for x in lines]
