"""Finds the first operation of a program that another program does not perform.

The operations between two stages (named intermediates) have no names. So the result of each
operation is searched for among all arrays that the other program computes, with elements in any
order. Source: docs/your-own-port.md "Where it starts".
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from parity.engine.measure.metrics import relative_l2
from parity.engine.programs.jaxprs import aval, is_hidden

LIBRARIES = ("jax", "jaxlib", "flax", "equinox", "jaxtyping", "beartype")
"""Packages whose source lines are never reported as source lines of an operation."""
MASKING = 1e30
"""Magnitude from which a number counts as a mask, that is, stands for minus infinity."""
SMALLEST_MASK = 16
"""Smallest number of elements of an array with two distinct values that counts as a mask."""
NARROWEST = 4
"""Bytes per element of float32; floating-point dtypes with fewer bytes count as narrow."""
FEWEST = 3
"""Smallest number of distinct values by which an array can be identified; masks and constants have
fewer."""


@dataclass(frozen=True)
class Operation:
    """An evaluated equation of a jaxpr."""

    primitive: str
    """Name of the JAX primitive."""
    source: tuple[str, ...]
    """`file:line (function)` of the frames outside of libraries, innermost first."""
    parents: tuple[int, ...]
    """Indices of the operations that computed the operands of this operation."""
    mark: str | None = None
    """Name of the mark (`checkpoint_name`); None if the operation is no mark."""
    fed: bool = False
    """Whether the value of the mark was replaced by the other program's value."""
    narrow: bool = False
    """Whether the program computes the result in a dtype narrower than float32."""


Place: TypeAlias = tuple[int, ...]
"""Key of one execution of a condition or loop: the `id` of each call around it and the iteration of
each loop, then its own `id`."""


@dataclass
class Recorder:
    """Records the operations of one evaluation and their results.

    `_producers` has the index of the operation that computed each array, by the array's `id`.
    """

    courses: Mapping[Place, int] = field(default_factory=dict)
    """Branches taken by conditions and numbers of iterations of while loops, by `Place`. Operations
    inside a condition or while loop are recorded only if that condition or loop is listed here."""
    operations: list[Operation] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    """First result of each operation."""
    asked: dict[Place, tuple[int, Any]] = field(default_factory=dict)
    """For each condition or while loop that is not in `courses`: the index of its operation, and
    its branch or number of iterations, known once the evaluation has run."""
    times: int = 1
    """Number of times that the next operation runs: the product of the numbers of iterations of the
    loops around it."""
    _producers: dict[int, int] = field(default_factory=dict)
    _alive: list[Any] = field(default_factory=list)
    _calls: list[JaxprEqn] = field(default_factory=list)
    _path: list[int] = field(default_factory=list)

    def enter(self, call: JaxprEqn) -> None:
        """Record that the following operations are inside this call."""
        self._calls.append(call)
        self._path.append(id(call))

    def leave(self) -> None:
        """Record the end of the innermost call."""
        self._calls.pop()
        self._path.pop()

    @contextlib.contextmanager
    def turn(self, number: int, turns: int) -> Iterator[None]:
        """Within this context, operations are in iteration `number` of the innermost loop, which
        has `turns` iterations."""
        self._path.append(number)
        before, self.times = self.times, self.times * turns
        yield
        self._path.pop()
        self.times = before

    def course_of(self, eqn: JaxprEqn) -> int | None:
        """Return the branch or number of iterations of a condition or loop; None if unknown."""
        return self.courses.get((*self._path, id(eqn)))

    def ask(self, eqn: JaxprEqn, value: Any) -> None:
        """Record the branch or number of iterations of a condition or loop (`value`), unless it is
        in `courses`; call it before `note`."""
        place = (*self._path, id(eqn))
        if place not in self.courses:
            self.asked[place] = len(self.operations), value

    def note(
        self,
        eqn: JaxprEqn,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        mark: str | None = None,
        fed: bool = False,
    ) -> None:
        """Record an evaluated equation.

        Args:
            eqn: the equation.
            inputs: its operands.
            outputs: its results.
            mark: name of the mark (named intermediate), if the equation is one.
            fed: whether the mark's value was replaced.
        """
        index = len(self.operations)
        parents = [p for x in inputs if (p := self._producers.get(id(x))) is not None]
        source: tuple[str, ...] = ()
        for frames in map(source_of, (*self._calls, eqn)):
            # Inside a compiled function, JAX reports the frames up to the function's call only.
            source = tuple(dict.fromkeys((*frames, *source)))
        known = tuple(dict.fromkeys(i for p in parents for i in self._behind(p)))
        self.operations.append(
            Operation(eqn.primitive.name, source, known, mark, fed, _is_narrow(eqn))
        )
        self.values.append(outputs[0] if outputs else None)
        # Keep the objects alive: Python could reuse the identity of a deleted one.
        self._alive += [*inputs, *outputs]
        self._producers |= {id(x): index for x in outputs}

    def _behind(self, index: int) -> tuple[int, ...]:
        """Return the operations to record as parents of an operation that reads the result of
        operation `index`: usually `index` alone.

        A mark (named intermediate) that was not replaced passes on its operand, so the operation
        that computed the operand is returned instead: `window` leaves marks out, which would cut
        off an operation after the mark from those before it.
        """
        operation = self.operations[index]
        passed_on = operation.mark is not None and not operation.fed
        return operation.parents if passed_on else (index,)

    def producer(self, value: Any) -> int | None:
        """Return the index of the operation that computed a value; None if unknown."""
        return self._producers.get(id(value))

    def window(self, last: int) -> list[int]:
        """Return, sorted, the indices of operation `last` and of all it depends on, back to
        replaced marks (named intermediates).

        Replaced marks hold correct values. Marks that were not replaced may be wrong, so the
        operations before them are included; the marks themselves are not.
        """
        inside: set[int] = set()
        waiting = [last]
        while waiting:
            index = waiting.pop()
            if index in inside:
                continue
            inside.add(index)
            if index == last or not self.operations[index].fed:
                waiting += self.operations[index].parents
        return sorted(i for i in inside if i == last or self.operations[i].mark is None)

    def beside(self, stages: Collection[str]) -> list[Operation]:
        """Return the operations that belong to none of the given stages and are no marks.

        An operation belongs to a stage if it is in the `window` of the stage's value.
        """
        inside: set[int] = set()
        for operation in self.operations:
            if operation.mark in stages and operation.parents:
                inside.update(self.window(operation.parents[0]))
        return [o for i, o in enumerate(self.operations) if i not in inside and o.mark is None]


@dataclass(frozen=True)
class Unknown:
    """An operation that the other program does not perform."""

    source: tuple[str, ...] = ()
    """Source lines of the operation, innermost first."""
    mask: tuple[str, ...] = ()
    """Source lines that compute the mask which the operation applies, if the other program lacks
    that mask."""


def first_unknown(
    operations: Mapping[int, Operation],
    values: Mapping[int, np.ndarray],
    known: Iterable[np.ndarray],
    same: float,
) -> Unknown | None:
    """Return the first operation whose result the other program does not compute, and on whose
    result no later result depends that the other program does compute.

    If a result that the other program has depends on an operation's result, the operation is part
    of a different algorithm for the same result. An operation that explains a later unknown result
    (`_implicated`) is preferred to earlier ones that do not. None if no such operation has source
    lines.

    Args:
        operations: by index, in order of execution; the last one is known to be wrong.
        values: results of the operations, by index.
        known: all arrays that the other program computed.
        same: relative L2 difference up to which two results are equal.
    """
    index = _Known(known, same)
    last = max(operations)
    matches = {i: index.has(x) for i, x in values.items()} | {last: False}
    children: dict[int, list[int]] = {i: [] for i in operations}
    for i, operation in operations.items():
        for parent in operation.parents:
            if parent in children:
                children[parent].append(i)
    telling = {i: _telling(x) for i, x in values.items()}
    leads: dict[int, bool] = {}
    for i in sorted(operations, reverse=True):
        turns = {c for c in children[i] if _is_slice(i, c, operations, values)}
        below = [c for c in children[i] if telling[c] or leads[c]]
        # An array that a loop reads is right if it is right in every iteration: the first state of
        # a recurrence, for example, shows nothing about the factors of the states after it.
        leads[i] = any(matches[c] or leads[c] for c in below if c not in turns) or (
            any(c in turns for c in below)
            and all(matches[c] or leads[c] for c in turns if c in below)
        )
    unknown = [i for i in sorted(operations) if not matches[i] and not leads[i]]
    named = [i for i in unknown if telling[i] and operations[i].source]
    if not named:
        return None
    first = next((i for i in named if _implicated(i, operations, children, {*named})), named[0])
    masks = _ancestors(first, operations, lambda i: _is_mask(values[i]) and not matches[i])
    lines = (operations[i].source[0] for i in sorted(masks) if operations[i].source)
    return Unknown(operations[first].source, tuple(dict.fromkeys(lines)))


def _is_slice(
    parent: int, child: int, operations: Mapping[int, Operation], values: Mapping[int, np.ndarray]
) -> bool:
    """Return whether the result `child` is the slice of the array `parent` that one iteration of a
    `jax.lax.scan` reads; both are indices of operations."""
    return operations[child].primitive == "scan" and values[child].size < values[parent].size


def _implicated(
    index: int,
    operations: Mapping[int, Operation],
    children: Mapping[int, Sequence[int]],
    unknown: Collection[int],
) -> bool:
    """Return whether an unknown result alone explains an unknown result computed from it.

    Unknown results, given by index, are those that the other program does not compute. A result
    does not explain a later one that has another unknown operand. Example: the original adds two
    biases one after the other, so a port's sum of the biases is unknown, but not wrong. If the sum
    is added to a product that is unknown, the sum does not explain the wrong result.
    """
    below, waiting = {index}, [index]
    while waiting:
        for child in children[waiting.pop()]:
            if child in unknown and child not in below:
                below.add(child)
                waiting.append(child)
    used = [c for c in children[index] if c in unknown]
    return any(all(p not in unknown or p in below for p in operations[c].parents) for c in used)


def common_frame(operations: Iterable[Operation]) -> str:
    """Return the innermost source line that all operations have in their call stack; "" if there is
    none.

    Operations without source lines are ignored.
    """
    sources = [operation.source for operation in operations if operation.source]
    inner, *others = sources or [()]
    return next((frame for frame in inner if all(frame in other for other in others)), "")


def first_narrow(operations: Mapping[int, Operation]) -> Unknown | None:
    """Return the first operation with a narrow result and a source line; None if there is none.

    Narrow: the program computes it in a floating dtype of fewer bytes than float32.
    """
    found = (operations[i].source for i in sorted(operations) if operations[i].narrow)
    source = next(filter(None, found), None)
    return None if source is None else Unknown(source)


def _is_narrow(eqn: JaxprEqn) -> bool:
    dtypes = (getattr(aval(v), "dtype", None) for v in eqn.outvars)
    return any(
        d is not None and jnp.issubdtype(d, jnp.floating) and d.itemsize < NARROWEST for d in dtypes
    )


def _ancestors(
    start: int, operations: Mapping[int, Operation], enter: Callable[[int], bool]
) -> set[int]:
    """Return the direct and indirect operands of `start`, as indices of operations.

    The search stops at operations that `enter` rejects; these are not included.
    """
    inside: set[int] = set()
    waiting = list(operations[start].parents)
    while waiting:
        i = waiting.pop()
        if i in operations and i not in inside and enter(i):
            inside.add(i)
            waiting += operations[i].parents
    return inside


class _Known:
    """Index for finding an array among others by its sorted values.

    An array also matches another array that repeats each of its values equally often. Masks, which
    have only two values, match if the fractions of the two values are equal.
    """

    def __init__(self, arrays: Iterable[np.ndarray], same: float) -> None:
        self.same = same
        self.values: list[np.ndarray] = []
        self.shares: set[tuple[float, ...]] = set()
        for array in arrays:
            if _is_mask(array):
                self.shares.add(_shares(array))
            elif _telling(array):
                self.values.append(_ordered(array))

    def has(self, array: np.ndarray) -> bool:
        if _is_mask(array):
            return _shares(array) in self.shares
        if not _telling(array):
            return False
        values = _ordered(array)
        return any(self._agree(*sorted((values, other), key=len)) for other in self.values)

    def _agree(self, fewer: np.ndarray, more: np.ndarray) -> bool:
        times, rest = divmod(more.size, fewer.size)
        if rest:
            return False
        left = more[times // 2 :: times]
        # No element differs by more than the norm of all differences, so one element that does
        # rules out nearly all unrelated arrays, without reading the others. The norm of `fewer` is
        # at most its largest magnitude times the root of its size; twice that leaves room for
        # rounding.
        most = 2 * self.same * max(abs(fewer[0]), abs(fewer[-1])) * math.sqrt(fewer.size)
        probes = (0, fewer.size // 2, -1)
        if any(abs(left[i] - fewer[i]) > most for i in probes):
            return False
        return relative_l2(left, fewer) <= self.same


def _ordered(array: np.ndarray) -> np.ndarray:
    """Return the sorted values of an array, float64, without masked ones (>= `MASKING` in
    magnitude)."""
    values = np.sort(np.asarray(array, np.float64), axis=None)
    return values[np.abs(values) < MASKING]


def _telling(array: np.ndarray) -> bool:
    """Return whether an array can be identified by its values.

    An array can if at least `FEWEST` of its floating-point numbers are distinct.
    """
    if array.dtype.kind != "f":
        return False
    values = _ordered(array)
    return values.size >= FEWEST and int(np.count_nonzero(np.diff(values))) >= FEWEST - 1


def _is_mask(array: np.ndarray) -> bool:
    return array.size >= SMALLEST_MASK and np.unique(array).size == 2


def _shares(array: np.ndarray) -> tuple[float, ...]:
    counts = np.unique(array, return_counts=True)[1]
    return tuple(sorted(round(float(count) / array.size, 9) for count in counts))


def source_of(eqn: JaxprEqn) -> tuple[str, ...]:
    """Return the source lines of an equation, innermost first, without those of libraries."""
    trace = eqn.source_info.traceback
    lines = []
    for frame in trace.frames if trace is not None else ():
        path = Path(frame.file_name)
        if _in_library(frame.file_name) or is_hidden(frame.file_name) or not path.is_file():
            continue
        line = f"{_short(path)}:{frame.line_num} ({frame.function_name})"
        if line not in lines:
            lines.append(line)
    return tuple(lines)


def source_of_error(error: BaseException) -> str:
    """Return the innermost source line at which an error was raised, as `file:line (function)`.

    Lines of libraries are skipped; empty if no line remains.
    """
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        path = Path(frame.f_code.co_filename)
        library = any(root in path.parents for root in _ERROR_ROOTS)
        if path.is_file() and not library:
            return f"{_short(path)}:{line} ({frame.f_code.co_qualname})"
    return ""


def _roots(packages: Sequence[str]) -> tuple[Path, ...]:
    specs = (importlib.util.find_spec(name) for name in packages)
    return tuple(Path(s.origin).parent for s in specs if s is not None and s.origin is not None)


# The code that evaluates a port also appears in its tracebacks.
_PARITY = Path(__file__).parents[2]
_ROOTS = (*_roots(LIBRARIES), *(_PARITY / room for room in ("engine", "sides", "port")))
# A torch program may raise errors from inside torch or NumPy.
_ERROR_ROOTS = (*_ROOTS, *_roots(("torch", "numpy")))


@functools.cache  # Large programs have a hundred thousand frames, in a few hundred files.
def _in_library(file_name: str) -> bool:
    return any(root in Path(file_name).parents for root in _ROOTS)


def _short(path: Path) -> Path:
    """Return a path relative to the deepest enclosing folder on the module search path.

    The current folder is considered too. The deepest one is taken because a virtual environment may
    lie inside the current folder. Unchanged if no such folder encloses the path.
    """
    roots = {Path.cwd(), *map(Path, sys.path)} & {*path.parents}
    nearest = max((root for root in roots if root.is_absolute()), default=None, key=_depth)
    return path if nearest is None else path.relative_to(nearest)


def _depth(path: Path) -> int:
    return len(path.parts)
