"""Square matrices that were not transposed: the stage that is wrong holds with them the other way.

Their values fit either way, so no comparison of parameters finds them, and what a library calls a
matrix says little about how a function of somebody's own uses it. The stage itself is asked: it is
computed once more, fed the original's values, with the matrix transposed.
Source: docs/your-own-port.md "Where it starts".
"""

from __future__ import annotations

import copy
from collections.abc import Collection

import numpy as np

from parity.engine.exits import exits_named
from parity.engine.metrics import relative_l2, without_shared_infinities
from parity.engine.parameter_pairs import Matching
from parity.port.correspondence import Correspondence
from parity.port.localisation import Place, replaceable
from parity.port.report import first_use
from parity.port.side_runs import SideRuns
from parity.port_tolerances import PortEdge
from parity.sides.side import Arrays, Precision, Run, SideError, TakesParameters

TRIED = 16
"""Matrices tried at most, those of the stage's own module first; each costs a run of the port."""


def untransposed(
    place: Place, names: Correspondence, original: SideRuns, port: SideRuns
) -> dict[str, str]:
    """Return matrices that make the first wrong stage right when they are transposed, with a note.

    Each alone, and if none is enough, all that were tried together. A symmetric matrix is
    its own transpose, and one that is not square fits in one way.

    Args:
        place: Where the difference starts; nothing is tried where no stage is wrong on its own, or
            where it is wrong in float32 only.
        names: Which stages and parameters are which.
        original: Its runs.
        port: Its runs; a side that cannot run with other parameters has no answer.
    """
    culprit, side = place.culprit, port.side
    if culprit is None or place.edge is PortEdge.PORT32_PORT64:
        return {}
    if not isinstance(side, TakesParameters):
        return {}
    values = side.parameters()
    stages = [stage.name for stage in place.stages]
    at = stages.index(culprit.name)
    square = _square(names.matching, values)
    own = [name for name in square if first_use(name, stages) == at]
    # Of a function without modules, no name says where a parameter is used.
    tried = [*own, *(name for name in square if first_use(name, stages) < 0)][:TRIED]
    theirs = original.narrow if port.wide is None else original.best
    truth = names.stages(theirs.stages)[culprit.name]
    precision = Precision.FLOAT32 if port.wide is None else Precision.FLOAT64
    fed = replaceable(theirs, names, original, port)

    def holds(turned: Collection[str]) -> bool:
        with exits_named(port.name):
            other = copy.copy(port)
            other.side = side.with_parameters({name: values[name].T for name in turned})
            other.masked = {*port.masked}
            try:
                value = other.run(Run(precision, forced=fed)).stages[culprit.name]
            except SideError:
                return False
        return relative_l2(*without_shared_infinities(value, truth)) <= culprit.tolerance

    found = [name for name in tried if holds([name])]
    both = ""
    if not found and len(tried) > 1 and holds(tried):
        found, both = tried, " and the others here"
    return {
        name: (
            f"not transposed, it seems: {culprit.name} holds with it{both} the other way; its "
            f"shape {values[name].shape} allows both"
        )
        for name in found
    }


def _square(matching: Matching, values: Arrays) -> list[str]:
    """Return the port's square matrices that are one whole matrix of the original each."""
    return [
        pair.port
        for pair in matching.pairs
        if pair.is_equal
        and len(pair.construction.pieces) == 1
        and pair.construction.pieces[0].part.is_whole
        and (x := values[pair.port]).ndim == 2
        and x.shape == x.T.shape
        and np.any(x != x.T)
    ]
