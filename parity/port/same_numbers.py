"""Float64 runs of both sides that start from the same numbers.

A port may hold the sum of two biases, rounded to float32, and both sides may hold one table that
was made in float32. Neither is a difference between the programs, so neither may widen the
tolerances of the stages computed from such numbers. Source: docs/your-own-port.md "What a tolerance
is made of".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from parity.engine.measure.arrays import Arrays
from parity.engine.measure.rounding_noise import UNIT_ROUNDOFF
from parity.engine.pairing.parameter_pairs import Matching
from parity.engine.programs.exits import exits_named
from parity.sides.side import HoldsTables, Side, TakesExactParameters


def exact_sums(
    matching: Matching, original: Mapping[str, np.ndarray], side: Side
) -> dict[str, np.ndarray]:
    """Return float64 values of the port's parameters that are sums of parameters of the original,
    by the port's name.

    Empty if the port's side cannot run with float64 parameters.

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


def without_shared_tables(
    original: Side, port: Side, parameters: Mapping[str, np.ndarray]
) -> tuple[Side, Side, frozenset[str]]:
    """Return both sides, changed so that neither perturbs tables that both hold bit for bit.

    Tables are constant arrays, such as rotary sines. Equal ones cause no difference, so they may
    not widen the tolerances.

    Args:
        original: the original's side.
        port: the port's side.
        parameters: the original's parameters by name; a table of the port may be one of them.

    Returns:
        The original's side, the port's side, and the names of the original's parameters that are
        tables of the port.

    Raises:
        SideError: the program of a side cannot be traced.
        ExitError: the code of a side ended the program.
    """
    ours, theirs = _tables(port, "port"), _tables(original, "original")
    held = frozenset(name for name, x in parameters.items() if _partners(x, ours))
    known = [*theirs, *parameters.values()]
    if shared := [x for x in ours if _partners(x, known)]:
        assert isinstance(port, HoldsTables)
        port = port.sharing(shared)
    if shared := [x for x in theirs if _partners(x, ours)]:
        assert isinstance(original, HoldsTables)
        original = original.sharing(shared)
    return original, port, held


def _tables(side: Side, whose: str) -> list[np.ndarray]:
    """Return the tables of a side; empty if the side cannot list its tables. `whose` is `original`
    or `port`, for messages."""
    if not isinstance(side, HoldsTables):
        return []
    with exits_named(f"the {whose} ({side.kind})"):
        return side.tables()


def _partners(table: np.ndarray, others: Sequence[np.ndarray]) -> bool:
    """Return whether an array of `others` equals a table in all rows that both have.

    One of the two may have rows for the longest sequence, the other for this sequence only.
    """
    return any(_same_rows(table, other) for other in others)


def _same_rows(one: np.ndarray, other: np.ndarray) -> bool:
    one, other = np.squeeze(one), np.squeeze(other)
    if min(one.size, other.size) < 2:
        return False
    rows = min(len(one), len(other))
    return np.array_equal(one[:rows], other[:rows])


ROUNDINGS = 4
"""Largest relative error of a multiplied element in `_is_scaled`, in unit roundoffs. The element
and the one from which the factor is read each have two: one for rounding the factor, and one for
rounding the product."""


def folded(
    names: Collection[str], port: Arrays, original: Arrays, missing: Collection[str]
) -> set[str]:
    """Return the names of the parameters into which an exporter folded one factor for each index of
    an axis, such as a norm's weight.

    A matrix or kernel counts if it equals the original's parameter of the same name times these
    factors, and the port lacks a vector of the original with as many elements as there are factors,
    such as the weight of the norm. Vectors in `names` of the module of such a matrix or kernel,
    for example its bias, count too.

    Args:
        names: parameters of the port with other values than the original's.
        port: parameters of the port, by name.
        original: parameters of the original, by name.
        missing: parameters of the original that the port lacks.
    """
    lengths = {original[name].size for name in missing if original[name].ndim == 1}
    known = [
        n for n in names if n in original and port[n].shape == original[n].shape and port[n].size
    ]
    scaled = {n for n in known if port[n].ndim > 1 and _is_scaled(port[n], original[n], lengths)}
    parents = {name.rpartition(".")[0] for name in scaled}
    return scaled | {n for n in known if port[n].ndim == 1 and n.rpartition(".")[0] in parents}


def _is_scaled(x: np.ndarray, y: np.ndarray, lengths: Collection[int]) -> bool:
    """Return whether `x` is `y` times one finite factor for each index of an axis whose length is
    in `lengths`.

    An axis with one element per index shows nothing: any values are a multiple there.
    """
    for axis in (i for i, n in enumerate(x.shape) if n in lengths and x.size > n):
        rows, others = (
            np.moveaxis(a, axis, 0).reshape(a.shape[axis], -1).astype(np.float64) for a in (x, y)
        )
        largest = np.abs(others).argmax(1)[:, None]
        with np.errstate(all="ignore"):
            factor = np.take_along_axis(rows, largest, 1) / np.take_along_axis(others, largest, 1)
            error = np.abs(rows - factor * others)
        if np.isfinite(factor).all() and (error <= ROUNDINGS * UNIT_ROUNDOFF * np.abs(rows)).all():
            return True
    return False
