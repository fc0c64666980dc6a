"""Proposal: pairs of parameters guessed from names and shapes, before a port has any weights.

Single parameters with compatible shapes are paired by name first, then stacked, fused and split
ones. Layouts follow from the shapes, and for square matrices from conventions.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from parity.engine.pairing import naming
from parity.engine.pairing.constructions import Construction, Part, Piece, copied, cut, laid_out
from parity.engine.pairing.conventions import Conventions, nearness
from parity.engine.pairing.layouts import Layout, Shape, identity, transposition
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
"""Score added for two parameters whose shapes are equal up to a permutation of axes; half of it is
added if axes must be merged or split."""
# Query, key, value and a gate.
MOST_PARTS = 4
"""Largest number of parameters that are fused into one; families (names that differ in numbers) may
be larger."""
GUESSED_SUM = "a sum of two biases, which is a guess"
"""Note on a parameter that is made of the two biases of a recurrent cell."""
GUESSED_ORDER = "fused; the order of the parts is a guess"
"""Note on a port's parameter that is fused from several of the original's, or is a part of a fused
one."""
SECOND_COPY = "a second copy"
"""Note on a port's parameter made of one of the original's that another of the port's uses too."""
ORDER = ("query", "key", "value", "gate", "up")
"""Assumed order of the parts in a fused parameter; shapes do not show it."""

GATES = ("ifgo", "rzn")
"""Orders in which torch stores the gates of an LSTM and of a GRU. Libraries with a module for each
gate, such as Flax, end its name with the letter."""
TERM = 0.1
"""Score added if the names of a gate's parameter and of the fused parameter both belong to the
input, or both to the state. It is small, since it only has to decide if all other words are
equal."""
TERMS = (("ih", "hh"), ("input", "hidden"), ("input", "recurrent"))
"""Words in the names of the two biases of a recurrent cell: in the name of the input's bias, and in
that of the state's."""


def propose(original: Mapping[str, np.ndarray], port: Mapping[str, np.ndarray]) -> Matching:
    """Return a `Matching` that proposes, by names and shapes alone, how each parameter of the port
    is made of parameters of the original.

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
    for step in (_families, _siblings, _copies, _sums):
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
    """Propose one parameter of the original for single parameters of the port.

    Returns:
        Names of the original's parameters, and notes on unsure pairs, both by name of the port's
        parameter. Each of the original's parameters is used at most once.
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
    """Return how well the pair of `original` and `port` fits the other pairs in `known`, from 0 to
    1 (`naming.context`)."""
    others = [(o, p) for p, o in known.items() if p != port]
    return float(naming.context([original], [port], others)[0, 0])


def _allowed(sources: list[Shape], targets: list[Shape]) -> np.ndarray:
    """Return how easily each source shape is rearranged to each target shape: an array (sources,
    targets) of 1, 0.5 or -inf (`conventions.nearness`)."""
    rows, columns = ({shape: i for i, shape in enumerate(dict.fromkeys(s))} for s in
                     (sources, targets))  # fmt: skip
    table = np.array([[nearness(a, b) for b in columns] for a in rows])
    table = table.reshape(len(rows), len(columns))
    return table[np.ix_([rows[s] for s in sources], [columns[s] for s in targets])]


Step = Iterator[tuple[str, Construction, str]]
"""Iterator of proposals: name of a port's parameter, construction (recipe) that makes it from the
original's parameters, and note for the reader."""


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
            likeness += [TERM * _is_of_term(name, head) for head in heads]
            options += [
                (-value, name, group, pieces)
                for value, (group, pieces) in zip(likeness.tolist(), fitting, strict=True)
            ]
        used: set[str] = set()
        for _, name, group, pieces in sorted(options, key=lambda option: option[0]):
            if name not in used and used.isdisjoint(group):
                used.update((name, *group))
                yield from _proposals(name, wholes[name], pieces, port_is_whole, GUESSED_ORDER)


def _groups(parts: Shapes) -> Iterator[tuple[str, ...]]:
    """Yield groups of parameters that may be fused, each in the assumed order of its parts.

    The parameters of a group are in sibling modules and share the last part of the name.
    """
    gates = [*_all_gates(parts)]
    yield from gates
    modules = defaultdict(list)
    grouped = {*itertools.chain(*gates)}
    for name in parts:
        if name in grouped:
            continue
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
    if not math.prod(shape):
        return None
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
    """Propose a second use of one of the original's parameters for each unmatched one of the port.

    An example is an output head that the original ties to the embedding.
    """
    _, rest_p = _rest(shapes_o, shapes_p, made)
    names = list(shapes_o)
    if not names:
        return
    for port, shape in rest_p.items():
        likeness = _likeness(names, [port], made)[:, 0]
        likeness = likeness + FITS * _allowed([shapes_o[n] for n in names], [shape])[:, 0]
        best = int(likeness.argmax())
        if likeness[best] >= LEAST + FITS:
            layout = conventions.layout(names[best], port, shapes_o[names[best]], shape)
            yield port, laid_out(names[best], layout), SECOND_COPY


def _sums(
    shapes_o: Shapes, shapes_p: Shapes, made: dict[str, Construction], conventions: Conventions
) -> Step:
    """Propose sums: two biases of a recurrent cell, of which the port stores the sum.

    If one of the two has no use so far, its parts are added where parts of the other are used,
    except in the last gate of a GRU, which multiplies the state's bias by another gate.
    """
    rest_o, rest_p = _rest(shapes_o, shapes_p, made)
    for biases in _two_biases(shapes_o):
        shape = shapes_o[biases[0]]
        unused = [name for name in biases if name in rest_o]
        if len(unused) == 1:
            (other,) = unused
            used = biases[0] if other == biases[1] else biases[1]
            for port, construction in [*made.items()]:
                if used in construction.parameters:
                    yield from _both(port, construction, used, other, biases, shapes_p, rest_p)
        # Names as short as `bias` say nothing; shapes do if nothing else has this one.
        alike = [name for name, s in rest_o.items() if s == shape]
        ports = [name for name, s in rest_p.items() if s == shape]
        if len(unused) == len(alike) == 2 and len(ports) == 1:
            one = copied(biases[0], shape)
            yield from _both(ports[0], one, *biases, biases, shapes_p, rest_p)


def _both(
    port: str,
    construction: Construction,
    used: str,
    other: str,
    biases: tuple[str, str],
    shapes_p: Shapes,
    rest_p: Shapes,
) -> Step:
    """Propose a use of `other`, one of a recurrent cell's two biases, given that the port's
    parameter `port` is made of the cell's other bias, `used`.

    If the port has an unmatched second bias for the same gate, that is made of `other`. If not,
    `other` is added to `used` in `port`; of Equinox's GRU, in all gates but the last.
    """
    shape = shapes_p[port]
    added = tuple(replace(p, parameter=other) for p in construction.pieces if p.parameter == used)
    gate = _gate(port)
    same = [p for p in rest_p if gate and (g := _gate(p)) and (g.cell, g.letter) ==
            (gate.cell, gate.letter) and rest_p[p] == shape]  # fmt: skip
    last, third = f"{port}_n", math.prod(shape) // 3
    if same:
        # Flax's GRU: this gate has a bias of its own for each term.
        yield same[0], Construction(shape, added), GUESSED_ORDER
    elif shape == added[0].part.whole == (3 * third,) and rest_p.get(last) == (third,):
        # Equinox's GRU: the bias of the state in the last of three gates is stored apart.
        start = shape[0] - third
        gates, new = cut(shape, shape, 0, 0, start), cut(shape, shape, 0, start, shape[0])
        alone = Piece(biases[0], new, identity(new.shape), new)
        pieces = (*_added(shape, gates, biases).pieces, alone)
        yield port, Construction(shape, pieces), GUESSED_SUM
        yield last, part_of(biases[1], new, identity(new.shape)), GUESSED_SUM
    else:
        pieces = (*construction.pieces, *added)
        pieces = tuple(sorted(pieces, key=lambda piece: piece.parameter == biases[1]))
        yield port, Construction(shape, pieces), GUESSED_SUM


def _added(shape: Shape, part: Part, names: Sequence[str]) -> Construction:
    """Return the construction (recipe) that adds `part` of each of the original's parameters
    `names`, and puts the sum at `part` of the port's parameter of `shape`."""
    unit = identity(part.shape)
    return Construction(shape, tuple(Piece(name, part, unit, part) for name in names))


def _two_biases(shapes: Shapes) -> Iterator[tuple[str, str]]:
    """Yield the names of the two biases that a recurrent cell adds: that of the input and that of
    the state."""
    for name, shape in shapes.items():
        leaf = naming.leaf(name)
        for first, second in TERMS:
            word = rf"(?<![A-Za-z]){first}(?![A-Za-z])"
            other = f"{name.removesuffix(leaf)}{re.sub(word, second, leaf)}"
            if "bias" in leaf.lower() and other != name and shapes.get(other) == shape:
                yield name, other


@dataclass(frozen=True)
class _Gate:
    """A gate of a recurrent cell, as in `cell.hf.bias`: gate `f`, prefix `h`."""

    cell: tuple[str, str]
    """Path of the cell, and last part of the parameter's name."""
    prefix: str
    letter: str


def _gate(name: str) -> _Gate | None:
    module = naming.leaf(naming.parent(name))
    if not module or not any(module[-1] in order for order in GATES):
        return None
    return _Gate((naming.parent(name, 2), naming.leaf(name)), module[:-1], module[-1])


def _all_gates(parts: Shapes) -> Iterator[tuple[str, ...]]:
    """Yield, for each recurrent cell, the names of its gates' parameters, in the order of
    `GATES`."""
    cells: dict[tuple[tuple[str, str], str], dict[str, str]] = defaultdict(dict)
    for name in parts:
        if (gate := _gate(name)) is not None:
            cells[gate.cell, gate.prefix][gate.letter] = name
    for gates in cells.values():
        for order in GATES:
            if gates.keys() == {*order}:
                yield tuple(gates[letter] for letter in order)


def _is_of_term(whole: str, part: str) -> bool:
    """Return whether `part`, a parameter of a gate, and the fused parameter `whole` belong to the
    same term, input or state, such as `hf.bias` and `bias_hh`."""
    gate = _gate(part)
    return gate is not None and gate.prefix != "" and f"_{gate.prefix}h" in naming.leaf(whole)


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
