"""Assigns the numbered entries of torch optimiser states to parameters, or finds them ambiguous.

`optimizer.state_dict()` numbers parameters in the order of its groups and, before torch 2.6, stores
no names. Within a group, parameters are assumed to follow the module's order. An assignment fits if
each group is a subsequence of the model's parameters, no parameter is in two groups, and all shapes
agree. An entry is assigned only if all fitting assignments give it to the same parameter.
Source: docs/stability.md "Optimiser state".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from stability.core.parameter_leaves import Leaf

LIMIT = 100_000
"""Largest number of partial assignments to explore. With more, all parameters count as ambiguous:
so many arise only from many parameters of equal shape in unknown groups."""
_UNDECAYED = re.compile(r"bias|norm|(^|\.)ln(_|\d|\.|$)|(^|\.)bn\d*\.", re.IGNORECASE)
"""Matches names of parameters that are usually excluded from weight decay: biases and norms."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of one parameter in an optimiser's group, with the shape of its moments."""

    key: Any
    """(index of the optimiser state, number of the parameter in it)."""
    shape: tuple[int, ...] | None
    """Shape of the moments; None if there are none, since the parameter never had a gradient."""

    def fits(self, leaf: Leaf) -> bool:
        """Whether the slot's moments can belong to the parameter: no moments, or the same shape."""
        return self.shape is None or self.shape == leaf.shape


@dataclass(frozen=True, slots=True)
class Match:
    """Unambiguous part of the assignment of slots to parameters."""

    keys: dict[str, Any] = field(default_factory=dict)
    """`Slot.key` by parameter name, without parameters that have no moments."""
    ambiguous: tuple[str, ...] = ()
    """Names of the parameters that fit several slots, or a slot that may be another parameter's."""


Group: TypeAlias = Sequence[Slot]
Allowed: TypeAlias = Callable[[Leaf, int], bool]
"""Predicate of (parameter, group number): whether the parameter may be in that group."""


def match(
    groups: Sequence[Group], leaves: Sequence[Leaf], ordered: bool, decays: Sequence[float] = ()
) -> Match | None:
    """Assign the slots of all groups to parameters; return None if no assignment fits.

    Args:
        groups: the slots of each parameter group, of all optimisers; a parameter has at most one.
        leaves: parameters that may have been trained.
        ordered: whether the leaves are in the module's order. Otherwise only shapes are compared.
        decays: weight decay of each group, used only if there are two groups and the assignment is
            ambiguous. The group with the larger decay (the first if equal) is then assumed to hold
            all parameters except biases and norms, as in transformers' Trainer. This assignment is
            returned if it is unambiguous.
    """
    fitting = _in_order if ordered else _by_shape
    found = fitting(groups, leaves, lambda leaf, group: True)
    if found is not None and found.ambiguous and len(groups) == len(decays) == 2:
        decaying = int(decays[1] > decays[0])
        ruled = fitting(
            groups, leaves, lambda x, group: (group == decaying) != bool(_UNDECAYED.search(x.name))
        )
        if ruled is not None and not ruled.ambiguous:
            return ruled
    return found


def copies(groups: Sequence[Group], leaves: Sequence[Leaf]) -> dict[str, str]:
    """Return the leaves that are second copies of tied matrices: name of copy -> name of parameter.

    A leaf is a copy if it has two or more axes, is bytewise equal to an earlier leaf, and is not
    constant. Copies are sought only among shapes of which the model has more leaves than the
    optimisers have slots.
    """
    slots = [slot for group in groups for slot in group]
    if not slots or len(slots) >= len(leaves):
        return {}
    found: dict[str, str] = {}
    for shape in {leaf.shape for leaf in leaves if len(leaf.shape) > 1}:
        alike = [leaf for leaf in leaves if leaf.shape == shape]
        if sum(slot.fits(alike[0]) for slot in slots) >= len(alike):
            continue
        seen: dict[bytes, str] = {}
        for leaf in alike:
            values = np.ascontiguousarray(leaf.load())
            content = values.tobytes()
            if content in seen:
                found[leaf.name] = seen[content]
            elif values.size and bool(np.any(values != values.reshape(-1)[0])):
                seen[content] = leaf.name
    return found


def _in_order(groups: Sequence[Group], leaves: Sequence[Leaf], allowed: Allowed) -> Match | None:
    """Return the part common to all assignments that keep the leaves' order within each group.

    None if there is no such assignment.

    The search walks through the leaves; its state is the position reached in every group. States
    reachable from the start are computed forward, then filtered backward to those that reach the
    end. Each remaining step is part of a fitting assignment.
    """
    sizes = tuple(len(group) for group in groups)
    reached: list[set[tuple[int, ...]]] = [{(0,) * len(groups)}]
    count = 0
    for number, leaf in enumerate(leaves):
        after = {
            place
            for before in reached[-1]
            for place, _ in _moves(before, leaf, groups, allowed)
            if sum(sizes) - sum(place) <= len(leaves) - number - 1
        }
        reached.append(after)
        count += len(after)
        if count > LIMIT:
            return Match({}, tuple(leaf.name for leaf in leaves))
    if sizes not in reached[-1]:
        return None
    alive, options = {sizes}, {}
    for leaf, places in zip(reversed(leaves), reversed(reached[:-1]), strict=True):
        steps = [
            (before, slot)
            for before in places
            for after, slot in _moves(before, leaf, groups, allowed)
            if after in alive
        ]
        options[leaf.name] = {None if s is None or s.shape is None else s.key for _, s in steps}
        alive = {before for before, _ in steps}
    return _certain(leaves, options)


def _moves(
    place: tuple[int, ...], leaf: Leaf, groups: Sequence[Group], allowed: Allowed
) -> Iterator[tuple[tuple[int, ...], Slot | None]]:
    """Yield (next positions in the groups, slot) for each slot that the leaf may take at `place`.

    The first pair is (`place`, None): the leaf is untrained.
    """
    yield place, None
    for number, (position, group) in enumerate(zip(place, groups, strict=True)):
        if position < len(group) and group[position].fits(leaf) and allowed(leaf, number):
            yield (*place[:number], position + 1, *place[number + 1 :]), group[position]


def _by_shape(groups: Sequence[Group], leaves: Sequence[Leaf], allowed: Allowed) -> Match | None:
    """Assign by shapes alone: a slot is certain if exactly one allowed parameter has its shape.

    None if there are fewer parameters than slots, in all or of one shape.
    """
    slots = [(slot, number) for number, group in enumerate(groups) for slot in group]
    if len(slots) > len(leaves):
        return None
    options: dict[str, set[Any]] = {leaf.name: set() for leaf in leaves}
    for slot, number in slots:
        fitting = [leaf for leaf in leaves if slot.fits(leaf) and allowed(leaf, number)]
        places = [n for s, n in slots if s.shape == slot.shape]
        able = [x for x in leaves if slot.fits(x) and any(allowed(x, n) for n in places)]
        if len(fitting) < places.count(number) or len(able) < len(places):
            return None
        for leaf in fitting if slot.shape is not None else ():
            options[leaf.name] |= {slot.key} if len(fitting) == 1 else {slot.key, None}
    return _certain(leaves, {name: found or {None} for name, found in options.items()})


def _certain(leaves: Sequence[Leaf], options: Mapping[str, set[Any]]) -> Match:
    certain = {n: next(iter(found)) for n, found in options.items() if len(found) == 1}
    ambiguous = tuple(leaf.name for leaf in leaves if len(options[leaf.name]) > 1)
    return Match({n: key for n, key in certain.items() if key is not None}, ambiguous)
