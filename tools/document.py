"""Renewal of the tables between two markers of a document, with chart files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megalodon_jax.files import written_aside


def renew(doc: Path, begin: str, end: str, table: str, charts: Mapping[str, str] = {}) -> None:
    """Replace the text between two markers of a document by a table, and write charts beside it.

    Each file is written under a temporary name and then renamed, the document last.

    Args:
        doc: the document.
        begin, end: the markers, which stay.
        table: the new text.
        charts: contents of further files in the document's folder, by file name.

    Raises:
        ValueError: a marker is missing or occurs more than once; nothing is written then.
    """
    text = doc.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{doc} needs the markers {begin} and {end}, once each.")
    head, rest = text.split(begin)
    files = {**charts, doc.name: f"{head}{begin}\n{table}\n{end}{rest.split(end)[1]}"}
    for name, content in files.items():
        with written_aside(doc.with_name(name)) as aside:
            aside.write_text(content, encoding="utf-8")
