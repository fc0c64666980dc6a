"""Source lines named as the cause of a difference: file and line number, reason and an excerpt.

Pure functions to plain data. Source: docs/reports.md "What broke, and where".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from parity.engine.programs.source_lines import Line
from reports.text import label

FIRST = 1
"""Number of lines shown before and after the named line in an excerpt on the first screen."""


def lines(found: Iterable[Line]) -> list[dict[str, Any]]:
    """Return file, line number, reason and excerpt of each line named as the cause of a difference.

    A line that is already visible in an earlier excerpt gets no excerpt.
    """
    shown: set[tuple[str, str]] = set()
    rows = []
    for line in found:
        file = line.place.partition(":")[0]
        texts = line.excerpt.split("\n") if line.excerpt else []
        here = [(file, text.lstrip("> ")) for text in texts if text.startswith(">")]
        if here and here[0] in shown:
            texts = []
        shown.update((file, text.lstrip("> ")) for text in texts)
        rows.append(
            {
                "place": label(line.place, 160),
                "why": label(line.why, 500),
                "text": [
                    {"text": label(text, 160), "here": text.startswith(">")} for text in texts
                ],
            }
        )
    return rows


def shortened(line: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of `lines`' result (one source line) with a shorter excerpt.

    At most `FIRST` lines remain before the line itself, which the excerpt marks with ">", and at
    most `FIRST` after it. If the excerpt marks no line, its first `FIRST` + 1 lines remain.
    """
    at = next((i for i, row in enumerate(line["text"]) if row["here"]), 0)
    return {**line, "text": line["text"][max(0, at - FIRST) : at + FIRST + 1]}
