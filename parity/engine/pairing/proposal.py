"""Proposal: pairs of parameters guessed from names and shapes, before a port has any weights.

Single parameters with compatible shapes are paired by name first, then stacked, fused and split
ones. Layouts follow from the shapes, and for square matrices from conventions.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from parity.engine.pairing import naming
from parity.engine.pairing.constructions import Construction, Part, cut, laid_out
from parity.engine.pairing.conventions import Conventions, nearness
from parity.engine.pairing.layouts import Layout, Shape, transposition
from parity.engine.pairing.parameter_pairs import Matching, Means, Pair, Unmatched
from parity.engine.pairing.value_search import of_parts, part_of

Shapes = dict[str, Shape]
Pieces = list[tuple[str, Part, Layout]]
ROUNDS = 3
"""Number of rounds of assignment, each using the pairs of the previous one; two usually suffice."""
# Equal numbers, or no numbers on both sides, count 1. Less means another layer or no common word.
LEAST = 1.0
"""Name similarity below which a pair is proposed only if no other pair of either parameter has
compatible shapes."""
# At most a fifth of the words is shared then, and no other pair supports it.
UNSURE = 1.2
"""Name similarity, including support by other pairs, below which a pair is marked as unsure."""
FITS = 0.3
"""Score of shapes that are equal up to a permutation; shapes that must be reshaped score half."""
# Query, key, value and a gate.
MOST_PARTS = 4
"""Largest number of parameters that are fused into one; families (names that differ in numbers) may
be larger."""
SECOND_COPY = "a second copy"
"""Note on a second use of an original."""
ORDER = ("query", "key", "value", "gate", "up")
"""Assumed order of the parts in a fused parameter; shapes do not show it."""


def propose(original: Mapping[str, np.ndarray], port: Mapping[str, np.ndarray]) -> Matching:
    """Propose a construction of each of the port's parameters, from names and shapes alone.

    Args:
        original: the original's parameters by dotted path; only their shapes are read.
        port: the port's parameters by dotted path; only their shapes are read.
    """
    shapes_o = {name: tuple(x.shape) for name, x in original.items()}
    shapes_p = {name: tuple(x.shape) for name, x in port.items()}
    singles, notes = _singles(shapes_o, shapes_p)
    conventions = Conventions(singles, shapes_o, shapes_p)
    made = {
        p: laid_out(o, conventions.layout(o, p, shapes_o[o], shapes_p[p]))
        for p, o in singles.items()
    }
    for step in (_families, _siblings, _copies):
        for p, construction, note in step(shapes_o, shapes_p, made, conventions):
            made[p], notes[p] = construction, note
    used = {name for construction in made.values() for name in construction.parameters}
    return Matching(
        tuple(
            Pair(name, made[name], Means.PROPOSAL, notes.get(name, ""))
            for name in port
            if name in made
        ),
        tuple(Unmatched(name, shapes_o[name]) for name in original if name not in used),
        tuple(Unmatched(name, shapes_p[name]) for name in port if name not in made),
    )


def _likeness(
    originals: Sequence[str], ports: Sequence[str], known: Mapping[str, Construction]
) -> np.ndarray:
    pairs = [(o, p) for p, construction in known.items() for o in construction.parameters]
    return naming.similarity(originals, ports) + naming.context(originals, ports, pairs)


def _singles(shapes_o: Shapes, shapes_p: Shapes) -> tuple[dict[str, str], dict[str, str]]:
    """Return the originals proposed for single parameters, and notes on unsure pairs.

    Both are by the port's name. Each original is used at most once.
    """
    names, ports = list(shapes_o), list(shapes_p)
    shapes = _allowed([shapes_o[n] for n in names], [shapes_p[n] for n in ports])
    words = naming.similarity(names, ports)
    lonely = np.isfinite(shapes)
    rows, columns = ({name: n for n, name in enumerate(side)} for side in (names, ports))
    known: dict[str, str] = {}
    likeness = words
    for _ in range(ROUNDS):
        before, known = known, {}
        for i, j in naming.assignment(likeness + FITS * shapes):
            if likeness[i, j] >= LEAST or lonely[i].sum() == lonely[:, j].sum() == 1:
                known[ports[j]] = names[i]
        if known == before:
            break
        likeness = words + naming.context(names, ports, [(o, p) for p, o in known.items()])
        for p, o in known.items():
            # A pair is no evidence for itself: it would be confirmed whatever the others say.
            i, j = rows[o], columns[p]
            likeness[i, j] = words[i, j] + _support(o, p, known)
    return known, {
        p: "unsure: the names have little in common"
        for p, o in known.items()
        if likeness[rows[o], columns[p]] < UNSURE
    }


def _support(original: str, port: str, known: Mapping[str, str]) -> float:
    """Return how well a pair fits the other known pairs, itself excluded (`naming.context`)."""
    others = [(o, p) for p, o in known.items() if p != port]
    return float(naming.context([original], [port], others)[0, 0])


def _allowed(sources: list[Shape], targets: list[Shape]) -> np.ndarray:
    """Return the score of shapes, (sources, targets): 1, 0.5, or -inf (`conventions.nearness`)."""
    rows, columns = ({shape: i for i, shape in enumerate(dict.fromkeys(s))} for s in
                     (sources, targets))  # fmt: skip
    table = np.array([[nearness(a, b) for b in columns] for a in rows]).reshape(len(rows), -1)
    return table[np.ix_([rows[s] for s in sources], [columns[s] for s in targets])]


Step = Iterator[tuple[str, Construction, str]]
"""Proposals: name of the port's parameter, its construction, and a note."""


def _families(
    shapes_o: Shapes, shapes_p: Shapes, made: dict[str, Construction], conventions: Conventions
) -> Step:
    """Propose stacks: parameters whose extra first axis counts the members of a family.

    A family is a group of names that differ in numbers only. The stack may be on either side.
    """
    for port_is_whole in (True, False):
        rest_o, rest_p = _rest(shapes_o, shapes_p, made)
        wholes, parts = (rest_p, rest_o) if port_is_whole else (rest_o, rest_p)
        groups = [group for group in naming.families(parts) if len({parts[n] for n in group}) == 1]
        if not groups or not wholes:
            continue
        heads = [group[0] for group in groups]
        rows, columns = (heads, list(wholes)) if port_is_whole else (list(wholes), heads)
        likeness = _likeness(rows, columns, made)
        likeness = likeness if port_is_whole else likeness.T
        for (i, group), (j, name) in itertools.product(enumerate(groups), enumerate(wholes)):
            shape = wholes[name]
            fits = shape and shape[0] == len(group)
            if not fits or not math.isfinite(nearness(parts[group[0]], shape[1:])):
                likeness[i, j] = -math.inf
        used: set[str] = set()
        for i, j in naming.assignment(likeness):
            name, group = list(wholes)[j], groups[i]
            if used.isdisjoint(group):
                used.update(group)
                pieces = _stack(name, wholes[name], group, parts, conventions, port_is_whole)
                yield from _proposals(name, wholes[name], pieces, port_is_whole, "a stack")


def _stack(
    name: str,
    shape: Shape,
    group: Sequence[str],
    parts: Shapes,
    conventions: Conventions,
    port_is_whole: bool,
) -> Pieces:
    pieces = []
    for i, part in enumerate(group):
        names = (part, name) if port_is_whole else (name, part)
        shapes = (parts[part], shape[1:]) if port_is_whole else (shape[1:], parts[part])
        layout = conventions.layout(*names, *shapes)
        layout = layout.reversed if port_is_whole else layout
        unit = Layout((1, *layout.source), layout.before, layout.axes, layout.target)
        pieces.append((part, cut(shape, shape, 0, i, i + 1), unit))
    return pieces


def _siblings(
    shapes_o: Shapes, shapes_p: Shapes, made: dict[str, Construction], conventions: Conventions
) -> Step:
    """Propose fusions: parameters whose length on one axis is the sum of several others' lengths.

    The fused parameter may be on either side.
    """
    for port_is_whole in (True, False):
        rest_o, rest_p = _rest(shapes_o, shapes_p, made)
        wholes, parts = (rest_p, rest_o) if port_is_whole else (rest_o, rest_p)
        groups = list(_groups(parts))
        if not groups or not wholes:
            continue
        options = []
        for name, shape in wholes.items():
            fitting = [
                (group, pieces)
                for group in groups
                if (pieces := _join(name, shape, group, parts, conventions, port_is_whole))
            ]
            if not fitting:
                continue
            heads = [group[0] for group, _ in fitting]
            rows, columns = (heads, [name]) if port_is_whole else ([name], heads)
            likeness = _likeness(rows, columns, made).reshape(-1)
            options += [
                (-value, name, group, pieces)
                for value, (group, pieces) in zip(likeness.tolist(), fitting, strict=True)
            ]
        used: set[str] = set()
        for _, name, group, pieces in sorted(options, key=lambda option: option[0]):
            if name not in used and used.isdisjoint(group):
                used.update((name, *group))
                note = "fused; the order of the parts is a guess"
                yield from _proposals(name, wholes[name], pieces, port_is_whole, note)


def _groups(parts: Shapes) -> Iterator[tuple[str, ...]]:
    """Yield groups of parameters that may be fused, each in the assumed order of its parts.

    The parameters of a group are in sibling modules and share the last part of the name.
    """
    modules = defaultdict(list)
    for name in parts:
        modules[naming.parent(name, 2), naming.leaf(name)].append(name)
    for names in modules.values():
        names = sorted(names, key=_place)
        for count in range(2, min(len(names), MOST_PARTS) + 1):
            yield from itertools.combinations(names, count)


def _place(name: str) -> int:
    places = [ORDER.index(word) for word in naming.words(name) if word in ORDER]
    return places[-1] if places else len(ORDER)


def _join(
    name: str,
    shape: Shape,
    group: Sequence[str],
    parts: Shapes,
    conventions: Conventions,
    port_is_whole: bool,
) -> Pieces | None:
    """Return the pieces of a concatenation of `group` along the first axis on which the lengths of
    the parts add up to that of the fused parameter; None if there is no such axis."""
    for axis in range(len(shape)):
        pieces, at = [], 0
        for part in group:
            layout = _along(name, shape, part, parts[part], axis, conventions, port_is_whole)
            if layout is None:
                break
            place = cut(shape, shape, axis, at, at + layout.source[axis])
            pieces.append((part, place, layout))
            at += layout.source[axis]
        if len(pieces) == len(group) and at == shape[axis]:
            return pieces
    return None


def _along(
    name: str,
    shape: Shape,
    part: str,
    own: Shape,
    axis: int,
    conventions: Conventions,
    port_is_whole: bool,
) -> Layout | None:
    """Return the layout from a part's place in the fused parameter to the part; None if the shapes
    do not allow one.

    Args:
        name: name of the fused parameter.
        shape: shape of the fused parameter.
        part: name of the part.
        own: shape of the part.
        axis: axis of the fused parameter along which the parts follow one another.
        conventions: axis orders by name.
        port_is_whole: whether the fused parameter is the port's rather than the original's.
    """
    length, remainder = divmod(math.prod(own) * shape[axis], math.prod(shape))
    inside = (*shape[:axis], length, *shape[axis + 1 :])
    if remainder or not length:
        return None
    names, shapes = (
        ((part, name), (own, inside)) if port_is_whole else ((name, part), (inside, own))
    )
    layout = transposition(shapes[0], conventions.axes(*names, *shapes))
    if layout.target != shapes[1]:
        return None
    return layout.reversed if port_is_whole else layout


def _copies(
    shapes_o: Shapes, shapes_p: Shapes, made: dict[str, Construction], conventions: Conventions
) -> Step:
    """Propose a second use of an original for unmatched parameters of the port.

    An example is an output head that the original ties to the embedding.
    """
    _, rest_p = _rest(shapes_o, shapes_p, made)
    names = list(shapes_o)
    for port, shape in rest_p.items():
        likeness = _likeness(names, [port], made)[:, 0]
        likeness = likeness + FITS * _allowed([shapes_o[n] for n in names], [shape])[:, 0]
        best = int(likeness.argmax())
        if likeness[best] >= LEAST + FITS:
            layout = conventions.layout(names[best], port, shapes_o[names[best]], shape)
            yield port, laid_out(names[best], layout), SECOND_COPY


def _rest(
    shapes_o: Shapes, shapes_p: Shapes, made: Mapping[str, Construction]
) -> tuple[Shapes, Shapes]:
    used = {name for construction in made.values() for name in construction.parameters}
    return (
        {name: shape for name, shape in shapes_o.items() if name not in used},
        {name: shape for name, shape in shapes_p.items() if name not in made},
    )


def _proposals(name: str, shape: Shape, pieces: Pieces, port_is_whole: bool, note: str) -> Step:
    if port_is_whole:
        yield name, of_parts(shape, pieces), note
    else:
        for part, place, layout in pieces:
            yield part, part_of(name, place, layout), note
