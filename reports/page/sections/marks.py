"""Finds the sections of the page that contain a problem; their links are marked with its state.

See docs/reports.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from parity.engine.measure.measurement import Measurement, Verdict
from reports.subject import main, parts
from reports.verdict.changes import What
from reports.verdict.decide import Decision
from reports.verdict.replays import suite_of
from stability.core.findings import Finding, Severity

_GRAVE = (What.NEW, What.PERSISTING, What.WORSE, What.DRIFTED)
_PROBES = {"survival": "underflow", "poles": "poles"}


def of_sections(
    rows: Iterable[Measurement], findings: Iterable[Finding], decision: Decision
) -> dict[str, str]:
    """Return the state of each section of the page that contains a problem, by the section's id.

    The state is "fail" if a gate failed, a probe found an error, or a value left its history or
    level; else "blocked": a gate could not be compared.
    """
    blocked = {section_of(m) for m in rows if m.verdict is Verdict.NOT_COMPARABLE}
    red = {section_of(m) for m in rows if m.verdict is Verdict.FAIL}
    red |= {_PROBES.get(f.probe, "audits") for f in findings if f.severity is Severity.ERROR}
    sections = {(m.case, m.edge, m.kind.value): section_of(m) for m in rows}
    grave = [c for c in decision.changes if c.what in _GRAVE]
    places = [(c.case, c.edge, c.kind) for c in grave]
    red |= {sections[place] for place in places if place in sections}
    if grave:
        red |= {"changes", "records"}
    return dict.fromkeys(blocked, "blocked") | dict.fromkeys(red, "fail")


def section_of(m: Measurement) -> str:
    """Return the id of the section of the page that shows a measurement."""
    suite, model = suite_of(m), main()
    if suite == model.suite:
        return model.section_of(m)
    return next((part.section for part in parts() if part.suite == suite), "records")
