"""Result of matching parameters: the originals that each parameter of the port consists of.

Parameters are matched by value: whole, transposed, fused, split, stacked, rounded or tied.
Constants and very small arrays can be equal by accident, so they are matched by name, and their
pairs are marked so (`Means`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from parity.engine.measure.arrays import Arrays
from parity.engine.pairing.constructions import Construction, Part


class Means(StrEnum):
    """Evidence for a pair: how a parameter of the port was matched with the original's."""

    VALUE = "by value"
    """The values are equal."""
    ROUNDED = "by value after rounding"
    """The values are equal after rounding one side, or a sum of originals, to a dtype."""
    NAME = "by name, equal in value"
    """The values are equal, but other parameters have the same values: constants, small arrays, or
    several equal arrays. Names decided."""
    REORDERED = "in another order"
    """The values are the rows or columns of one of the original's parameters, in another order. The
    values do not show whether the port expects that order."""
    SLICE = "but for a slice"
    """The values are equal except in some rows, columns or one element, or only a part of the
    port's array comes from the original."""
    NEAR = "by name, differs in value"
    """The port's values are nearly those of the original, or a constant times them plus a constant
    (`resemblance.straight_line`)."""
    PROPOSAL = "proposed by name and shape"
    """Names and shapes only: the port need not hold the original's values yet."""


EQUAL = (Means.VALUE, Means.ROUNDED, Means.NAME)
"""Evidence that implies equal values, up to rounding."""


@dataclass(frozen=True)
class Pair:
    """A parameter of the port, and `construction`, the recipe that makes it from parameters of the
    original."""

    port: str
    construction: Construction
    means: Means
    note: str = ""
    """Remark for the reader, such as the rows that differ."""
    also: tuple[str, ...] = ()
    """Other parameters of the original with the same values (tied), which no other pair uses."""

    @property
    def originals(self) -> tuple[str, ...]:
        """Names of the original's parameters that the construction (recipe) uses."""
        return self.construction.parameters

    @property
    def is_equal(self) -> bool:
        """Whether the values are those of the original, up to a rounding described in `note`."""
        return self.means in EQUAL

    @property
    def is_reordered(self) -> bool:
        """Whether the values are those of the original in another order."""
        return self.means is Means.REORDERED


@dataclass(frozen=True)
class Unmatched:
    """A parameter without a counterpart, and the most similar parameter of the other side."""

    name: str
    shape: tuple[int, ...]
    closest: str = ""
    """Name of the most similar parameter; empty if the other side has no parameter or none was
    searched for."""
    note: str = ""
    """Difference of `closest` from this parameter, such as "of (3, 4), has other values"."""


@dataclass(frozen=True)
class Matching:
    """Pairs of parameters, in the port's order, and the unmatched parameters of either side.

    A pair says of which parameters of the original one parameter of the port is made.
    """

    pairs: tuple[Pair, ...]
    unmatched_original: tuple[Unmatched, ...] = ()
    unmatched_port: tuple[Unmatched, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether every parameter of the port is matched with equal values, up to rounding."""
        return not self.unmatched_port and all(pair.is_equal for pair in self.pairs)

    @property
    def by_port(self) -> dict[str, Pair]:
        """The pairs, by name of the port's parameter."""
        return {pair.port: pair for pair in self.pairs}

    @property
    def tied(self) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
        """Groups of tied parameters (one tensor under several names), each as the names in the
        original and the names in the port.

        Each group has several names on at least one side. Different parts of one tensor are not
        tied to each other.
        """
        groups: dict[Any, tuple[list[str], list[str]]] = {}
        for pair in self.pairs:
            key = tuple((piece.parameter, piece.part) for piece in pair.construction.pieces)
            originals, ports = groups.setdefault(key, ([*pair.originals], []))
            originals += [name for name in pair.also if name not in originals]
            ports.append(pair.port)
        return tuple(
            (tuple(originals), tuple(ports))
            for key, (originals, ports) in groups.items()
            if len(ports) > 1 or len(originals) > len({name for name, _ in key})
        )

    def from_original(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """Build every matched parameter of the port from the original's parameters; by name.

        Raises:
            KeyError: `arrays` lacks a parameter of the original that is needed.
        """
        return {pair.port: pair.construction.from_original(arrays) for pair in self.pairs}

    def gradients(self, original: Arrays, port: Arrays) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return gradients of both sides as pairs (original's, port's), by name of the port's
        parameter.

        Both have the shape of the port's parameter. If parameters are tied on one side only, the
        gradients of the other side are summed: the derivative of a tensor used twice is the sum
        over its uses.

        Args:
            original: gradients of the original by parameter.
            port: gradients of the port by parameter. Pairs whose gradient is missing on one side
                are left out.
        """
        reference, sums = dict(original), {}
        for pair in self.pairs:
            first, *rest = (pair.originals[0], *pair.also)
            values = [original[name] for name in (first, *rest) if name in original]
            # One tensor under two names has one gradient, listed twice with the same bits. Two
            # tensors of equal value have different gradients, which are added.
            distinct: list[np.ndarray] = []
            for value in values:
                if not any(np.array_equal(value, other) for other in distinct):
                    distinct.append(value)
            if rest and values:
                reference[first] = sum(distinct[1:], start=distinct[0])
            if pair.port in port:
                for name, value in pair.construction.adjoint(port[pair.port]).items():
                    sums[name] = sums[name] + value if name in sums else value
        return {
            pair.port: (
                pair.construction.from_original(reference),
                pair.construction.from_original(sums),
            )
            for pair in self.pairs
            if pair.port in port and all(name in reference for name in pair.originals)
        }

    def text(self) -> str:
        """Return a readable table: one line per pair, then the unmatched parameters."""
        counts = Counter(pair.means for pair in self.pairs)
        total = len(self.pairs) + len(self.unmatched_port)
        how = ", ".join(f"{counts[means]} {means}" for means in Means if counts[means])
        lines = [f"{len(self.pairs)} of {total} parameters of the port matched: {how or 'none'}"]
        rows = [("port", "made of", "matched", "")]
        rows += [
            (pair.port, pair.construction.text(), str(pair.means), _note(pair))
            for pair in self.pairs
        ]
        lines += _columns(rows)
        for side, rest in (("port", self.unmatched_port), ("original", self.unmatched_original)):
            if rest:
                lines.append(f"of the {side}, without a counterpart:")
                lines += _columns([(f"  {u.name}", str(u.shape), _closest(u)) for u in rest])
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dictionary."""
        return {
            "pairs": [
                {
                    "port": pair.port,
                    "construction": pair.construction.to_json(),
                    "means": str(pair.means),
                    "note": pair.note,
                    "also": list(pair.also),
                }
                for pair in self.pairs
            ],
            "unmatched_original": [_unmatched_to_json(u) for u in self.unmatched_original],
            "unmatched_port": [_unmatched_to_json(u) for u in self.unmatched_port],
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Matching:
        """Return the matching that `to_json` wrote, possibly edited by hand.

        Raises:
            ValueError: a field is missing or cannot be parsed.
        """
        try:
            pairs = tuple(
                Pair(
                    pair["port"],
                    Construction.from_json(pair["construction"]),
                    Means(pair["means"]),
                    pair.get("note", ""),
                    tuple(pair.get("also", ())),
                )
                for pair in entry["pairs"]
            )
            rest = [
                tuple(
                    Unmatched(u["name"], tuple(u["shape"]), u.get("closest", ""), u.get("note", ""))
                    for u in entry[side]
                )
                for side in ("unmatched_original", "unmatched_port")
            ]
        except KeyError as missing:
            raise ValueError(
                f"expected the field {missing} of a matching of parameters, which is missing; "
                f"correct the file, or write it again with `Matching.to_json`"
            ) from missing
        return cls(pairs, *rest)


def elements_not_held(pairs: Iterable[Pair]) -> dict[str, int]:
    """Return how many elements of an original's parameter are in none of the port's, by name.

    Parameters that the port holds whole are left out; those that it lacks whole are in no pair.
    """
    pairs = tuple(pairs)
    whole = {name for pair in pairs for name in pair.also}
    held: dict[str, list[Part]] = {}
    for piece in (piece for pair in pairs for piece in pair.construction.pieces):
        held.setdefault(piece.parameter, []).append(piece.part)
    missing = {}
    for name, parts in held.items():
        if name in whole or any(part.is_whole for part in parts):
            continue
        seen = np.zeros(parts[0].whole, bool)
        for part in parts:
            seen.reshape(part.view)[part.index] = True
        if count := int(seen.size - seen.sum()):
            missing[name] = count
    return missing


def _unmatched_to_json(entry: Unmatched) -> dict[str, Any]:
    return {
        "name": entry.name,
        "shape": list(entry.shape),
        "closest": entry.closest,
        "note": entry.note,
    }


def _note(pair: Pair) -> str:
    tied = f"also {', '.join(pair.also)}" if pair.also else ""
    return "; ".join(filter(None, (pair.note, tied)))


def _closest(entry: Unmatched) -> str:
    closest = f"closest: {entry.closest}" if entry.closest else ""
    return ", ".join(filter(None, (closest, entry.note)))


def _columns(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return rows as lines with columns padded to their widest entry."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(entry.ljust(n) for entry, n in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
