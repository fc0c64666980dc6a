"""Explanations of failing ports, converted from port reports to the form that a night stores.

Source: docs/reports.md "What broke, and where".
"""

from __future__ import annotations

from parity.engine.measure.localize import first_divergence
from parity.engine.programs.explanation import NOTE, Explanation
from parity.port.report import Report


def of_port(report: Report) -> Explanation | None:
    """Return the explanation of a failing port; None if the port holds.

    The explanation names the stage that is wrong although it was given the original's values, or
    says that there is no such stage.
    """
    first = first_divergence(report.measurements)
    if first is None:
        return None
    place, culprit, hints = report.place, report.culprit, "; ".join(report.hints)
    if culprit is None:
        return Explanation(
            report.title,
            first.edge,
            first.quantity,
            first.value,
            first.tolerance,
            "No stage is wrong on its own, fed the original's values.",
            place.stages,
            note="; ".join(filter(None, (first.note, hints)))[:NOTE],
        )
    return Explanation(
        report.title,
        str(place.edge),
        culprit.name,
        culprit.forced,
        culprit.tolerance,
        "wrong on its own, fed the original's values",
        place.stages,
        place.worst[0] if place.worst else None,
        note=hints[:NOTE],
        where=place.where,
        lines=place.lines,
    )
