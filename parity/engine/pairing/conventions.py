"""Axis orders of parameters by convention: torch stores (out, in), Flax (in, out).

Shapes decide the order unless several orders fit, as for square matrices. Then parameters with
similar names and unambiguous shapes decide, and finally a table.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np

from parity.engine.pairing import naming
from parity.engine.pairing.layouts import (
    MOST_AXES,
    Layout,
    Shape,
    candidates,
    identity,
    transposition,
)

CONVENTIONS: dict[tuple[str, str, int], tuple[int, ...]] = {
    # (last part of the name in one library, in the other, number of axes): order of axes
    ("weight", "kernel", 2): (1, 0),  # (out, in) -> (in, out), also where both are equal
    ("weight", "kernel", 3): (2, 1, 0),  # (out, in, W) -> (W, in, out)
    ("weight", "kernel", 4): (2, 3, 1, 0),  # (out, in, H, W) -> (H, W, in, out)
    ("weight", "kernel", 5): (2, 3, 4, 1, 0),  # (out, in, D, H, W) -> (D, H, W, in, out)
    ("weight", "w", 2): (1, 0),  # Haiku's endings
    ("weight", "w", 3): (2, 1, 0),
    ("weight", "w", 4): (2, 3, 1, 0),
}
"""Order in which the axes of an array of the first library appear in the second library.

Keys: last part of the name in the first and in the second library, and number of axes. Parameters
that are not listed have the same order in both libraries."""

_OF_CELL = re.compile(r"(weight|bias)_[ih]h(?:_l\d+(?:_reverse)?)?")
"""Last part of a parameter's name in torch's recurrent layers and cells."""


class Conventions:
    """Chooses by names and shapes the axis order or reshape that maps a parameter of the original
    to one of the port.

    Args:
        pairs: name of the original's parameter by name of the port's. A pair whose shapes allow
            only one order votes on the order of similarly named pairs.
        originals: shapes of the original's parameters.
        ports: shapes of the port's parameters.
    """

    def __init__(
        self, pairs: Mapping[str, str], originals: Mapping[str, Shape], ports: Mapping[str, Shape]
    ):
        self.votes: dict[tuple[str, str, str, int], Counter] = defaultdict(Counter)
        for port, original in pairs.items():
            source, target = originals[original], ports[port]
            axes = _fitting(source, target)
            if len(axes) == 1:
                for key in self._keys(original, port, len(source)):
                    self.votes[key][axes[0]] += 1

    def axes(self, original: str, port: str, source: Shape, target: Shape) -> tuple[int, ...]:
        """Return the order of the original's axes in an array of the port with equally many axes,
        as for `np.transpose`.

        Parameters with similar names and unambiguous shapes decide, then `CONVENTIONS`. If the
        shapes do not allow the resulting order, the first order that they allow is returned.
        """
        fitting = _fitting(source, target)
        ends = _end(original), _end(port)
        for key in self._keys(original, port, len(source)):
            for axes, _ in self.votes[key].most_common():
                if axes in fitting:
                    return axes
        if (*ends, len(source)) in CONVENTIONS:
            axes = CONVENTIONS[*ends, len(source)]
        elif (*reversed(ends), len(source)) in CONVENTIONS:
            back = CONVENTIONS[ends[1], ends[0], len(source)]
            axes = tuple(int(axis) for axis in np.argsort(back))
        else:
            axes = tuple(range(len(source)))
        return axes if not fitting or axes in fitting else fitting[0]

    def layout(self, original: str, port: str, source: Shape, target: Shape) -> Layout:
        """Return the layout (reshape and transposition) that maps an original's parameter to one of
        the port.

        Args:
            original: name of the original's parameter.
            port: name of the port's parameter.
            source: shape of the original's parameter.
            target: shape of the port's parameter, with as many elements.
        """
        if len(source) == len(target) and _fitting(source, target):
            return transposition(source, self.axes(original, port, source, target))
        if len(source) == 2 and len(target) > 2 and _swaps(original, port):
            # Kernels: (in, heads, d) from (heads * d, in), (heads, d, out) from (out, heads * d).
            for k in range(1, len(target)):
                if math.prod(target[:k]) == source[1]:
                    n = len(target) - k
                    order = (*range(n, len(target)), *range(n))
                    return Layout(source, (*target[k:], *target[:k]), order, target)
        if len(target) == 2 and len(source) > 2 and _swaps(original, port):
            return self.layout(port, original, target, source).reversed
        return candidates(source, target)[0]

    @staticmethod
    def _keys(original: str, port: str, axes: int) -> list[tuple[str, str, str, int]]:
        ends = _end(original), _end(port)
        above = [naming.pattern(naming.parent(port, levels)) for levels in (1, 2)]
        return [(place, *ends, axes) for place in (*above, "")]


def nearness(source: Shape, target: Shape) -> float:
    """Return a score of how easily `source` is rearranged to `target`: 1 if a permutation of axes
    suffices, 0.5 if axes must be merged or split, -inf if no layout fits. Axes of size 1 are
    ignored."""
    wide = [tuple(n for n in shape if n > 1) for shape in (source, target)]
    if math.prod(source) != math.prod(target):
        return -math.inf
    if sorted(wide[0]) == sorted(wide[1]):
        return 1.0
    return 0.5 if len(candidates(source, target)) > 1 or min(map(len, wide)) == 1 else -math.inf


def _end(name: str) -> str:
    """Return the last part of a name without torch's suffix for recurrent layers, such as `_ih_l0`;
    `weight` for a parameter with the name of a module, such as `wq`."""
    leaf = naming.leaf(name)
    if leaf in naming.SEGMENTS:
        return "weight"
    matrix = _OF_CELL.fullmatch(leaf)
    return matrix[1] if matrix else leaf


def _swaps(original: str, port: str) -> bool:
    ends = _end(original), _end(port)
    return (*ends, 2) in CONVENTIONS or (*reversed(ends), 2) in CONVENTIONS


def _fitting(source: Shape, target: Shape) -> list[tuple[int, ...]]:
    """Return the axis orders that permute `source` to `target`, the unchanged order first; empty if
    there are none."""
    if sorted(source) != sorted(target) or len(source) > MOST_AXES:
        return [identity(source).axes] if source == target else []
    orders = itertools.permutations(range(len(source)))
    return [axes for axes in orders if tuple(source[axis] for axis in axes) == target]
