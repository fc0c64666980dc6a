"""Alignment: pairs the stages of a port with those of its original by values, names and order.

Stages are named intermediates, listed in order of execution. Names differ between the sides, and
either side may have stages that the other lacks. Stages of equal value are paired first, in order;
if several have the same value, the most similar name decides. Pairs of equal values cover
everything before the first divergence. After the first divergence values no longer agree; names,
names that are paired in other layers, distance and order decide.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from parity.engine.pairing.closeness import EQUAL, Shape, closeness, distance, entangled
from parity.engine.pairing.layouts import Layout
from parity.engine.pairing.stage_names import learned, other_layers, similarity
from parity.engine.pairing.stage_pairs import (
    AlignedBy,
    Alignment,
    AlignmentError,
    Pair,
    Pin,
    check_pins,
)

__all__ = ["AlignedBy", "Alignment", "AlignmentError", "Pair", "Pin", "align"]

# With fewer pairs, the two programs are not the same model, or their inputs differ.
LEAST = 0.1
"""Smallest fraction of the shorter list of stages that must be paired."""
DECIDES = 0.5
"""Smallest similarity of two names, from 0 to 1, that counts in favour of pairing their stages."""
# Two pairs with this score are worth less than one pair whose names are alike, so that a dropout
# layer, which has the value of the module around it, does not take that module's partner.
PRESENT = 0.15
"""Score of a pair of stages with equal values and unlike names; similar names raise the score."""
# If values agree again, nothing has diverged, and a stage more likely has no partner.
ENCLOSED = 0.8
"""Smallest evidence (`_evidence`, 0 to 2) for pairing two stages of different values, if values
agree again in later stages."""
DIVERGED = 0.45
"""Smallest evidence (`_evidence`, 0 to 2) for pairing two stages of different values, if values do
not agree again in later stages."""
HORIZON = 12
"""Number of stages after a pair (about one layer) examined to decide whether values agree again."""
# In a correct port not all stages agree: the original may lack some. After a bug some stages agree,
# such as tables of positions that each layer recomputes.
AGREEING = 1 / 3
"""Smallest fraction of the next `HORIZON` stages that must agree for values to count as agreeing
again."""
# Reached by the same name up to an index at its end, and by names that are paired in another layer.
SURE = 0.9
"""Name similarity that pairs stages of different values, even when executed in another order."""
# One word in common, and values that are correlated.
SWAPPED = 0.6
"""Smallest evidence (`_evidence`, 0 to 2) for pairing two stages of different values, if one side
executes its stage before, and the other side after, an already paired stage."""
MISNUMBERED = 2
"""Layer numbers in names are ignored if the pairs of equal values that contradict them are more
than this many times as many as the pairs that agree with them."""
FIXED = 1e6
"""Score of a pair that is already decided: more than the scores of all other pairs together."""


def align(
    original: Mapping[str, np.ndarray],
    port: Mapping[str, np.ndarray],
    *,
    outputs: tuple[Sequence[str], Sequence[str]] = ((), ()),
    pins: Sequence[Pin] = (),
    equal: float = EQUAL,
) -> Alignment:
    """Pair the stages of a port with those of its original; return an `Alignment`.

    Args:
        original: floating-point arrays of the original by stage name, in order of execution.
        port: floating-point arrays of the port by stage name, in order of execution.
        outputs: names of the stages that the original and the port return; an output pairs only
            with an output if the other side has one of the same size.
        pins: pairs set by the user, which are never changed.
        equal: relative L2 difference up to which values count as equal. The default is meant for
            runs of which at least one is in float32.

    Raises:
        AlignmentError: a pin names a stage that does not exist or stages that cannot be paired; or
            fewer than a tenth of the stages are paired (the message lists the pairs).
    """
    check_pins(pins, original, port)
    result = _Aligner(original, port, outputs, equal).run(pins)
    needed = max(1, math.ceil(LEAST * min(len(original), len(port))))
    if len(result.pairs) < needed:
        raise AlignmentError(
            f"{len(result.pairs)} of {len(port)} stages of the port have a partner among "
            f"{len(original)} of the original, expected {needed} at least. Check that both sides "
            f"hold the same parameters and got the same inputs, or pin stages.\n{result.text()}"
        )
    return result


class _Aligner:
    """The pairs found so far, and the evidence for further pairs.

    Arrays of evidence have one row per stage of the original, one column per stage of the port.
    """

    def __init__(
        self,
        original: Mapping[str, np.ndarray],
        port: Mapping[str, np.ndarray],
        outputs: tuple[Sequence[str], Sequence[str]],
        equal: float,
    ):
        self.names = tuple(original), tuple(port)
        self.stages = tuple(original.values()), tuple(port.values())
        self.equal = equal
        self.close = closeness(*self.stages)
        self.telling = self.close.telling[0][:, None] & self.close.telling[1][None]
        self.alike = similarity(*self.names)
        self.partners: dict[int, int] = {}
        """The pairs found so far: index of the port's stage by index of the original's stage."""
        self.by: dict[int, AlignedBy] = {}
        self.pinned_layouts: dict[tuple[int, int], Layout] = {}
        self.barred = np.isinf(self.close.distance)
        """Booleans (stages of the original, stages of the port), True where the two cannot be a
        pair."""
        returned = [np.isin(names, which) for names, which in zip(self.names, outputs, strict=True)]
        self.outputs = returned[0][:, None] & returned[1] & ~self.barred
        # Outputs pair with outputs only. Without one of its size, an output may be the partner of
        # an intermediate.
        has_output = np.logical_or.outer(*(np.any(self.outputs, axis=axis) for axis in (1, 0)))
        self.barred |= has_output & ~self.outputs
        # Outputs of the same name are the same result, whatever other stages share their value.
        rows, columns = ({name: n for n, name in enumerate(side)} for side in self.names)
        for name in set(outputs[0]) & set(outputs[1]):
            i, j = rows[name], columns[name]
            if self.outputs[i, j]:
                self.barred[i], self.barred[:, j] = True, True
                self.barred[i, j] = False

    def run(self, pins: Sequence[Pin]) -> Alignment:
        """Pair pinned stages, then stages of equal value, then stages of similar name, then the
        remaining stages; return the alignment."""
        self._follow(pins)
        self._pair_equal()
        if self._find_entangled():
            self._pair_equal()
        self._add_learned_names()
        # Equal names are paired in any order of execution: a gate may come before or after `up`.
        self._pair_in_any_order(np.where(self.alike >= SURE, self.alike, 0.0), AlignedBy.NAME)
        evidence = _evidence(self.alike, self.close.distance, self.telling)
        needed = np.where(self._values_agree_behind(), ENCLOSED, DIVERGED)
        worth = np.where(evidence >= needed, evidence - needed + PRESENT, 0.0)
        self._pair_in_order(worth, AlignedBy.NAME)
        swapped = np.where(evidence >= np.maximum(needed, SWAPPED), evidence, 0.0)
        self._pair_in_any_order(swapped, AlignedBy.NAME)
        self._pair_counted(needed <= DIVERGED)
        self._pair_in_order(np.where(self.outputs, 1 + evidence, 0.0), AlignedBy.ORDER)
        return self._result()

    def _follow(self, pins: Sequence[Pin]) -> None:
        rows, columns = ({name: n for n, name in enumerate(side)} for side in self.names)
        for pin in pins:
            if pin.original is None or pin.port is None:
                if pin.original is not None:
                    self.barred[rows[pin.original]] = True
                if pin.port is not None:
                    self.barred[:, columns[pin.port]] = True
                continue
            i, j = rows[pin.original], columns[pin.port]
            self._pair(i, j, AlignedBy.PIN)
            shapes = self.stages[0][i].shape, self.stages[1][j].shape
            if pin.layout is not None and (pin.layout.source, pin.layout.target) == shapes:
                self.pinned_layouts[i, j] = pin.layout

    def _pair_equal(self) -> None:
        """Pair stages of equal value: first stages that both sides execute in the same order, then
        the others.

        Names decide between several partners. Stages with fewer than three distinct values are left
        out.
        """
        worth, misnumbered = self._worth_of_values(), self._misnumbered()
        wrong = len(best_in_order(np.where(misnumbered, worth, 0.0)))
        right = len(best_in_order(np.where(misnumbered, 0.0, worth)))
        if wrong <= MISNUMBERED * max(right, 1):
            worth[misnumbered] = 0.0
        self._pair_in_order(worth, AlignedBy.VALUE)
        self._pair_in_any_order(worth, AlignedBy.VALUE)

    def _worth_of_values(self) -> np.ndarray:
        worth = 2 * np.maximum(self.alike - DECIDES, 0.0) + PRESENT
        return np.where((self.close.distance <= self.equal) & self.telling, worth, 0.0)

    def _misnumbered(self) -> np.ndarray:
        """Return which pairs of stages have names of different layers, although each of the two
        stages has a namesake (a stage of nearly the same name) on the other side.

        Such a pair of equal values is suspicious: a layer without effect, because of a bug, passes
        its input on to the next layer, and then the layer number is better evidence. The caller
        ignores the result if most values contradict the numbers (`MISNUMBERED`).

        Returns:
            Booleans (stages of the original, stages of the port).
        """
        namesakes = np.where(self.barred, 0.0, self.alike)
        rows, columns = (namesakes.max(axis=axis, initial=0.0) >= SURE for axis in (1, 0))
        return np.logical_and.outer(rows, columns) & other_layers(*self.names)

    def _find_entangled(self) -> bool:
        """Search for unpaired stages that are equal after an unusual rearrangement (none of
        `plain_layouts`), store their distances and layouts, and return whether any were found."""
        free = self._free() & self.telling
        rows, columns = (np.flatnonzero(free.any(axis=axis)).tolist() for axis in (1, 0))
        pairs = entangled(*self.stages, rows, columns, self.equal)
        for (i, j), layout in pairs.items():
            self.close.distance[i, j] = distance(self.stages[1][j], layout(self.stages[0][i]))
            self.close.layouts[i, j] = layout
        return bool(pairs)

    def _add_learned_names(self) -> None:
        """Raise the similarity of two names that are already paired in another layer."""
        one, other = self.names
        pairs = [(one[i], other[j]) for i, j in self.partners.items()]
        self.alike = np.maximum(self.alike, learned(pairs, one, other))

    def _values_agree_behind(self) -> np.ndarray:
        """Return, for each pair of stages, whether values agree again soon after it.

        They do if on at least one side at least the fraction `AGREEING` of the next `HORIZON`
        stages with more than two distinct values are paired by value.

        Returns:
            Booleans (stages of the original, stages of the port).
        """
        agreeing = [i for i, by in self.by.items() if by is AlignedBy.VALUE]
        shares = []
        for telling, which in zip(
            self.close.telling, (agreeing, [self.partners[i] for i in agreeing]), strict=True
        ):
            agrees = np.isin(np.arange(len(telling)), which)
            ends = range(1, len(telling) + 1)
            shares.append(np.array([_share(agrees[end:], telling[end:]) for end in ends]))
        return np.maximum(shares[0][:, None], shares[1][None]) >= AGREEING

    def _pair_in_order(self, worth: np.ndarray, by: AlignedBy) -> None:
        """Add the pairs with the largest total score whose order is the same on both sides.

        Args:
            worth: score of each pair (stages of the original, stages of the port); 0: no pair.
            by: evidence to record for the new pairs.
        """
        worth = np.where(self._free(), worth, 0.0)
        spine = self._spine()
        for i, j in spine:
            worth[i, :], worth[:, j], worth[i, j] = 0.0, 0.0, FIXED
        for i, j in best_in_order(worth):
            self._pair(i, j, by)

    def _pair_in_any_order(self, worth: np.ndarray, by: AlignedBy) -> None:
        """Add pairs in order of decreasing score, whatever their order of execution."""
        worth = np.where(self._free(), worth, 0.0)
        order = np.argsort(-worth, axis=None, kind="stable")[: np.count_nonzero(worth)]
        for i, j in zip(*np.unravel_index(order, worth.shape), strict=True):
            if int(i) not in self.partners and int(j) not in self.partners.values():
                self._pair(int(i), int(j), by)

    def _pair_counted(self, diverged: np.ndarray) -> None:
        """Between each two successive pairs, pair the unpaired stages in order, if both sides have
        equally many of them.

        Args:
            diverged: booleans (stages of the original, stages of the port), True where values do
                not agree again later. Nothing is paired unless `diverged` is True and the sizes
                match for all new pairs between two pairs.
        """
        free = self._free()
        ends = [(-1, -1), *self._spine(), (len(self.names[0]), len(self.names[1]))]
        for (i, j), (k, m) in itertools.pairwise(ends):
            rows = [n for n in range(i + 1, k) if free[n].any()]
            columns = [n for n in range(j + 1, m) if free[:, n].any()]
            cells = list(zip(rows, columns, strict=False))
            if len(rows) == len(columns) and all(free[c] and diverged[c] for c in cells):
                for cell in cells:
                    self._pair(*cell, AlignedBy.ORDER)

    def _free(self) -> np.ndarray:
        """Return which two stages may still become a pair: booleans (stages of the original, stages
        of the port)."""
        free = ~self.barred
        free[list(self.partners)] = False
        free[:, list(self.partners.values())] = False
        return free

    def _spine(self) -> list[tuple[int, int]]:
        """Return the longest sequence of known pairs that is in order on both sides, as (index of
        the original's stage, index of the port's stage)."""
        worth = np.zeros(self.barred.shape)
        for i, j in self.partners.items():
            worth[i, j] = 1.0
        return best_in_order(worth)

    def _pair(self, i: int, j: int, by: AlignedBy) -> None:
        if i in self.partners:
            return
        if by is AlignedBy.NAME and self.alike[i, j] < DECIDES:
            by = AlignedBy.NEARNESS
        self.partners[i], self.by[i] = j, by

    def _result(self) -> Alignment:
        layouts = self._usual_layouts()
        agree_behind = self._values_agree_behind()
        pairs = []
        for i, j in sorted(self.partners.items(), key=lambda pair: pair[1]):
            x, y = self.stages[0][i], self.stages[1][j]
            layout = self.pinned_layouts.get((i, j), self.close.layouts[i, j])
            if self.by[i] is not AlignedBy.PIN:
                # The usual layout of the two shapes; a pair of equal values has no other.
                layout = layouts.get((x.shape, y.shape), layout)
            if self.outputs[i, j] and x.shape == y.shape and self.by[i] is not AlignedBy.PIN:
                # A transposed output is a different result, unless a pin sets the layout.
                layout = Layout(x.shape, x.shape, tuple(range(x.ndim)), x.shape)
            apart = distance(y, layout(x))
            by = self.by[i]
            if by is AlignedBy.VALUE and not apart <= self.equal:
                by = AlignedBy.ORDER
            names = self.names[1][j], self.names[0][i]
            pairs.append(Pair(*names, layout, by, apart, bool(agree_behind[i, j])))
        left = [i for i in range(len(self.names[0])) if i not in self.partners]
        paired = set(self.partners.values())
        right = [j for j in range(len(self.names[1])) if j not in paired]
        return Alignment(
            tuple(pairs),
            {self.names[0][i]: self.stages[0][i].shape for i in left},
            {self.names[1][j]: self.stages[1][j].shape for j in right},
        )

    def _usual_layouts(self) -> dict[tuple[Shape, Shape], Layout]:
        """Return the layout (reshape and transposition) that all pairs of equal values have, by the
        shapes of the original's and of the port's stage.

        Two shapes whose pairs have several layouts are left out. The results are used for stages
        with different values: there the nearest layout may be wrong by chance, or hide the bug.
        """
        usual: dict[tuple[Shape, Shape], set[Layout]] = {}
        for i, by in self.by.items():
            if by is AlignedBy.VALUE:
                layout = self.close.layouts[i, self.partners[i]]
                usual.setdefault((layout.source, layout.target), set()).add(layout)
        return {shapes: next(iter(each)) for shapes, each in usual.items() if len(each) == 1}


def _evidence(alike: np.ndarray, apart: np.ndarray, telling: np.ndarray) -> np.ndarray:
    """Return the evidence for each pair of stages of different values, from 0 to 2, as an array
    (stages of the original, stages of the port).

    Name similarity counts up to 1, and each decimal digit in which the values agree a quarter, up
    to 1. An error of 30 % counts an eighth. An eighth is less than the layer number in the name
    counts, since stages of neighbouring layers may be equally close.

    Args:
        alike: similarity of the two names.
        apart: relative L2 difference of the two values.
        telling: whether both stages have more than two distinct values; if not, `apart` does not
            count.
    """
    digits = -np.log10(np.clip(apart, 1e-4, 1.0))
    return alike + np.where(telling, digits / 4, 0.0)


def best_in_order(worth: np.ndarray) -> list[tuple[int, int]]:
    """Return the sequence of cells (row, column) with the largest total worth in which both indices
    increase.

    Cells of worth 0 are never chosen.
    """
    # Leaving a cell out costs nothing, so each row of the dynamic programming table is a running
    # maximum.
    rows, columns = worth.shape
    table = np.zeros((rows + 1, columns + 1))
    for i in range(rows):
        with_cell = np.where(worth[i] > 0, table[i, :-1] + worth[i], 0.0)
        table[i + 1, 1:] = np.maximum.accumulate(np.maximum(table[i, 1:], with_cell))
    cells = []
    i, j = rows, columns
    while i and j:
        if table[i, j] == table[i - 1, j]:
            i -= 1
        elif table[i, j] == table[i, j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            cells.append((i, j))
    return cells[::-1]


def _share(agrees: np.ndarray, telling: np.ndarray) -> float:
    """Return the fraction of stages paired by value among the first `HORIZON` stages that have more
    than two distinct values; 0 if there are none.

    Args:
        agrees: booleans by stage, True if a stage is paired by value.
        telling: booleans by stage, True if a stage has more than two distinct values.
    """
    next_ones = np.flatnonzero(telling)[:HORIZON]
    return float(np.mean(agrees[next_ones])) if next_ones.size else 0.0
