"""Assign the numbered states of torch optimisers to a model's parameters, or say what is ambiguous.

`optimizer.state_dict()` numbers parameters in the order of its groups and, before torch 2.6, names
none. Inside a group they come in the module's order, so an assignment fits if each group is a
subsequence of the model's parameters, no parameter is in two groups and every shape agrees. It is
accepted only where every fitting one gives the same moments to the same parameter. Source:
docs/stability.md "Optimiser state".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from stability.core.parameter_leaves import Leaf

LIMIT = 100_000
"""Partial assignments that are followed; a model with more is ambiguous at any rate, since only
many parameters of equal shape and unknown group make so many."""
_UNDECAYED = re.compile(r"bias|norm|(^|\.)ln(_|\d|\.|$)|(^|\.)bn\d*\.", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter of an optimiser's group."""

    key: Any
    """Its place in the optimiser: number of the state and number of the parameter."""
    shape: tuple[int, ...] | None
    """Shape of its moments; None where it has none, having had no gradient."""

    def fits(self, leaf: Leaf) -> bool:
        """Whether these can be moments of the parameter."""
        return self.shape is None or self.shape == leaf.shape


@dataclass(frozen=True, slots=True)
class Match:
    """States by parameter, as far as they are certain."""

    keys: dict[str, Any] = field(default_factory=dict)
    """By parameter, the key of its slot; parameters without moments are left out."""
    ambiguous: tuple[str, ...] = ()
    """Parameters to which several states fit, or one state and none."""


Group: TypeAlias = Sequence[Slot]
Allowed: TypeAlias = Callable[[Leaf, int], bool]
"""Whether a parameter may be in a group, by the group's number."""


def match(
    groups: Sequence[Group], leaves: Sequence[Leaf], ordered: bool, decays: Sequence[float] = ()
) -> Match | None:
    """Return which parameter each state belongs to; None if no assignment fits.

    Args:
        groups: of all optimisers together; a parameter is in one group at most.
        leaves: parameters that may have been trained.
        ordered: whether the leaves are in the module's order.
        decays: weight decay of each group. With two groups that shapes do not tell apart, the one
            that decays more, else the first, is taken to be all parameters except biases and norms,
            as of transformers' Trainer, if exactly that fits.
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
    """Return names of tied matrices that a file holds twice, and of the parameter each repeats.

    A copy has every byte of an earlier matrix, is not constant, and is one more of its shape than
    the optimisers have.
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
    """Return what all assignments have in common in which each group keeps the leaves' order.

    Positions in all groups after each leaf are followed forward and then, from the end, backward:
    what both reach is part of a fitting assignment.
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
    """Yield the positions after a leaf, and the slot it takes; None where it was not trained."""
    yield place, None
    for number, (position, group) in enumerate(zip(place, groups, strict=True)):
        if position < len(group) and group[position].fits(leaf) and allowed(leaf, number):
            yield (*place[:number], position + 1, *place[number + 1 :]), group[position]


def _by_shape(groups: Sequence[Group], leaves: Sequence[Leaf], allowed: Allowed) -> Match | None:
    """Return what shapes alone say: a state is certain if one parameter has its shape."""
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
