"""Source lines of operations, and excerpts of the text around them.

Source: docs/parity.md "From a stage to a line".
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LINES = 4
"""Largest number of source lines listed for one stage."""
AROUND = 3
"""Number of lines that an excerpt shows before and after the marked line."""
_PLACE = re.compile(r"(?P<file>.+):(?P<line>\d+) \(.*\)")


@dataclass(frozen=True, slots=True)
class Line:
    """A suspicious source line.

    Attributes:
        place: `file:line (function)`.
        why: the reason for suspicion.
        excerpt: numbered source lines around the place, the line itself marked with ">"; empty if
            the file is not found.
    """

    place: str
    why: str = ""
    excerpt: str = ""

    @classmethod
    def at(cls, place: str, why: str = "") -> Line:
        """Return a line with its excerpt, to be stored: sources may change after a run."""
        return cls(place, why, excerpt(place))


def excerpt(place: str, around: int = AROUND) -> str:
    """Return the numbered source lines around a place; empty if the file or line is not found.

    Args:
        place: `file:line (function)`; a relative file is searched for in the current folder and
            then on the module search path.
        around: number of lines before and after.
    """
    found = _PLACE.fullmatch(place)
    if found is None:
        return ""
    line = int(found["line"])
    roots = (Path.cwd(), *map(Path, sys.path))
    path = next((p for p in (root / found["file"] for root in roots) if p.is_file()), None)
    if path is None:
        return ""
    try:
        # Not `splitlines`, which ends lines at form feeds too, as Python does not.
        with path.open(encoding="utf-8") as file:
            lines = [text.removesuffix("\n") for text in file]
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
    """Return lines without their common indentation."""
    depth = min((len(x) - len(x.lstrip()) for x in lines if x.strip()), default=0)
    return [x[depth:] for x in lines]
