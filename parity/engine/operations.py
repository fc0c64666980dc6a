"""Which operation of a program is the first that another program does not do, by their values.

Between two stages that both programs name there are operations that neither names. What one of them
computes can be looked for among everything the other computes, in whatever order its elements lie.
Source: docs/your-own-port.md "Where it starts".
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from parity.engine.jaxprs import aval
from parity.engine.metrics import relative_l2

LIBRARIES = ("jax", "jaxlib", "flax", "equinox", "jaxtyping", "beartype")
"""Packages whose lines are not the port's own."""
MASKING = 1e30
"""Magnitude from which a number stands for minus infinity."""
SMALLEST_MASK = 16
"""Elements that an array of two values needs to be taken for a mask."""
NARROWEST = 4
"""Bytes of what is no less than float32."""
FEWEST = 3
"""Distinct values that an array needs to be told from others: a mask or a constant has fewer."""


@dataclass(frozen=True)
class Operation:
    """An equation of a program that was evaluated."""

    primitive: str
    source: tuple[str, ...]
    """`file:line (function)` of the frames that are no library's, innermost first."""
    parents: tuple[int, ...]
    """Operations whose results it read."""
    mark: str | None = None
    """Of a mark, its name."""
    narrow: bool = False
    """Whether the program computes it in less than float32."""


@dataclass
class Recorder:
    """Notes the operations of one evaluation and what they computed."""

    operations: list[Operation] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    """The first floating result of each."""
    _producers: dict[int, int] = field(default_factory=dict)
    _alive: list[Any] = field(default_factory=list)
    _calls: list[JaxprEqn] = field(default_factory=list)

    def enter(self, call: JaxprEqn) -> None:
        """Note that what follows is inside of a call."""
        self._calls.append(call)

    def leave(self) -> None:
        """Note that the call has ended."""
        self._calls.pop()

    def note(
        self, eqn: JaxprEqn, inputs: Sequence[Any], outputs: Sequence[Any], mark: str | None = None
    ) -> None:
        """Note an operation."""
        parents = (self._producers.get(id(x)) for x in inputs)
        index = len(self.operations)
        source: tuple[str, ...] = ()
        for frames in map(source_of, (*self._calls, eqn)):
            # Inside of a compiled function JAX tells the frames up to its call only.
            source = tuple(dict.fromkeys((*frames, *source)))
        known = tuple(dict.fromkeys(p for p in parents if p is not None))
        self.operations.append(Operation(eqn.primitive.name, source, known, mark, _is_narrow(eqn)))
        self.values.append(outputs[0] if outputs else None)
        # An object that is let go could lend its identity to another.
        self._alive += [*inputs, *outputs]
        self._producers |= {id(x): index for x in outputs}

    def producer(self, value: Any) -> int | None:
        """Return the operation that computed a value."""
        return self._producers.get(id(value))

    def window(self, last: int) -> list[int]:
        """Return the operations between the marks before an operation and itself, in order."""
        inside: set[int] = set()
        waiting = [last]
        while waiting:
            index = waiting.pop()
            if index in inside:
                continue
            inside.add(index)
            if index == last or self.operations[index].mark is None:
                waiting += self.operations[index].parents
        return sorted(i for i in inside if i == last or self.operations[i].mark is None)

    def beside(self, stages: Collection[str]) -> list[Operation]:
        """Return the operations that are between no stage of these and the stages before it."""
        inside: set[int] = set()
        for operation in self.operations:
            if operation.mark in stages and operation.parents:
                inside.update(self.window(operation.parents[0]))
        return [o for i, o in enumerate(self.operations) if i not in inside and o.mark is None]


@dataclass(frozen=True)
class Unknown:
    """Where a program does what the other does not."""

    source: tuple[str, ...] = ()
    """Lines of the operation, innermost first."""
    mask: tuple[str, ...] = ()
    """Lines that make the mask it applies, where that is not the other's either, in order."""


def first_unknown(
    operations: Mapping[int, Operation],
    values: Mapping[int, np.ndarray],
    known: Iterable[np.ndarray],
    same: float,
) -> Unknown | None:
    """Return the first operation whose result is not among `known` and is not mended further on.

    An operation behind which something known is computed again was another way to the same.

    Args:
        operations: in the order in which they were done; the last one is known to be wrong.
        values: their results.
        known: everything the other program computed.
        same: relative L2 up to which two results are one.
    """
    index = _Known(known, same)
    last = max(operations)
    matches = {i: index.has(x) for i, x in values.items()} | {last: False}
    children: dict[int, list[int]] = {i: [] for i in operations}
    for i, operation in operations.items():
        for parent in operation.parents:
            if parent in children:
                children[parent].append(i)
    leads: dict[int, bool] = {}
    for i in sorted(operations, reverse=True):
        below = (c for c in children[i] if _telling(values[c]) or leads[c])
        leads[i] = any(matches[c] or leads[c] for c in below)
    unknown = (i for i in sorted(operations) if not matches[i] and not leads[i])
    first = next((i for i in unknown if _telling(values[i]) and operations[i].source), None)
    if first is None:
        return None
    masks = _ancestors(first, operations, lambda i: _is_mask(values[i]) and not matches[i])
    lines = (operations[i].source[0] for i in sorted(masks) if operations[i].source)
    return Unknown(operations[first].source, tuple(dict.fromkeys(lines)))


def first_narrow(operations: Mapping[int, Operation]) -> Unknown | None:
    """Return the first operation that the program computes in less than float32."""
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
    """Return the operations before one that are reached through such as `enter` accepts."""
    inside: set[int] = set()
    waiting = list(operations[start].parents)
    while waiting:
        i = waiting.pop()
        if i in operations and i not in inside and enter(i):
            inside.add(i)
            waiting += operations[i].parents
    return inside


class _Known:
    """Arrays by their values in order of size, each as often as another if they are repeated.

    A mask has two values, so masks are known by the share of each.
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
        return relative_l2(more[times // 2 :: times], fewer) <= self.same


def _ordered(array: np.ndarray) -> np.ndarray:
    """Return the values of an array in order of size, without those that only mask."""
    values = np.sort(np.asarray(array, np.float64), axis=None)
    return values[np.abs(values) < MASKING]


def _telling(array: np.ndarray) -> bool:
    """Whether an array can be told from others; indices say nothing about what is computed."""
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
    """Return the lines an equation comes from, innermost first, without those of libraries."""
    trace = eqn.source_info.traceback
    lines = []
    for frame in trace.frames if trace is not None else ():
        path = Path(frame.file_name)
        if _in_library(path) or not path.is_file():
            continue
        line = f"{_short(path)}:{frame.line_num} ({frame.function_name})"
        if line not in lines:
            lines.append(line)
    return tuple(lines)


def _roots(packages: Sequence[str]) -> tuple[Path, ...]:
    specs = (importlib.util.find_spec(name) for name in packages)
    return tuple(Path(s.origin).parent for s in specs if s is not None and s.origin is not None)


# What evaluates a port is on the way to its lines too.
_HERE = Path(__file__).parent
_ROOTS = (*_roots(LIBRARIES), _HERE, _HERE.parent / "sides", _HERE.parent / "port")


def _in_library(path: Path) -> bool:
    return any(root in path.parents for root in _ROOTS)


def _short(path: Path) -> Path:
    """Return a path below the current folder, or below one that modules are looked for in.

    Below the nearest of them: an environment may lie in the current folder.
    """
    roots = {Path.cwd(), *map(Path, sys.path)} & {*path.parents}
    nearest = max((root for root in roots if root.is_absolute()), default=None, key=_depth)
    return path if nearest is None else path.relative_to(nearest)


def _depth(path: Path) -> int:
    return len(path.parts)
