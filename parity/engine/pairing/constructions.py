"""Constructions: recipes that assemble a parameter of the port from parameters of the original.

A construction is a list of pieces. A piece takes a part of one parameter of the original,
rearranges it by a layout and puts it at a place of the port's parameter. Splits, concatenations,
stacks and interleaved heads are of this form. Constructions are linear, so they also map gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.engine.pairing.layouts import Layout, Shape, identity


@dataclass(frozen=True, slots=True)
class Part:
    """A box in an array: `starts` to `stops` on each axis, after a reshape to `view`.

    `whole` is the shape of the array before the reshape.
    """

    whole: Shape
    view: Shape
    starts: tuple[int, ...]
    stops: tuple[int, ...]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return this part of `x`; an axis of which one index is taken is kept, with length 1."""
        return x if self.is_whole else x.reshape(self.view)[self.index]

    def accumulate(self, x: np.ndarray, value: np.ndarray) -> None:
        """Add `value` in place to this part of `x`, a contiguous array of shape `whole`."""
        seen = x.reshape(self.view)
        seen[self.index] += value.reshape(seen[self.index].shape)

    @property
    def index(self) -> tuple[slice, ...]:
        """Index of the part in an array of shape `view`."""
        return tuple(slice(*ends) for ends in zip(self.starts, self.stops, strict=True))

    @property
    def shape(self) -> Shape:
        """Shape of the part."""
        if self.is_whole:
            return self.whole
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def is_whole(self) -> bool:
        """Whether the part covers the whole array."""
        return self.stops == self.view and not any(self.starts)

    def text(self) -> str:
        """Return the part as an index, such as `[:, 16:32]`; empty for a whole array."""
        if self.is_whole:
            return ""
        entries = [
            ":"
            if (start, stop) == (0, n)
            else str(start)
            if stop == start + 1
            else f"{start}:{stop}"
            for n, start, stop in zip(self.view, self.starts, self.stops, strict=True)
        ]
        while entries[-1] == ":":
            entries.pop()
        index = f"[{', '.join(entries)}]"
        return index if self.view == self.whole else f" as {self.view}{index}"


def whole(shape: Sequence[int]) -> Part:
    """Return the part that covers an array of `shape`."""
    shape = tuple(shape)
    return Part(shape, shape, (0,) * len(shape), shape)


def cut(shape: Shape, view: Shape, axis: int, start: int, stop: int) -> Part:
    """Return the part `start:stop` along `axis` of an array of `shape` that is reshaped to
    `view`."""
    starts, stops = [0] * len(view), list(view)
    starts[axis], stops[axis] = start, stop
    return Part(shape, view, tuple(starts), tuple(stops))


@dataclass(frozen=True, slots=True)
class Piece:
    """Copies `part` of the original's parameter `parameter`, rearranged by `layout`, to `place`, a
    part of the port's parameter."""

    parameter: str
    part: Part
    layout: Layout
    """Rearranges an array of the shape of `part` to the shape of `place`."""
    place: Part

    def text(self) -> str:
        """Describe the piece, such as `q.weight[0:8], transposed (1, 0), at [:, 0:8]`."""
        place = self.place.text()
        how = "" if self.layout.is_identity or _only_units(self.layout) else self.layout.text()
        return ", ".join(
            filter(None, (f"{self.parameter}{self.part.text()}", how, place and f"at {place}"))
        )


@dataclass(frozen=True, slots=True)
class Construction:
    """Recipe for a parameter of the port, of shape `shape`: the pieces of the original's parameters
    that make it up."""

    shape: Shape
    pieces: tuple[Piece, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the original's parameters in the pieces, in order, each once."""
        return tuple(dict.fromkeys(piece.parameter for piece in self.pieces))

    @property
    def adds(self) -> bool:
        """Whether several pieces are added at one place, as for two biases that the port stores as
        their sum."""
        return len({piece.place for piece in self.pieces}) < len(self.pieces)

    @property
    def is_complete(self) -> bool:
        """Whether the pieces fill the whole of the port's parameter."""
        places = {piece.place for piece in self.pieces}
        return sum(math.prod(place.shape) for place in places) == math.prod(self.shape)

    def from_original(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Build the port's parameter, or its gradient, from the original's arrays.

        Raises:
            KeyError: a parameter is missing.
        """
        if missing := [name for name in self.parameters if name not in arrays]:
            raise KeyError(
                f"expected the array {', '.join(missing)} of the original, which is not in `arrays`"
            )
        first = self.pieces[0]
        if len(self.pieces) == 1 and first.place.is_whole:
            return first.layout(first.part(arrays[first.parameter])).reshape(self.shape)
        result = np.zeros(self.shape, arrays[first.parameter].dtype)
        for piece in self.pieces:
            piece.place.accumulate(result, piece.layout(piece.part(arrays[piece.parameter])))
        return result

    def adjoint(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Map a gradient of the port's parameter to gradients of the original's parameters, by
        name.

        Elements of the original's parameters that the port's parameter does not use get zero.
        """
        result: dict[str, np.ndarray] = {}
        for piece in self.pieces:
            if piece.parameter not in result:
                result[piece.parameter] = np.zeros(piece.part.whole, array.dtype)
            value = piece.layout.inverse(piece.place(array))
            piece.part.accumulate(result[piece.parameter], value)
        return result

    def text(self) -> str:
        """Describe the construction: the texts of its pieces, joined by ", added to " if the pieces
        are added at one place, else by " + "."""
        places: dict[Part, list[str]] = {}
        for piece in self.pieces:
            places.setdefault(piece.place, []).append(piece.text())
        return " + ".join(", added to ".join(texts) for texts in places.values())

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dictionary."""
        pieces = [
            {
                "parameter": piece.parameter,
                "part": _part_to_json(piece.part),
                "layout": piece.layout.to_json(),
                "place": _part_to_json(piece.place),
            }
            for piece in self.pieces
        ]
        return {"shape": list(self.shape), "pieces": pieces}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Construction:
        """Return the construction that `to_json` wrote."""
        return cls(
            tuple(entry["shape"]),
            tuple(
                Piece(
                    piece["parameter"],
                    _part_from_json(piece["part"]),
                    Layout.from_json(piece["layout"]),
                    _part_from_json(piece["place"]),
                )
                for piece in entry["pieces"]
            ),
        )


def laid_out(parameter: str, layout: Layout) -> Construction:
    """Return the construction (recipe) of a port's parameter that is one whole parameter of the
    original, rearranged by `layout`."""
    piece = Piece(parameter, whole(layout.source), layout, whole(layout.target))
    return Construction(layout.target, (piece,))


def copied(parameter: str, shape: Sequence[int]) -> Construction:
    """Return the construction (recipe) of a port's parameter that equals the original's
    `parameter`."""
    return laid_out(parameter, identity(shape))


def _only_units(layout: Layout) -> bool:
    """Return whether a layout only adds or drops axes of length 1."""
    plain = layout.axes == tuple(range(len(layout.axes)))
    wide = [[n for n in shape if n > 1] for shape in (layout.source, layout.target)]
    return plain and wide[0] == wide[1] and len(layout.source) != len(layout.target)


def _part_to_json(part: Part) -> dict[str, list[int]]:
    return {name: list(getattr(part, name)) for name in Part.__slots__}


def _part_from_json(entry: dict[str, Any]) -> Part:
    return Part(**{name: tuple(int(n) for n in entry[name]) for name in Part.__slots__})
