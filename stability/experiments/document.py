"""Writes a command's table into a document between two markers, with charts beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megalodon_jax.files import written_aside


def renew(doc: Path, begin: str, end: str, table: str, charts: Mapping[str, str] = {}) -> None:
    """Write a table between the markers of a document, and charts as files beside it.

    Every file is written aside and then renamed, the document last.

    Raises:
        ValueError: the document lacks the markers; nothing is written.
    """
    text = doc.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{doc} needs the markers {begin} and {end}, once each.")
    head, rest = text.split(begin)
    files = {**charts, doc.name: f"{head}{begin}\n{table}\n{end}{rest.split(end)[1]}"}
    for name, content in files.items():
        with written_aside(doc.with_name(name)) as aside:
            aside.write_text(content, encoding="utf-8")


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
