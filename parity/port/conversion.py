"""Finds parameters that were converted wrongly although they hold the original's values.

Comparing values cannot find a square matrix that is not transposed, nor two parameters of one shape
that were exchanged. So the first wrong stage is run with each square matrix transposed, and the
port is compared again with each parameter assigned by its name. If the port then passes with the
parameters assigned by name, the conversion is wrong, not the code. A matrix that fits when
transposed is only a hint, because the code may lack the transpose.

Source: docs/your-own-port.md "Where it starts".
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection

import numpy as np

from parity.engine.measure.arrays import Arrays
from parity.engine.measure.metrics import relative_l2, without_shared_infinities
from parity.engine.pairing.irregularities import placed_by_name
from parity.engine.pairing.parameter_pairs import Matching
from parity.engine.programs.exits import exits_named
from parity.port.correspondence import Correspondence
from parity.port.localisation import Place, replaceable
from parity.port.report import EXCHANGED, first_use
from parity.port.side_runs import SideRuns
from parity.port_tolerances import PortEdge
from parity.sides.side import Precision, Run, Side, SideError, TakesParameters

TRIED = 16
"""Largest number of matrices that are tried transposed, those of the first wrong stage's module
first; each costs a run of the port."""


def untransposed(
    place: Place, names: Correspondence, original: SideRuns, port: SideRuns
) -> dict[str, str]:
    """Return notes on the port's square matrices whose transpose corrects the first wrong stage, by
    parameter name.

    Tried are the matrices that the stage is the first to use, judged by their names, and those
    whose use no name shows: each alone and, if none corrects the stage, all together. Symmetric
    matrices equal their transpose and are not tried.

    Args:
        place: Where the difference starts. The result is empty if every stage is correct when given
            correct inputs, or if the first wrong stage is wrong in float32 only.
        names: Correspondence of stages and parameters.
        original: Runs of the original.
        port: Runs of the port; the result is empty if its side cannot run with other parameters.
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
    # In a function without modules, no name shows where a parameter is used.
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
        found, both = tried, " and the other matrices listed here"
    return {
        name: (
            f"not transposed, it seems: {culprit.name} holds with it{both} transposed; its shape "
            f"{values[name].shape} allows both"
        )
        for name in found
    }


def misplaced(
    matching: Matching, parameters: Arrays, side: Side, holds: Callable[[Side], bool]
) -> dict[str, str]:
    """Return notes on the port's parameters that were exchanged with one another, by name.

    An exchanged parameter holds the values of another parameter of the original than its name
    suggests. The result is empty unless all gates pass once each exchanged parameter is given the
    values that its name suggests.

    Args:
        matching: the pairs of parameters.
        parameters: parameters of the original by name.
        side: the port's side; the result is empty if it cannot run with other parameters.
        holds: compares a side, in place of the port's, with the original, and returns whether all
            gates pass.
    """
    found = placed_by_name(matching.pairs)
    if not found or not isinstance(side, TakesParameters):
        return {}
    by_port = matching.by_port
    values = {
        name: by_port[name].construction.pieces[0].layout(parameters[own])
        for name, own in found.items()
    }
    if not holds(side.with_parameters(values)):
        return {}
    order = [*by_port]
    return {
        name: f"holds {by_port[name].originals[0]} in place of {found[name]}: {EXCHANGED}"
        for name in sorted(found, key=order.index)
    }


def _square(matching: Matching, values: Arrays) -> list[str]:
    """Return the names of the port's square matrices that have the values of exactly one whole
    parameter of the original, transposed or not.

    Symmetric matrices are left out.
    """
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
