"""Analogy: matches fused, split or stacked constants like other parameters of their module.

Values cannot identify constants (arrays of one value). But if a module's weight is fused from the
weights of three modules, its bias is fused from their biases in the same order. Constants without
such a sibling, such as the scales of norms in stacked layers, are matched with families: names that
differ in numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from parity.engine.pairing import naming
from parity.engine.pairing.constructions import Construction, Part, Piece, cut, whole
from parity.engine.pairing.layouts import Layout, Shape
from parity.engine.pairing.parameter_pairs import Pair
from parity.engine.pairing.value_search import Tensors, is_constant


def by_siblings(
    originals: Tensors,
    ports: Tensors,
    rest_o: Sequence[str],
    rest_p: Sequence[str],
    pairs: Mapping[str, Pair],
) -> Iterator[tuple[str, Construction]]:
    """Yield constant parameters of the port (all elements equal), each as its name and the
    construction (recipe) that makes it from the original's parameters.

    The construction is like that of a parameter of the same module that is already matched: of the
    one with the most similar name, unless what it uses of the original is already used.

    Args:
        originals: arrays of the original.
        ports: arrays of the port.
        rest_o: names of the original's unmatched constants and small arrays.
        rest_p: names of the port's unmatched constants and small arrays.
        pairs: pairs found so far, by name of the port's parameter.
    """
    modules: dict[str, list[Pair]] = {}
    for pair in pairs.values():
        modules.setdefault(naming.parent(pair.port), []).append(pair)
    taken = {piece for pair in pairs.values() for piece in _sources(pair.construction)}
    for port in rest_p:
        siblings = modules.get(naming.parent(port), [])
        likeness = naming.similarity([port], [sibling.port for sibling in siblings])[0]
        found = None
        for i in np.argsort(-likeness, kind="stable").tolist():
            made = _like(siblings[i].construction, port, originals, ports, rest_o)
            if made is not None:
                found = found or made
                if taken.isdisjoint(_sources(made)):
                    found = made
                    break
        if found is not None:
            taken |= _sources(found)
            yield port, found


def _sources(construction: Construction) -> set[tuple[str, Part]]:
    """Return the parts of the original's parameters that a construction uses, as (name, part)."""
    return {(piece.parameter, piece.part) for piece in construction.pieces}


def _like(
    sibling: Construction, port: str, originals: Tensors, ports: Tensors, rest: Sequence[str]
) -> Construction | None:
    """Return a construction (recipe) of the parameter `port` like `sibling`, the construction of a
    parameter of the same module; None if no such construction gives the values of `port`.

    The original's parameters with a name in `rest` may be used.
    """
    counterparts = _counterparts(sibling, port, rest)
    if len(counterparts) < len(sibling.parameters):
        return None
    pieces, shape = [], ports.shapes[port]
    for piece in sibling.pieces:
        name = counterparts[piece.parameter]
        part = _scaled(piece.part, originals.shapes[name])
        place = _scaled(piece.place, shape)
        if part is None or place is None or math.prod(part.shape) != math.prod(place.shape):
            return None
        pieces.append(Piece(name, part, _reshape(part.shape, place.shape), place))
    return _checked(Construction(shape, tuple(pieces)), port, originals, ports)


def _counterparts(sibling: Construction, port: str, rest: Sequence[str]) -> dict[str, str]:
    """Return which parameter of the original, among those with a name in `rest`, takes the place of
    each parameter of `sibling` in a construction (recipe) of the parameter `port`.

    It belongs to the same module. If a module has several, those most similar to `port` by name are
    taken, each once. A parameter for which none is left is missing in the result.
    """
    found = {}
    for module in dict.fromkeys(map(naming.parent, sibling.parameters)):
        own = [name for name in sibling.parameters if naming.parent(name) == module]
        names = [name for name in rest if naming.parent(name) == module]
        likeness = naming.similarity(names, [port])[:, 0]
        best = sorted(np.argsort(-likeness, kind="stable")[: len(own)].tolist())
        names = [names[i] for i in best]
        found |= {own[j]: names[i] for i, j in naming.assignment(naming.similarity(names, own))}
    return found


def _scaled(part: Part, shape: Shape) -> Part | None:
    """Return the part of an array of `shape` that is the same fraction of it as `part` is of its
    own array.

    If the array of `part` is split into groups, the array of `shape` is too. None if the fraction
    is no whole number of elements.
    """
    if part.is_whole:
        return whole(shape)
    axis = next(i for i, n in enumerate(part.view) if (part.starts[i], part.stops[i]) != (0, n))
    grouped = len(part.view) > len(part.whole) and axis > 0
    groups = part.view[axis - 1] if grouped else 1
    size = math.prod(shape)
    scaled = [n * size / (groups * part.view[axis]) for n in (part.starts[axis], part.stops[axis])]
    if size % groups or not all(n.is_integer() for n in scaled):
        return None
    view = (groups, size // groups) if groups > 1 else (size,)
    return cut(shape, view, len(view) - 1, int(scaled[0]), int(scaled[1]))


def by_families(
    originals: Tensors,
    ports: Tensors,
    rest_o: Sequence[str],
    rest_p: Sequence[str],
    pairs: Mapping[str, Pair],
) -> Iterator[tuple[str, Construction]]:
    """Yield constant parameters of the port (all elements equal) that one side stacks and the other
    does not, each as its name and its construction (recipe).

    The construction stacks a family of the original's parameters (names that differ in numbers
    only), or takes one layer of a stacked parameter of the original. Arguments as in `by_siblings`.
    """
    known = [(name, pair.port) for pair in pairs.values() for name in pair.originals]
    for stacked in (ports, originals):
        wholes, parts = (rest_p, rest_o) if stacked is ports else (rest_o, rest_p)
        groups = naming.families(parts)
        if not groups or not wholes:
            continue
        heads = [group[0] for group in groups]
        if stacked is ports:
            likeness = naming.similarity(heads, wholes) + naming.context(heads, wholes, known)
        else:
            likeness = (naming.similarity(wholes, heads) + naming.context(wholes, heads, known)).T
        part_side = originals if stacked is ports else ports
        for i, group in enumerate(groups):
            size = sum(map(part_side.size, group))
            for j, name in enumerate(wholes):
                if stacked.size(name) != size or not _is_stack(stacked.shapes[name], len(group)):
                    likeness[i, j] = -math.inf
        used: set[str] = set()
        for i, j in naming.assignment(likeness):
            if used.isdisjoint(groups[i]):
                used.update(groups[i])
                yield from _stack(wholes[j], groups[i], stacked is ports, originals, ports)


def _is_stack(shape: Shape, count: int) -> bool:
    return any(math.prod(shape[:axes]) == count for axes in range(1, len(shape) + 1))


def _stack(
    name: str, group: Sequence[str], ports_stacked: bool, originals: Tensors, ports: Tensors
) -> Iterator[tuple[str, Construction]]:
    shape = (ports if ports_stacked else originals).shapes[name]
    size = math.prod(shape) // len(group)
    boxes = [cut(shape, (len(group), size), 0, i, i + 1) for i in range(len(group))]
    if ports_stacked:
        pieces = [
            Piece(o, whole(originals.shapes[o]), _reshape(originals.shapes[o], box.shape), box)
            for o, box in zip(group, boxes, strict=True)
        ]
        result = [(name, Construction(shape, tuple(pieces)))]
    else:
        result = [
            (p, Construction(ports.shapes[p], (Piece(
                name, box, _reshape(box.shape, ports.shapes[p]), whole(ports.shapes[p])),)))
            for p, box in zip(group, boxes, strict=True)
        ]  # fmt: skip
    for port, construction in result:
        if _checked(construction, port, originals, ports):
            yield port, construction


def _checked(
    construction: Construction, port: str, originals: Tensors, ports: Tensors
) -> Construction | None:
    """Return `construction` if it fills the parameter `port` and gives its constant, else None."""
    if not construction.is_complete:
        return None
    values = np.stack([originals[name].reshape(-1)[0] for name in construction.parameters])
    constant = all(is_constant(originals[name]) for name in construction.parameters)
    same = constant and is_constant(ports[port]) and is_constant(values)
    return construction if same and values[0] == ports[port].reshape(-1)[0] else None


def _reshape(source: Shape, target: Shape) -> Layout:
    return Layout(source, source, tuple(range(len(source))), target)
