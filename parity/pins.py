"""Pins: files that store which stages of a port and its original belong together.

A person can read and correct them. Each pair is one line of JSON; stages without a partner are
listed after the pairs. Source: docs/your-own-port.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalodon_jax.files import read_json_object, written_aside
from parity.engine.pairing.alignment import Alignment, AlignmentError, Pin
from parity.engine.pairing.layouts import Layout

SCHEMA = 1
_LISTS = ("pairs", "only_in_port", "only_in_original")


def write(alignment: Alignment, path: Path) -> Path:
    """Write an alignment of stages to a file of pins, atomically; return the path.

    Each pair also records how it was found (`by`) and how its elements are arranged (`layout`). A
    person who corrects a pair may omit both.
    """
    pairs = [
        {
            "port": pair.port,
            "original": pair.original,
            "by": str(pair.by),
            "layout": pair.layout.to_json(),
        }
        for pair in alignment.pairs
    ]
    lists = (pairs, list(alignment.unaligned_port), list(alignment.unaligned_original))
    fields = [f'"schema": {SCHEMA}']
    for name, entries in zip(_LISTS, lists, strict=True):
        # One line per entry, so that a diff shows which stage changed.
        lines = ",\n  ".join(json.dumps(entry) for entry in entries)
        fields.append(f'"{name}": [\n  {lines}\n]' if entries else f'"{name}": []')
    with written_aside(path) as aside:
        aside.write_text("{" + ",\n".join(fields) + "}\n", encoding="utf-8")
    return path


def read(path: Path) -> tuple[Pin, ...]:
    """Return the pins in a file: its stage pairs, and its stages without a partner.

    Raises:
        AlignmentError: the file is missing or invalid; the message names the invalid entry.
    """
    try:
        content = read_json_object(path)
    except (OSError, ValueError) as error:
        raise AlignmentError(
            f"expected pins in {path}: {error}. Write them with `megalodon-numerics port FILE "
            "--write-pins PATH`."
        ) from error
    if content.get("schema") != SCHEMA:
        raise AlignmentError(
            f"{path} has schema {content.get('schema')}, expected {SCHEMA}: write it again with "
            "`megalodon-numerics port FILE --write-pins PATH`."
        )
    for name in _LISTS:
        if not isinstance(content.get(name, []), list):
            raise AlignmentError(f"{path}: expected a list as {name!r}, got {content[name]!r}.")
    return (
        *(_pair(entry, path) for entry in content.get("pairs", [])),
        *(Pin(_name(name, path), None) for name in content.get("only_in_port", [])),
        *(Pin(None, _name(name, path)) for name in content.get("only_in_original", [])),
    )


def _pair(entry: Any, path: Path) -> Pin:
    if not isinstance(entry, Mapping) or not {"port", "original"} <= set(entry):
        raise AlignmentError(
            f"{path}: expected a pair with `port` and `original`, got {json.dumps(entry)}."
        )
    try:
        layout = Layout.from_json(entry["layout"]) if entry.get("layout") else None
    except (ValueError, TypeError, AttributeError) as error:
        raise AlignmentError(
            f"{path}: the layout of {entry['port']!r} is invalid ({error}); remove `layout` from "
            "this pair to have it found again."
        ) from error
    return Pin(_name(entry["port"], path), _name(entry["original"], path), layout)


def _name(name: Any, path: Path) -> str:
    if not isinstance(name, str):
        raise AlignmentError(f"{path}: expected the name of a stage, got {json.dumps(name)}.")
    return name
