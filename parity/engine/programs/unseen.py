"""Finds operations of a program whose numbers another program never computes, and their source
lines.

Two programs of the same mathematics may arrange it in different arrays: one works in chunks, the
other on the whole sequence. So single numbers are searched for among all numbers that the other
program computes. Two float64 numbers that agree to 11 digits count as equal. A number that the
other program never computes is either wrong or belongs to a different algorithm for the same
result; in the second case the other program has a number that is computed later from it.

Source: docs/parity.md "From a stage to a line".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from parity.engine.programs.operations import MASKING, Operation
from parity.engine.programs.source_lines import LINES, Line

SAME = 1e-11
"""Distance up to which two numbers are equal, relative to the root mean square of their array.

The value equals the tolerance for float64 implementations of the same mathematics."""
FEWEST = 3
"""Smallest number of distinct values by which an array can be identified."""
CALLERS = 4
"""Largest number of stack frames listed for an operation, including its own."""
CALLS = "the result of this call is wrong; the same code is right when called elsewhere"
CALLS_MASK = "the mask made by this call is wrong; the same code is right when called elsewhere"
IDLE = "; correct elsewhere, where there is nothing to mask"
APPLIES = "applies the mask"
PARTLY = "only part of its result is wrong; the correct part may be copied from an operand"
MOVES = frozenset(
    (
        *("broadcast_in_dim", "concatenate", "gather", "pad", "reshape"),
        *("rev", "select_n", "slice", "squeeze", "transpose"),
    )
)
"""Primitives that only move numbers: a wrong number in their result came from an operand."""
SELECT = "select_n"
"""JAX primitive that chooses each element from one of two arrays by a mask (`jnp.where`)."""


class Seen:
    """All numbers that a program computes, and the numbers that each of its masked arrays keeps.

    Args:
        arrays: all results of the program; magnitudes of at least `MASKING` count as masked.
    """

    def __init__(self, arrays: Iterable[np.ndarray]) -> None:
        plain, masked = [], []
        for array in arrays:
            values = _parts(array)
            left = values[np.abs(values) < MASKING]
            plain.append(left)
            if left.size < values.size:
                masked.append(left)
        self._numbers = _sorted(plain)
        self._left = [_sorted([left]) for left in masked]

    def unseen(self, array: np.ndarray) -> np.ndarray:
        """Return which elements occur nowhere among the program's numbers, as booleans.

        Whole numbers and masked elements always count as found; NaN never does.
        """
        return _judged(array) & ~_near(self._numbers, array, _reach(array))

    def wrongly_masked(self, kept: np.ndarray, values: np.ndarray) -> np.ndarray | None:
        """Return where a mask keeps what the other program masks, or the reverse.

        Args:
            kept: booleans, True where the mask keeps an element.
            values: the array that the mask is applied to, in the same shape.

        Returns:
            Booleans in the same shape; None if the other program has no similar masked array.
        """
        # The masked array that shares most numbers with `values` is taken to be its counterpart.
        reach = _reach(values)
        left = max(
            (_near(numbers, values, reach) for numbers in self._left),
            key=lambda near: int((near & kept).sum()),
            default=np.zeros(values.shape, bool),
        )
        # If the number itself is wrong, nothing follows about the mask.
        return (kept != left) & ~self.unseen(values) if (left & kept).any() else None


@dataclass(frozen=True)
class Suspect:
    """An operation whose result the other program does not compute, and on whose result no later
    result depends that the other program does compute.

    Attributes:
        index: index of the operation.
        wrong: booleans in the shape of the operation's result, True at elements that the other
            program lacks or masks differently.
        partly: whether the other program computes some elements of the result.
        computed: whether some of these elements are not copied from the operation's operands.
        mask: whether the mask that the operation applies is wrong, rather than its numbers.
    """

    index: int
    wrong: np.ndarray
    partly: bool = False
    computed: bool = False
    mask: bool = False


@dataclass(frozen=True)
class Search:
    """Result of searching for one program's numbers among those of another.

    Attributes:
        operations: operations that compute the wrong stage from the replaced ones, by index.
        values: results of the operations in float64, by index.
        suspects: suspicious operations, in order of execution.
        fine: indices of the operations that are not suspicious: their result is correct, or a later
            correct result depends on it.
        original: name of the other program in messages.
        beside: operations of stages that are correct; their source lines are taken to be right.
    """

    operations: Mapping[int, Operation]
    values: Mapping[int, np.ndarray]
    suspects: tuple[Suspect, ...]
    fine: frozenset[int]
    original: str = "the original"
    beside: tuple[Operation, ...] = ()

    @property
    def first(self) -> Suspect | None:
        """The most likely cause; None without suspects.

        A wrong mask comes first. Without one, it is the first operation whose result is only partly
        wrong: since the rest of the result is correct, both programs use the same algorithm there.
        Without such an operation, or if all correct elements of such results are copied from
        operands, it is the first suspect.
        """
        masks = [s for s in self.suspects if s.mask]
        partly = [s for s in self.suspects if self._is_partly(s)]
        if not any(s.computed for s in partly):
            partly = []
        return next(iter((*masks, *partly, *self.suspects)), None)

    def _is_partly(self, suspect: Suspect) -> bool:
        """Return whether an operation computes numbers instead of only moving them, and only a part
        of its result is wrong."""
        return suspect.partly and self.operations[suspect.index].primitive not in MOVES

    def lines(self) -> list[Line]:
        """Return at most `LINES` source lines for the user to check, the most suspicious first."""
        first = self.first
        if first is None:
            found = self._nearest()
        elif first.mask:
            found = self._of_mask(first)
        else:
            found = self._of_number(first)
        places = ((place, why) for place, why in found.items() if place)
        return [Line.at(place, why) for place, why in itertools.islice(places, LINES)]

    def _of_mask(self, suspect: Suspect) -> dict[str, str]:
        made = mask_of(suspect.index, self.operations, self.values)
        applied = self._source(suspect.index)
        makes = f"makes a mask that {self.original} does not have"
        own: dict[str, str] = {}
        unproven: dict[str, str] = {}
        calls: dict[str, str] = {}
        for i in reversed(made):
            source, frame = self._source(i), self._frame(i)
            if frame == source != applied:
                own[frame] = makes
            elif frame and frame != source:
                calls[frame] = CALLS_MASK
                if self._frame(i, self._idle(i)) == source != applied:
                    unproven[source] = makes + IDLE
        found = own | {f: why for f, why in unproven.items() if f not in own}
        return found | {f: why for f, why in calls.items() if f not in found} | {applied: APPLIES}

    def _idle(self, index: int) -> Callable[[int], bool]:
        """Return a test for operations whose correct result does not prove their code correct.

        The test takes the index of another call of the code of operation `index`. It is true if a
        mask that varies in operation `index` does not vary in the other call: whatever the code
        does with that mask, the result of the other call may be correct.
        """
        here = self._masks(index)

        def idle(other: int) -> bool:
            there = self._masks(other)
            return any(a and not b for a, b in zip(here, there, strict=False))

        return idle

    def _masks(self, index: int) -> list[bool]:
        """Return, for the result of an operation and each operand, whether it is a varying mask.

        A varying mask is a boolean array with both values.
        """
        values = [self.values.get(i) for i in (index, *self.operations[index].parents)]
        return [x is not None and x.dtype.kind == "b" and not x.all() and bool(x.any())
                for x in values]  # fmt: skip

    def _of_number(self, suspect: Suspect) -> dict[str, str]:
        frame, source = self._frame(suspect.index), self._source(suspect.index)
        callers = self.operations[suspect.index].source[1:CALLERS]
        why = f"first operation whose result {self.original} does not compute"
        partly = next((s for s in self.suspects if self._is_partly(s)), None)
        if not suspect.partly and len(self.suspects) > 1:
            last = self._source(self.suspects[-1].index)
            why += f": the bug is in it or in a later operation, up to {last}"
        if callers:
            why += f"; called from {', '.join(callers)}"
        found = {frame: CALLS} | {source: why}
        if partly is not None:
            found.setdefault(self._source(partly.index), PARTLY)
        # In order of execution: what is wrong as a whole early on makes the rest wrong.
        for other in self.suspects:
            if other.index < suspect.index:
                before = f"runs before it, in a computation that {self.original} does not do"
                found.setdefault(self._source(other.index), before)
        return found

    def _nearest(self) -> dict[str, str]:
        why = (
            f"near the end of the stage: {self.original} computes each of its numbers too, so "
            "something is missing after it, or numbers are in a wrong place"
        )
        return {self._source(i): why for i in sorted(self.operations, reverse=True)}

    def _source(self, index: int) -> str:
        return next(iter(self.operations[index].source), "")

    def _frame(self, index: int, idle: Callable[[int], bool] = lambda index: False) -> str:
        """Return the source line that distinguishes an operation from correct runs of its code.

        If the same code is correct when called from another line, the line of the wrong call is
        returned. If the code is correct nowhere, the operation's own line is returned. The result
        is empty if a correct run has the same call stack, as another iteration of a loop has.

        Args:
            index: index of the operation.
            idle: returns whether an operation, given by its index, would be correct in any case;
                such operations are ignored.
        """
        operation = self.operations[index]
        fine = (self.operations[i] for i in self.fine if not idle(i))
        same = [
            other.source
            for other in (*fine, *self.beside)
            if other.primitive == operation.primitive and other.source[:1] == operation.source[:1]
        ]
        if not same:
            return self._source(index)
        # A line may compute several results, of which some are right in the same call.
        same = [source for source in same if source != operation.source] or same
        for depth, frame in enumerate(operation.source):
            same = [source for source in same if source[depth : depth + 1] == (frame,)]
            if not same:
                return frame
        return ""


def search(
    operations: Mapping[int, Operation],
    values: Mapping[int, np.ndarray],
    seen: Seen,
    original: str = "the original",
    beside: Sequence[Operation] = (),
) -> Search:
    """Search for each number (element of a result) of a program among those of another; return
    which operations have results with numbers that the other program lacks.

    Args:
        operations: by index, in order of execution; the last one is known to be wrong.
        values: results of the operations in float64, by index.
        seen: the numbers of the other program, computed from the same inputs.
        original: name of the other program in messages.
        beside: operations of stages that are correct; their source lines are taken to be right.
    """
    wrong = {i: _wrong(i, operations, values, seen) for i in operations}
    right = {
        i: w is not None and not w.wrong.any() and _telling(values[i]) for i, w in wrong.items()
    }
    right[max(operations)] = False
    # A maximum over wrongly masked values can still be correct, so it does not clear the mask.
    masks = {i for i, w in wrong.items() if w is not None and w.mask and w.wrong.any()}
    children: dict[int, list[int]] = {i: [] for i in operations}
    for i, operation in operations.items():
        for parent in operation.parents:
            if parent in children:
                children[parent].append(i)
    leads: dict[int, bool] = {}
    for i in sorted(operations, reverse=True):
        leads[i] = any(c not in masks and (right[c] or leads[c]) for c in children[i])
    fine = frozenset(i for i in operations if i not in masks and (leads[i] or right[i]))
    found = (w for w in wrong.values() if w is not None and w.wrong.any())
    left = tuple(w for w in found if w.index not in fine)
    return Search(operations, values, left, fine, original, tuple(beside))


def mask_of(
    index: int, operations: Mapping[int, Operation], values: Mapping[int, np.ndarray]
) -> list[int]:
    """Return, sorted, the indices of the operations with boolean results that the mask of operation
    `index`, a `select_n`, depends on."""
    inside: set[int] = set()
    waiting = [p for p in operations[index].parents if p in values]
    while waiting:
        i = waiting.pop()
        if i not in inside and values[i].dtype.kind == "b":
            inside.add(i)
            waiting += [p for p in operations[i].parents if p in values]
    return sorted(inside)


def _wrong(
    index: int, operations: Mapping[int, Operation], values: Mapping[int, np.ndarray], seen: Seen
) -> Suspect | None:
    # NumPy returns scalars for results computed from 0-d arrays.
    array = np.atleast_1d(values[index])
    if array.dtype.kind != "f":
        return None
    operation = operations[index]
    if operation.primitive == SELECT and (np.abs(array) >= MASKING).any():
        kept = np.abs(array) < MASKING
        source = [
            values[p]
            for p in operation.parents
            if p in values and values[p].shape == array.shape and values[p].dtype.kind == "f"
        ]
        whole = next((x for x in source if (x[kept] == array[kept]).all()), None)
        if whole is not None:
            masked = seen.wrongly_masked(kept, whole)
            if masked is not None and masked.any():
                return Suspect(index, masked, mask=True)
    wrong = seen.unseen(array)
    right = _judged(array) & ~wrong
    computed = right & ~_of_operands(index, operations, values)
    return Suspect(index, wrong, bool(right.any()), bool(computed.any()))


def _of_operands(
    index: int, operations: Mapping[int, Operation], values: Mapping[int, np.ndarray]
) -> np.ndarray:
    """Return which elements of a result are also elements of an operand, as booleans.

    Such an element is no evidence that the operation is right. For example, the first token attends
    to itself alone, so its result is its value, whatever the scores are.
    """
    array = np.atleast_1d(values[index])
    parts = (_parts(values[p]) for p in operations[index].parents if p in values)
    operands = _sorted([part[np.abs(part) < MASKING] for part in parts])
    return _near(operands, array, _reach(array))


def _judged(array: np.ndarray) -> np.ndarray:
    # A masked element is a whole number too, as any of that magnitude.
    return np.asarray(array != np.round(array))


def _parts(array: np.ndarray) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype.kind == "c":
        return np.concatenate([np.real(array).reshape(-1), np.imag(array).reshape(-1)])
    return array.reshape(-1).astype(np.float64)


def _sorted(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.unique(np.concatenate(arrays)) if arrays else np.zeros(0)


def _reach(array: np.ndarray) -> float:
    finite = array[np.abs(array) < MASKING]
    return SAME * float(np.sqrt(np.mean(np.square(finite)))) if finite.size else 0.0


def _near(numbers: np.ndarray, array: np.ndarray, reach: float) -> np.ndarray:
    """Return as booleans which elements of `array` differ from one of `numbers` by at most `reach`.

    `reach` is an absolute difference; `numbers` must be ascending.
    """
    if not numbers.size:
        return np.zeros(np.shape(array), bool)
    at = np.searchsorted(numbers, array)
    below, above = (np.clip(i, 0, numbers.size - 1) for i in (at - 1, at))
    apart = np.minimum(np.abs(array - numbers[below]), np.abs(array - numbers[above]))
    return apart <= reach


def _telling(array: np.ndarray) -> bool:
    """Return whether an array has enough distinct values to be identified by them."""
    values = array[np.abs(array) < MASKING]
    return np.unique(values).size >= FEWEST
