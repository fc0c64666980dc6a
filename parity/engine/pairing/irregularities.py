"""Irregularities: pairs with equal values that are probably conversion errors all the same.

Examples are a kernel that is not transposed although similar ones are, the weights of another
layer, and query and key exchanged. Matching by value alone would accept such pairs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from parity.engine.pairing import naming
from parity.engine.pairing.layouts import Layout
from parity.engine.pairing.parameter_pairs import Pair

ENOUGH = 3
"""Smallest number of similarly named pairs for which exceptions are reported."""
MAJORITY = 0.75
"""Smallest fraction of similarly named pairs whose common order of axes counts as the rule."""
# The words `query` and `key`, exchanged in two names of five words, gain 0.5.
GAIN = 0.3
"""Gain in name similarity above which two pairs are reported to have exchanged originals."""


def irregularities(pairs: Sequence[Pair]) -> dict[str, str]:
    """Return notes on pairs that are probably conversion errors, by name of the port's parameter.

    Only pairs of one whole parameter on either side are examined.
    """
    single = [
        pair
        for pair in pairs
        if len(pair.construction.pieces) == 1 and pair.construction.pieces[0].part.is_whole
    ]
    notes = exchanged(single)
    for port, note in unlike_others(single).items():
        notes[port] = "; ".join(filter(None, (notes.get(port), note)))
    return notes


def unlike_others(pairs: Iterable[Pair]) -> dict[str, str]:
    """Return notes, by name of the port's parameter, on pairs whose axes are permuted unlike those
    of the majority of the pairs with similar names."""
    kinds: dict[Hashable, list[Pair]] = defaultdict(list)
    for pair in pairs:
        ends = naming.leaf(pair.originals[0]), naming.leaf(pair.port)
        kinds[naming.pattern(pair.port)].append(pair)
        kinds[*ends, len(pair.construction.shape)].append(pair)
    notes = {}
    for members in kinds.values():
        (rule, count), *_ = Counter(map(_move, members)).most_common(1)
        if len(members) >= ENOUGH and count >= MAJORITY * len(members):
            for pair in members:
                # A vector, or a matrix with a side of 1, has only one layout. Layouts of different
                # numbers of axes (axes of length 1 are dropped) cannot be compared.
                move = _move(pair)
                if (
                    move != rule
                    and len(move) == len(rule)
                    and sum(n > 1 for n in pair.construction.shape) > 1
                ):
                    text = pair.construction.pieces[0].layout.text()
                    notes[pair.port] = f"{text}, where {count} of its kind are {_text(rule)}"
    return notes


def exchanged(pairs: Sequence[Pair]) -> dict[str, str]:
    """Return notes, by name of the port's parameter, on pairs whose names would fit better if two
    pairs exchanged their parameters of the original."""
    if len(pairs) < 2:
        return {}
    names, ports = [pair.originals[0] for pair in pairs], [pair.port for pair in pairs]
    likeness = naming.similarity(names, ports)
    own = np.diagonal(likeness)
    gain = likeness + likeness.T - own[:, None] - own[None]
    shapes = [(p.construction.pieces[0].layout.source, p.construction.shape) for p in pairs]
    kinds = {shape: i for i, shape in enumerate(dict.fromkeys(shapes))}
    kind = np.array([kinds[shape] for shape in shapes])
    # Tied parameters share one original, and exchanging equal names gains nothing.
    gain[kind[:, None] != kind[None]] = 0.0
    best = gain.argmax(axis=1)
    return {
        ports[i]: f"holds {names[i]}; by name it would be {names[j]}"
        for i, j in enumerate(best.tolist())
        if gain[i, j] > GAIN
    }


def placed_by_name(pairs: Sequence[Pair]) -> dict[str, str]:
    """Return which parameter of the original the name of a port's parameter suggests, where the
    port's parameter holds another one of the same shape; by name of the port's parameter.

    Only pairs of one whole parameter on either side, with equal values, are examined. Each
    parameter of the original is suggested at most once. The result is empty unless exchanging the
    originals of two pairs makes their names fit much better (`exchanged`).
    """
    single = [
        pair
        for pair in pairs
        if pair.is_equal
        and len(pair.construction.pieces) == 1
        and pair.construction.pieces[0].part.is_whole
    ]
    if not exchanged(single):
        return {}
    kinds: dict[Hashable, list[Pair]] = defaultdict(list)
    for pair in single:
        kinds[pair.construction.pieces[0].layout, pair.construction.shape].append(pair)
    found = {}
    for members in kinds.values():
        names, ports = [pair.originals[0] for pair in members], [pair.port for pair in members]
        assigned = naming.assignment(naming.similarity(names, ports))
        found |= {ports[j]: names[i] for i, j in assigned if names[i] != names[j]}
    return found


def _move(pair: Pair) -> tuple[int, ...]:
    """Return the permutation of axes in a pair's layout."""
    return pair.construction.pieces[0].layout.axes


def _text(axes: tuple[int, ...]) -> str:
    shape = tuple(range(2, 2 + len(axes)))
    return Layout(shape, shape, axes, tuple(shape[axis] for axis in axes)).text()
