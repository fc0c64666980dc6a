"""Stages of one name that differ although nothing behind them does: two quantities, not one.

An embedding that scales what it returns and one whose caller scales it are called alike and differ
by the scale, and every stage behind them agrees to the last digit. Such a pair is taken apart and
told, not failed: what the program returns holds, and so do its derivatives; or, where something
further on is wrong, a stage behind the pair is right until it is fed the original's value of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from parity.engine.alignment import AlignedBy, Alignment
from parity.engine.closeness import EQUAL
from parity.engine.measurement import Measurement, Verdict
from parity.engine.stage_pairs import Pair
from parity.port.localisation import Place


def idle_pairs(
    alignment: Alignment, rows: Iterable[Measurement], outputs: Collection[str]
) -> tuple[Pair, ...]:
    """Return the pairs that fail though every pair behind them passes, in the port's order.

    Args:
        alignment: pairs in the port's order of execution.
        rows: gates by the port's stages.
        outputs: what either side returned: a difference there is its own effect.
    """
    failing = _failing(rows)
    idle: list[Pair] = []
    for pair in reversed(alignment.pairs):
        if pair.port not in failing:
            continue
        if not _may_be_two(pair, outputs):
            break
        idle.insert(0, pair)
    return tuple(idle)


def compensated(
    alignment: Alignment,
    rows: Iterable[Measurement],
    place: Place,
    outputs: Collection[str],
) -> Pair | None:
    """Return the pair at which a difference is said to start, if it is two quantities.

    It is where a stage behind it is right as the port computes it, and wrong once it is fed the
    original's value of that pair: what the port does next is not what the original does next.

    Args:
        alignment, rows, outputs: as of `idle_pairs`.
        place: where the difference starts.
    """
    culprit = place.culprit
    pair = next((p for p in alignment.pairs if culprit and p.port == culprit.name), None)
    if culprit is None or pair is None or not _may_be_two(pair, outputs):
        return None
    failing = _failing(rows)
    behind = place.stages[place.stages.index(culprit) + 1 :]
    return pair if any(s.broken and s.name not in failing for s in behind) else None


def _failing(rows: Iterable[Measurement]) -> set[str]:
    return {m.quantity for m in rows if m.verdict is Verdict.FAIL}


def _may_be_two(pair: Pair, outputs: Collection[str]) -> bool:
    """Return whether a pair that differs may be two quantities of one name.

    What was paired by its values, or differs by less than another quantity would, is a stage that
    is slightly wrong; and what is returned is its own effect.
    """
    named = pair.by not in (AlignedBy.VALUE, AlignedBy.PIN) and pair.distance > EQUAL
    return named and not {pair.port, pair.original} & set(outputs)


def without(alignment: Alignment, idle: Collection[Pair]) -> Alignment:
    """Return an alignment in which the stages of some pairs have no partner."""
    originals = {pair.original: pair.layout.source for pair in idle}
    ports = {pair.port: pair.layout.target for pair in idle}
    return replace(
        alignment,
        pairs=tuple(pair for pair in alignment.pairs if pair not in idle),
        unaligned_original=dict(alignment.unaligned_original) | originals,
        unaligned_port=dict(alignment.unaligned_port) | ports,
    )


def notice_of(pair: Pair) -> str:
    """Return what a reader should know of a pair that was taken apart."""
    return (
        f"{pair.port} is not what the original's {pair.original} is: they differ by "
        f"{pair.distance:.0e} and what is made of them does not"
    )
