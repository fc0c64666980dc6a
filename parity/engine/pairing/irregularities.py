"""Irregularities: equal values in the wrong place, which matching by value alone would accept.

Examples are a kernel that is not transposed although its neighbours are, the weights of another
layer, and query and key exchanged. All hold values of the original, and all are converter bugs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from parity.engine.pairing import naming
from parity.engine.pairing.layouts import Layout
from parity.engine.pairing.parameter_pairs import Pair

ENOUGH = 3
"""Fewest pairs of one kind among which a differing one counts as an exception."""
MAJORITY = 0.75
"""Fraction of the pairs of one kind that establishes the rule."""
GAIN = 0.3
"""Gain in name similarity by exchanging the originals of two pairs above which they are reported as
exchanged: the word `query` against `key` in two names of five words gains 0.5."""


def irregularities(pairs: Sequence[Pair]) -> dict[str, str]:
    """Return notes on pairs of one whole parameter each that look wrong, by the port's name."""
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
    """Return notes on pairs whose layout differs from that of pairs with similar names."""
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
                # A vector, or a matrix with one side of 1, has only one layout. Where an axis has
                # length 1 the layout has fewer axes and cannot be compared.
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
    """Return notes on pairs whose names fit better with their originals exchanged."""
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


def _move(pair: Pair) -> tuple[int, ...]:
    """Return the permutation of axes of a layout, without sizes."""
    return pair.construction.pieces[0].layout.axes


def _text(axes: tuple[int, ...]) -> str:
    shape = tuple(range(2, 2 + len(axes)))
    return Layout(shape, shape, axes, tuple(shape[axis] for axis in axes)).text()
