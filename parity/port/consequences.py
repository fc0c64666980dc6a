"""Pairs of stages that share a name and differ because they are two different quantities.

For example, an embedding layer that scales its output and one whose caller scales it share a name
and differ by the scale, yet all later stages agree to the last digit. Such a pair is dropped and
reported, not failed. The evidence is a later stage that is correct until it is fed the original's
value of the pair. That later stages agree is none: they may not use it, or multiply it by 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from parity.engine.measure.measurement import Measurement, Verdict
from parity.engine.measure.metrics import relative_l2, without_shared_infinities
from parity.engine.pairing.alignment import AlignedBy, Alignment
from parity.engine.pairing.closeness import EQUAL
from parity.engine.pairing.stage_pairs import Pair
from parity.port.correspondence import Correspondence
from parity.port.localisation import Place, replaceable
from parity.port.side_runs import SideRuns
from parity.sides.side import Precision, Run


def compensated(
    alignment: Alignment,
    rows: Iterable[Measurement],
    place: Place,
    outputs: Collection[str],
) -> Pair | None:
    """Return the culprit's pair if it is two different quantities, else None.

    It is, if a later stage is correct in the port's own run but wrong when fed the original's value
    of the pair: the port then continues differently from the original.

    Args:
        alignment: pairs in the port's order of execution.
        rows: gates by the port's stages.
        place: where the difference starts.
        outputs: outputs of either side; a difference there is an effect by itself.
    """
    culprit = place.culprit
    pair = next((p for p in alignment.pairs if culprit and p.port == culprit.name), None)
    if culprit is None or pair is None or not _may_be_two(pair, outputs):
        return None
    failing = _failing(rows)
    behind = place.stages[place.stages.index(culprit) + 1 :]
    return pair if any(s.broken and s.name not in failing for s in behind) else None


def has_effect(
    pair: Pair, names: Correspondence, original: SideRuns, port: SideRuns, place: Place
) -> bool:
    """Return whether the original's value of this pair alone changes a later stage of the port.

    `localise` feeds all stages at once, so that a stage may break by another pair's value.
    """
    if port.wide is None:
        return True
    value = replaceable(original.best, names, original, port).get(pair.port)
    if value is None:
        return False
    fed = port.run(Run(Precision.FLOAT64, forced={pair.port: value})).stages
    bounds = {stage.name: stage.tolerance for stage in place.stages}
    order = [stage.name for stage in place.stages]
    return any(
        relative_l2(*without_shared_infinities(fed[name], port.wide.stages[name])) > bounds[name]
        for name in order[order.index(pair.port) + 1 :]
        if name in fed
    )


def _failing(rows: Iterable[Measurement]) -> set[str]:
    return {m.quantity for m in rows if m.verdict is Verdict.FAIL}


def _may_be_two(pair: Pair, outputs: Collection[str]) -> bool:
    """Return whether a differing pair may be two quantities of one name.

    A pair matched by value, or one that differs by less than another quantity would, is a stage
    that is slightly wrong. The difference of an output is an effect by itself.
    """
    named = pair.by not in (AlignedBy.VALUE, AlignedBy.PIN) and pair.distance > EQUAL
    return named and not {pair.port, pair.original} & set(outputs)


def without(alignment: Alignment, idle: Collection[Pair]) -> Alignment:
    """Return an alignment without some pairs, whose stages then have no partner."""
    originals = {pair.original: pair.layout.source for pair in idle}
    ports = {pair.port: pair.layout.target for pair in idle}
    return replace(
        alignment,
        pairs=tuple(pair for pair in alignment.pairs if pair not in idle),
        unaligned_original=dict(alignment.unaligned_original) | originals,
        unaligned_port=dict(alignment.unaligned_port) | ports,
    )


def notice_of(pair: Pair) -> str:
    """Return the notice for a pair that was dropped."""
    return (
        f"{pair.port} is not what the original's {pair.original} is: they differ by "
        f"{pair.distance:.0e}, yet everything computed from them agrees; the pair was dropped"
    )
