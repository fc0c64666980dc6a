"""Pairs of parameters guessed from the order in which two programs use them.

Automatic names, such as `Dense_0` and those of `torch.nn.Sequential`, say nothing. Their modules
are paired in order of use, as far as the shapes fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from parity.engine.pairing import naming
from parity.engine.pairing.alignment import best_in_order
from parity.engine.pairing.constructions import Construction, laid_out
from parity.engine.pairing.conventions import Conventions
from parity.engine.pairing.layouts import Shape


def paired_in_order(
    original: Mapping[str, Shape], port: Mapping[str, Shape]
) -> dict[str, Construction]:
    """Pair the modules of two programs in order of use; return the construction (recipe) of each
    paired parameter, by name of the port's parameter.

    Each construction uses one parameter of the original. As many modules as possible are paired
    without changing their order. Two modules fit if each parameter of one has a partner in the
    other.

    Args:
        original: shapes by name, in order of use.
        port: shapes by name, in order of use.
    """
    theirs, mine = _modules(original), _modules(port)
    conventions = Conventions({}, original, port)
    fits = [[_partners(a, b, original, port, conventions) for b in mine] for a in theirs]
    worth = np.array([[float(bool(made)) for made in row] for row in fits])
    pairs = best_in_order(worth.reshape(len(theirs), len(mine)))
    return {name: made for i, j in pairs for name, made in fits[i][j].items()}


def _modules(shapes: Mapping[str, Shape]) -> list[list[str]]:
    """Return one list of parameter names per module, in order of first use; a parameter without a
    module counts as a module of its own."""
    modules: dict[str, list[str]] = {}
    for name in shapes:
        modules.setdefault(naming.parent(name) or name, []).append(name)
    return list(modules.values())


def _partners(
    theirs: Sequence[str],
    mine: Sequence[str],
    original: Mapping[str, Shape],
    port: Mapping[str, Shape],
    conventions: Conventions,
) -> dict[str, Construction]:
    """Return the construction (recipe) of each of the port's parameters `mine`, by name, from one
    of the original's parameters `theirs`; empty if a parameter of either module has no partner."""
    if len(theirs) != len(mine):
        return {}
    ends = naming.similarity([*map(naming.leaf, theirs)], [*map(naming.leaf, mine)])
    for i, a in enumerate(theirs):
        for j, b in enumerate(mine):
            source, target = original[a], port[b]
            layout = len(source) == len(target) and conventions.axes(a, b, source, target)
            if not layout or tuple(source[axis] for axis in layout) != target:
                ends[i, j] = -np.inf
    made = {
        mine[j]: laid_out(
            theirs[i],
            conventions.layout(theirs[i], mine[j], original[theirs[i]], port[mine[j]]),
        )
        for i, j in naming.assignment(ends)
        if np.isfinite(ends[i, j])
    }
    return made if len(made) == len(mine) else {}
