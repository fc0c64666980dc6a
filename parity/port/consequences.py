"""Pairs of stages that share a name and differ because they are two different quantities.

For example, one embedding layer scales its output and in the other the caller scales it: the
outputs share a name and differ by the scale, yet all later stages agree to the last digit. Such a
pair is dropped and reported; it is no failure. The evidence is a later stage that is correct in the
port's own run but wrong when computed from the original's value of the pair. Agreement of later
stages alone is no evidence: they may ignore the value, or multiply it by 0.
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
    """Return the pair of the first wrong stage if the pair joins two different quantities, else
    None.

    The quantities are different if a later stage is correct in the port's own run but wrong when
    computed from the original's values: the port then uses its value differently from the original.

    Args:
        alignment: the pairs of stages.
        rows: the measurements so far, named as in the port.
        place: where the difference starts.
        outputs: names of the outputs of both sides; a pair with an output is never returned.
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
    """Return whether replacing the port's value of this pair by the original's changes a later
    stage by more than that stage's tolerance.

    `localise` replaces all pairs at once, so it does not show which of them makes a later stage
    wrong.
    True if the port cannot run in float64, False if the pair's value cannot be replaced.
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
    """Return whether the two stages of a pair may be different quantities.

    False if the pair was matched by value or by hand, or the relative L2 difference of the stages
    is at most `EQUAL`. False for outputs too: a difference there is an error of the port.
    """
    named = pair.by not in (AlignedBy.VALUE, AlignedBy.PIN) and pair.distance > EQUAL
    return named and not {pair.port, pair.original} & set(outputs)


def without(alignment: Alignment, idle: Collection[Pair]) -> Alignment:
    """Return the alignment without the stage pairs `idle`; their stages become unpaired."""
    originals = {pair.original: pair.layout.source for pair in idle}
    ports = {pair.port: pair.layout.target for pair in idle}
    return replace(
        alignment,
        pairs=tuple(pair for pair in alignment.pairs if pair not in idle),
        unaligned_original=dict(alignment.unaligned_original) | originals,
        unaligned_port=dict(alignment.unaligned_port) | ports,
    )


def notice_of(pair: Pair) -> str:
    """Return the notice that a pair was dropped from the alignment, and why."""
    return (
        f"dropped the pair {pair.port} (port) and {pair.original} (original): they differ by "
        f"{pair.distance:.0e}, yet everything computed from them agrees, so they are different "
        "quantities"
    )
