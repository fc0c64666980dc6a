"""Alignment of stages (named intermediates) of two programs, and pins, which fix pairs by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from parity.engine.pairing.closeness import plain_layouts
from parity.engine.pairing.layouts import Layout
from parity.engine.pairing.stage_names import similarity

LISTED = 20
"""Largest number of stage names that an error message lists."""


class AlignedBy(StrEnum):
    """Evidence that decided a pair of stages."""

    VALUE = "value"
    """Equal values; names decide only between several stages of the same value."""
    NAME = "name"
    """Similar names, possibly supported by close values."""
    NEARNESS = "nearness"
    """Close but unequal values; the names are little alike."""
    ORDER = "order"
    """Place in the order of execution, such as equally many stages between two other pairs."""
    PIN = "pin"
    """A pin set by a person."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A stage of the port and the corresponding stage of the original."""

    port: str
    original: str
    layout: Layout
    """Maps the original's array to the port's arrangement of elements."""
    by: AlignedBy
    distance: float
    """L2 norm of the difference of the port's values from the original's, over the norm of the
    original's; NaN for NaN or unequal infinities."""
    enclosed: bool = False
    """Whether values agree again soon after this stage; a difference here then has no effect."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A partner set by hand for one stage; if one name is None, the stage has no partner."""

    port: str | None
    original: str | None
    layout: Layout | None = None
    """Maps the original's array to the port's arrangement of elements. If None, or if it does not
    fit the shapes, the layout with the smallest difference is used."""


@dataclass(frozen=True)
class Alignment:
    """Pairs of stages, and the stages of either side without a partner."""

    pairs: tuple[Pair, ...]
    """Pairs in the port's order of execution."""
    unaligned_original: Mapping[str, tuple[int, ...]]
    """Shapes of the original's stages without a partner, in order of execution."""
    unaligned_port: Mapping[str, tuple[int, ...]]
    """Shapes of the port's stages without a partner, in order of execution."""

    def text(self) -> str:
        """Return the pairs as a table, followed by the stages without a partner."""
        head = ("port stage", "original stage", "layout", "matched by", "distance")
        rows = [
            (p.port, p.original, p.layout.text(), p.by, f"{p.distance:.1e}") for p in self.pairs
        ]
        lines = _table([head, *rows]) if rows else ["no stage of the port has a partner"]
        for side, alone, others in (
            ("port", self.unaligned_port, self.unaligned_original),
            ("original", self.unaligned_original, self.unaligned_port),
        ):
            if alone:
                lines += ["", f"only in the {side}:"]
                lines += [f"  {name} {_shape_text(name, alone, others)}" for name in alone]
        return "\n".join(lines)

    def pins(self) -> tuple[Pin, ...]:
        """Return pins that reproduce this alignment, including stages without a partner."""
        return (
            *(Pin(pair.port, pair.original, pair.layout) for pair in self.pairs),
            *(Pin(name, None) for name in self.unaligned_port),
            *(Pin(None, name) for name in self.unaligned_original),
        )


class AlignmentError(ValueError):
    """Too few stages of the two programs can be paired, or a pin (pair set by hand) cannot be
    applied."""


def check_pins(
    pins: Sequence[Pin], original: Mapping[str, np.ndarray], port: Mapping[str, np.ndarray]
) -> None:
    """Check that all pins can be applied.

    Raises:
        AlignmentError: a pin names a stage that does not exist, a stage is pinned twice, or a pin
            pairs stages of different sizes.
    """
    seen: set[tuple[str, str]] = set()
    for pin in pins:
        for side, name, stages in (("original", pin.original, original), ("port", pin.port, port)):
            if name is None:
                continue
            if name not in stages:
                raise AlignmentError(
                    f"a pin names the stage {name!r} of the {side}, which has no such stage; it "
                    f"has: {', '.join(_nearest_names(name, stages)) or 'none'}. Correct the pin or "
                    f"remove it."
                )
            if (side, name) in seen:
                raise AlignmentError(
                    f"the stage {name!r} of the {side} is pinned twice, expected once: remove one "
                    f"of the pins."
                )
            seen.add((side, name))
        if pin.original is None or pin.port is None:
            continue
        source, target = original[pin.original].shape, port[pin.port].shape
        if not plain_layouts(source, target) or not math.prod(source):
            raise AlignmentError(
                f"{pin.port!r} {target} of the port is pinned to {pin.original!r} {source} of the "
                f"original, expected two stages with equally many elements, at least one: correct "
                f"or remove the pin."
            )


def _nearest_names(name: str, names: Mapping[str, object], most: int = LISTED) -> Iterator[str]:
    """Yield the `most` names most similar to `name`, then "and N more" if names are left out."""
    every = list(names)
    alike = similarity([name], every)[0]
    yield from (every[n] for n in np.argsort(-alike, kind="stable")[:most])
    if len(every) > most:
        yield f"and {len(every) - most} more"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _shape_text(
    name: str, alone: Mapping[str, tuple[int, ...]], others: Mapping[str, tuple[int, ...]]
) -> str:
    """Return the shape of a stage as text, and the shape of the other side's stage of the same name
    if the sizes differ."""
    if name in others and math.prod(others[name]) != math.prod(alone[name]):
        return f"{alone[name]}, {others[name]} on the other side"
    return str(alone[name])
