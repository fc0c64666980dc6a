"""Stages of two sides as pairs: what an alignment is, and what a person may say of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from parity.engine.closeness import plain_layouts
from parity.engine.layouts import Layout
from parity.engine.stage_names import similarity

LISTED = 20
"""Names an error lists of a side."""


class AlignedBy(StrEnum):
    """What decided that two stages are one."""

    VALUE = "value"
    """Equal values; names decide only between several stages of one value."""
    NAME = "name"
    """Names alike, in order, values helping."""
    NEARNESS = "nearness"
    """Values that are not equal, yet correlated, and names that do not contradict."""
    ORDER = "order"
    """The same number of stages between two pairs."""
    PIN = "pin"
    """A person."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A stage of the port and the stage of the original it stands for."""

    port: str
    original: str
    layout: Layout
    """Takes the original's array to where the port's elements lie."""
    by: AlignedBy
    distance: float
    """Relative L2 of the port's values to the original's; NaN where either is not finite."""
    enclosed: bool = False
    """Whether values agree again behind it: a difference here, if there is one, reaches nothing."""


@dataclass(frozen=True, slots=True)
class Pin:
    """What a person said of a stage: its partner, or, where one name is None, that it has none."""

    port: str | None
    original: str | None
    layout: Layout | None = None
    """How it lies; None, or one of other shapes than the stages have now: the nearest."""


@dataclass(frozen=True)
class Alignment:
    """Two lists of stages side by side."""

    pairs: tuple[Pair, ...]
    """In the port's order of execution."""
    unaligned_original: Mapping[str, tuple[int, ...]]
    """Shapes of the original's stages without a partner, in its order."""
    unaligned_port: Mapping[str, tuple[int, ...]]
    """The same of the port."""

    def text(self) -> str:
        """Return the pairs as a table, and below it the stages that have no partner."""
        head = ("port stage", "original stage", "how it lies", "matched by", "distance")
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
        """Return what pins this alignment as it is, also what has no partner."""
        return (
            *(Pin(pair.port, pair.original, pair.layout) for pair in self.pairs),
            *(Pin(name, None) for name in self.unaligned_port),
            *(Pin(None, name) for name in self.unaligned_original),
        )


class AlignmentError(ValueError):
    """Too little aligns, or a pin cannot be followed."""


def check_pins(
    pins: Sequence[Pin], original: Mapping[str, np.ndarray], port: Mapping[str, np.ndarray]
) -> None:
    """Refuse pins that cannot be followed.

    Raises:
        AlignmentError: a pin names a stage that is not there, names one that another names, or
            pairs two of different sizes.
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
                f"original, expected two stages of one size, not 0: remove the pin."
            )


def _nearest_names(name: str, names: Mapping[str, object], most: int = LISTED) -> Iterator[str]:
    """Yield the names nearest to one first, and how many there are beyond."""
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
    """Return the shape of a stage; and of its namesake, where that is what keeps them apart."""
    if name in others and math.prod(others[name]) != math.prod(alone[name]):
        return f"{alone[name]}, {others[name]} on the other side"
    return str(alone[name])
