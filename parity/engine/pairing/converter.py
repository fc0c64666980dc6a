"""Writes a matching of parameters as Python source: a converter from the original to the port.

Assignments that differ only in numbers become loops. The source needs only NumPy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parity.engine.pairing import naming
from parity.engine.pairing.constructions import Construction, Part, Piece
from parity.engine.pairing.layouts import Layout
from parity.engine.pairing.parameter_pairs import Matching, Pair

HEAD = '''\
"""Convert the parameters of the original to those of the port."""

import numpy as np


def convert(original: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the port's parameters by path, made of the original's."""
    port = {}
'''
INDICES = "ijklm"
INSIDE = "n"
"""Variable of a comprehension in the generated source; loops around it use `INDICES`."""
SLOT = "\0"
"""Placeholder for a parameter name, which is filled in once it is known which numbers of the name a
loop varies."""
# An f-string would change other names: those with braces, quotes, numbers such as `00` or digits
# of another script.
_PLAIN = re.compile(r"(?:[A-Za-z_.:/\- \[\]]|(?<!\d)(?:0|[1-9]\d*)(?!\d))*", re.ASCII)
"""Names that may be written as an f-string with loop indices in place of numbers."""
_INDEXED = "\1"
"""Placeholder in a name for the index of a comprehension."""
WIDTH = 100


@dataclass(frozen=True)
class _Entry:
    """One assignment of the generated source: its parameter names in order, and its text with a
    `SLOT` for each name."""

    names: tuple[str, ...]
    text: str

    @property
    def kind(self) -> tuple[str, ...]:
        """Key shared by assignments whose parameter names differ in numbers only, such as those of
        all layers.

        Such assignments may be written as one loop.
        """
        return (self.text, *map(naming.pattern, self.names))

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers in all names, in order."""
        return tuple(n for name in self.names for n in naming.numbers(name))


def converter_source(matching: Matching) -> str:
    """Return the source of a Python module with the function `convert(original) -> port`.

    The function builds every paired parameter of the port, even if its values differ from the
    original's. The port's parameters without a counterpart are listed in comments.
    """
    groups: dict[tuple[str, ...], list[_Entry]] = {}
    for pair in matching.pairs:
        entry = _entry(pair)
        groups.setdefault(entry.kind, []).append(entry)
    blocks: dict[tuple[str, ...], list[str]] = {}
    for entries in groups.values():
        for header, lines in _loops(entries):
            blocks.setdefault(header, []).extend(lines)
    result = [HEAD.rstrip("\n")]
    for header, lines in blocks.items():
        for depth, line in enumerate(header):
            result.append("    " * (depth + 1) + line)
        result += ["    " * (len(header) + 1) + line for line in lines]
    for entry in matching.unmatched_port:
        name = entry.name if entry.name.isprintable() else repr(entry.name)
        result.append(
            f"    # {name} {entry.shape}: no parameter of the original is proposed for it"
        )
    return "\n".join([*result, "    return port", ""])


def _entry(pair: Pair) -> _Entry:
    construction = pair.construction
    names = (pair.port, *(piece.parameter for piece in construction.pieces))
    target = f"port[{SLOT}]"
    first = construction.pieces[0]
    if len(construction.pieces) == 1 and first.place.is_whole:
        return _Entry(names, f"{target} = {_expression(first, construction.shape)}")
    axis = _joint(construction)
    if axis is not None:
        text, originals = _joined(construction, axis)
        return _Entry((pair.port, *originals), f"{target} = {text}")
    lines = [f"{target} = np.zeros({construction.shape}, original[{SLOT}].dtype)"]
    sign = "+=" if construction.adds else "="
    for piece in construction.pieces:
        view = piece.place.view
        place = "" if view == construction.shape else f".reshape({view})"
        value = _expression(piece, piece.place.shape)
        lines.append(f"port[{SLOT}]{place}[{_index(piece.place)}] {sign} {value}")
    order = [names[0], names[1]]
    for name in names[1:]:
        order += [names[0], name]
    return _Entry(tuple(order), "\n".join(lines))


def _joint(construction: Construction) -> int | None:
    """Return the axis along which the pieces are concatenated; None if they are not
    concatenated."""
    pieces = construction.pieces
    views = {piece.place.view for piece in pieces}
    if len(views) != 1 or construction.adds or not construction.is_complete:
        return None
    axes = {
        axis
        for piece in pieces
        for axis, n in enumerate(piece.place.view)
        if (piece.place.starts[axis], piece.place.stops[axis]) != (0, n)
    }
    if len(axes) != 1:
        return None
    (axis,) = axes
    starts = [piece.place.starts[axis] for piece in pieces]
    return axis if starts == sorted(starts) else None


def _joined(construction: Construction, axis: int) -> tuple[str, tuple[str, ...]]:
    """Return the source of a `np.stack` or `np.concatenate` of the pieces, and the parameter names
    that replace the placeholders (`SLOT`) in it."""
    pieces, shape = construction.pieces, construction.shape
    view = pieces[0].place.view
    stack = axis == 0 and view == shape and len(pieces) == shape[0]
    names = tuple(piece.parameter for piece in pieces)
    texts = [_expression(p, shape[1:] if stack else p.place.shape) for p in pieces]
    inside = ", ".join(texts)
    if len(set(texts)) == 1 and (family := _family(names)):
        inside, names = f"{texts[0]} for {INSIDE} in {family[1]}", (family[0],)
    if stack:
        return f"np.stack([{inside}])", names
    reshape = "" if view == shape else f".reshape({shape})"
    return f"np.concatenate([{inside}], axis={axis}){reshape}", names


def _family(names: Sequence[str]) -> tuple[str, str] | None:
    """Return names that differ in one number as one name with a placeholder (`_INDEXED`) for that
    number, and the source of the numbers, such as `range(4)`.

    None unless exactly one number differs and it increases.
    """
    if not all(map(_PLAIN.fullmatch, names)):
        return None
    columns = list(zip(*map(naming.numbers, names), strict=False))
    varying = [k for k, column in enumerate(columns) if len(set(column)) > 1]
    if len({naming.pattern(name) for name in names}) != 1 or len(varying) != 1:
        return None
    (k,) = varying
    if len(names) < 2 or list(columns[k]) != sorted(set(columns[k])):
        return None
    texts = [_INDEXED if i == k else str(column[0]) for i, column in enumerate(columns)]
    return naming.pattern(names[0]).format(*texts), _range(columns[k])


def _expression(piece: Piece, target: tuple[int, ...]) -> str:
    text = f"original[{SLOT}]"
    if not piece.part.is_whole:
        if piece.part.view != piece.part.whole:
            text += f".reshape({piece.part.view})"
        text += f"[{_index(piece.part)}]"
    return text + _moves(piece.layout, target)


def _moves(layout: Layout, target: tuple[int, ...]) -> str:
    if layout.axes == tuple(range(len(layout.axes))):
        return "" if layout.source == target else f".reshape({target})"
    text = "" if layout.before == layout.source else f".reshape({layout.before})"
    text += ".T" if layout.axes == (1, 0) else f".transpose({layout.axes})"
    moved = tuple(layout.before[axis] for axis in layout.axes)
    return text if moved == target else f"{text}.reshape({target})"


def _index(part: Part) -> str:
    return ", ".join(
        ":" if (start, stop) == (0, n) else f"{start}:{stop}"
        for n, start, stop in zip(part.view, part.starts, part.stops, strict=True)
    )


def _loops(entries: Sequence[_Entry]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield assignments that differ in numbers only as source: the headers of nested loops,
    outermost first, and the lines of the loop body.

    If the assignments do not form a loop, yield each of them with () as headers.
    """
    port = [naming.numbers(entry.names[0]) for entry in entries]
    free = [k for k in range(len(port[0])) if len({numbers[k] for numbers in port}) > 1]
    values = [tuple(sorted({numbers[k] for numbers in port})) for k in free]
    whole = math.prod(map(len, values)) == len(entries) and len(free) <= len(INDICES)
    plain = all(_PLAIN.fullmatch(n.replace(_INDEXED, "")) for e in entries for n in e.names)
    names = _names(entries, port, free) if plain and whole else None
    if names is None:
        for entry in entries:
            yield (), _filled(entry.text, list(map(_literal, entry.names)))
        return
    header = tuple(
        f"for {INDICES[depth]} in {_range(numbers)}:" for depth, numbers in enumerate(values)
    )
    yield header, _filled(entries[0].text, names)


def _names(
    entries: Sequence[_Entry], port: Sequence[tuple[int, ...]], free: Sequence[int]
) -> list[str] | None:
    """Return the parameter names of assignments that form a loop, as source: one entry's names in
    order, with loop indices for the numbers that differ.

    None if a number is neither constant nor a loop index plus a constant.

    Args:
        entries: assignments that differ in numbers only.
        port: for each entry, the numbers in the name of the port's parameter.
        free: positions of the numbers in `port` that the loops vary, outermost loop first.
    """
    tables = list(zip(*(entry.numbers for entry in entries), strict=True))
    columns = list(zip(*port, strict=True))
    texts = []
    for column in tables:
        if len(set(column)) == 1:
            texts.append(str(column[0]))
            continue
        for depth, k in enumerate(free):
            apart = {a - b for a, b in zip(column, columns[k], strict=True)}
            if len(apart) == 1:
                (offset,) = apart
                texts.append(f"{{{INDICES[depth]}{_offset(offset)}}}")
                break
        else:
            return None
    names, at = [], 0
    for name in entries[0].names:
        pieces = naming.pattern(name).split("{}")
        own = texts[at : at + len(pieces) - 1]
        at += len(own)
        text = pieces[0] + "".join(a + b for a, b in zip(own, pieces[1:], strict=True))
        names.append(_quoted(text))
    return names


def _offset(offset: int) -> str:
    return f" {'-' if offset < 0 else '+'} {abs(offset)}" if offset else ""


def _quoted(text: str) -> str:
    """Return a name as source: an f-string if it has loop indices in braces, else a string."""
    text = text.replace(_INDEXED, f"{{{INSIDE}}}")
    return f'f"{text}"' if "{" in text else f'"{text}"'


def _literal(name: str) -> str:
    """Return a name as source: an f-string if it holds the index of a comprehension, else a
    string."""
    if _PLAIN.fullmatch(name.replace(_INDEXED, "")):
        return _quoted(name)
    return repr(name)


def _filled(text: str, names: Sequence[str]) -> list[str]:
    rest = iter(names)
    filled = "".join(next(rest) if char == SLOT else char for char in text)
    lines = []
    for line in filled.split("\n"):
        head, concatenated, parts = line.partition("np.concatenate([")
        if len(line) > WIDTH - 8 and concatenated:
            inside, _, tail = parts.rpartition("], ")
            entries = inside.replace(", original[", ",\0original[").split("\0")
            # After a comprehension, which is alone, no comma may follow.
            end = "," if len(entries) > 1 else ""
            lines += [head + concatenated, *(f"    {entry.rstrip(',')}{end}" for entry in entries)]
            lines.append(f"], {tail}")
        else:
            lines.append(line)
    return lines


def _range(numbers: Sequence[int]) -> str:
    if tuple(numbers) == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"range({numbers[-1] + 1})" if numbers[0] == 0 else (
            f"range({numbers[0]}, {numbers[-1] + 1})"
        )  # fmt: skip
    return str(tuple(numbers))
