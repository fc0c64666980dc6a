"""Float64 runs of both sides that start from the same numbers.

A port may hold the sum of two biases, rounded to float32, and both sides may hold one table that
was made in float32. Neither is a difference between the programs, so neither may widen the
tolerance of what follows. Source: docs/your-own-port.md "What a tolerance is made of".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from parity.engine.pairing.parameter_pairs import Matching
from parity.engine.programs.exits import exits_named
from parity.sides.side import HoldsTables, Side, TakesExactParameters


def exact_sums(
    matching: Matching, original: Mapping[str, np.ndarray], side: Side
) -> dict[str, np.ndarray]:
    """Return the port's parameters that are sums, added in float64, by name.

    Empty if the port's side cannot run with them.

    Args:
        matching: the pairs of parameters.
        original: the original's parameters by name.
        side: the port's side.
    """
    if not isinstance(side, TakesExactParameters):
        return {}
    sums = [
        pair
        for pair in matching.pairs
        if pair.construction.adds and (pair.is_equal or pair.is_reordered)
    ]
    used = {name: np.asarray(original[name], np.float64) for p in sums for name in p.originals}
    return {pair.port: pair.construction.from_original(used) for pair in sums}


@dataclass(frozen=True)
class SharedTables:
    """Both sides, with the tables that both hold bit for bit exempt from perturbation."""

    original: Side
    port: Side
    of_original: frozenset[str]
    """Names of the original's parameters that are tables of the port."""
    of_port: frozenset[str]
    """Names of the port's parameters that are tables of the original."""


def shared_tables(
    original: Side, port: Side, parameters: Sequence[Mapping[str, np.ndarray]]
) -> SharedTables:
    """Find the tables that both sides hold bit for bit.

    Args:
        original: the original's side.
        port: the port's side.
        parameters: the parameters of the original and of the port, by name. A table of one side may
            be a parameter of the other.

    Raises:
        SideError: the program of a side cannot be traced.
        ExitError: the code of a side ended the program.
    """
    ours, theirs = _tables(port, "port"), _tables(original, "original")
    of_original = frozenset(name for name, x in parameters[0].items() if _partners(x, ours))
    of_port = frozenset(name for name, x in parameters[1].items() if _partners(x, theirs))
    theirs_too = [*theirs, *(parameters[0][name] for name in of_original)]
    if shared := [x for x in ours if _partners(x, theirs_too)]:
        assert isinstance(port, HoldsTables)
        port = port.sharing(shared)
    ours_too = [*ours, *(parameters[1][name] for name in of_port)]
    if shared := [x for x in theirs if _partners(x, ours_too)]:
        assert isinstance(original, HoldsTables)
        original = original.sharing(shared)
    return SharedTables(original, port, of_original, of_port)


def _tables(side: Side, whose: str) -> list[np.ndarray]:
    """Return the tables of a side; none if it cannot list them. `whose` is for messages."""
    if not isinstance(side, HoldsTables):
        return []
    with exits_named(f"the {whose} ({side.kind})"):
        return side.tables()


def _partners(table: np.ndarray, others: Sequence[np.ndarray]) -> bool:
    """Whether one of `others` has the numbers of a table, or one begins with the rows of the other.

    Rows may be missing at the end: a table for the longest sequence against one for this sequence.
    """
    return any(_same_rows(table, other) for other in others)


def _same_rows(one: np.ndarray, other: np.ndarray) -> bool:
    one, other = np.squeeze(one), np.squeeze(other)
    if min(one.size, other.size) < 2 or one.ndim != other.ndim or one.shape[1:] != other.shape[1:]:
        return False
    rows = min(len(one), len(other))
    return np.array_equal(one[:rows], other[:rows])
