"""A run as JUnit XML, with one test per case and comparison, for CI systems.

A test per measurement would be tens of thousands, more than CI systems can show. The format is that
of the Jenkins JUnit plug-in, which GitLab, Azure and others also read. Source: docs/commands.md
"For other tools".
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence

from parity.engine.measure.localize import first_divergence
from parity.engine.measure.measurement import Measurement, Verdict
from reports.store.runs import Run
from reports.text import count, edge_name, label, metric_name, number
from reports.verdict.decide import Decision, ExitCode, Word
from reports.verdict.replays import suite_of
from stability.core.findings import Finding, Severity

SHOWN = 50
"""Largest number of lines listed in a failing test."""
STABILITY = "stability"
"""Name in run.json of the suite of probes."""
SKIPPED = "skipped"
"""JUnit's outcome for a comparison in which no measurement has a tolerance."""


def junit(run: Run, decision: Decision) -> str:
    """Return a run and its verdict as JUnit XML.

    The document has a failure or an error exactly if the exit code is not 0. Its last suite is the
    verdict itself: a value that left its history breaks no tolerance, and an incomplete suite may
    have no measurement.
    """
    manifest = run.manifest
    times = {(t.suite, t.case, t.edge): t.seconds for t in manifest.times}
    root = ET.Element("testsuites", name=f"megalodon-numerics {label(run.id)}")
    groups: dict[str, dict[tuple[str, str], list[Measurement]]] = {}
    for m in run.measurements:
        groups.setdefault(suite_of(m), {}).setdefault((m.case, m.edge), []).append(m)
    for name, cases in groups.items():
        tests = [
            _timed(_comparison(name, *key, rows), times.get((name, *key)))
            for key, rows in cases.items()
        ]
        _suite(root, name, tests, manifest.created, manifest.durations.get(name, 0.0))
    probes: dict[str, list[Finding]] = {}
    for finding in run.findings:
        probes.setdefault(finding.probe, []).append(finding)
    if probes:
        tests = [
            _timed(_probe(probe, rows), times.get((STABILITY, probe, "")))
            for probe, rows in probes.items()
        ]
        _suite(root, "probes", tests, manifest.created, manifest.durations.get(STABILITY, 0.0))
    unfinished = [
        _test("suites", s.name, "error", s.reason or f"{s.executed} of {s.planned} were executed")
        for s in manifest.suites
        if not s.whole
    ]
    _suite(root, "verdict", [*unfinished, _verdict(decision)], manifest.created, facts=_facts(run))
    for key in ("tests", "failures", "errors", "skipped"):
        root.set(key, str(sum(int(suite.get(key, "0")) for suite in root)))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _facts(run: Run) -> dict[str, str]:
    environment = run.manifest.environment
    facts = {
        "run": run.id,
        "commit": run.manifest.commit,
        "device": environment.device.kind,
        "reference": environment.reference.kind,
        "planted fault": run.manifest.fault,
    }
    return {name: value for name, value in facts.items() if value}


def _suite(
    root: ET.Element,
    name: str,
    tests: Sequence[ET.Element],
    created: str,
    seconds: float = 0.0,
    facts: dict[str, str] | None = None,
) -> None:
    suite = ET.SubElement(root, "testsuite", name=label(name), tests=str(len(tests)))
    for key, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(key, str(sum(test.find(tag) is not None for test in tests)))
    # The schema has no time zone; the time is UTC, as in run.json.
    suite.set("timestamp", label(created.partition("+")[0]))
    # Omit 0, which was not measured.
    if seconds:
        suite.set("time", f"{seconds:.3f}")
    if facts:
        properties = ET.SubElement(suite, "properties")
        for key, value in facts.items():
            ET.SubElement(properties, "property", name=key, value=label(value))
    suite.extend(tests)


def _test(group: str, name: str, tag: str = "", message: str = "", text: str = "") -> ET.Element:
    test = ET.Element("testcase", classname=label(group), name=label(name))
    if tag:
        # Names and notes are data: `label` escapes control characters, which XML forbids.
        outcome = ET.SubElement(test, tag, message=label(message, 1000))
        if tag != SKIPPED:
            outcome.set("type", tag)
        outcome.text = text or None
    return test


def _timed(test: ET.Element, seconds: object) -> ET.Element:
    """Set the duration of a test in seconds, unless missing or invalid, and return the test."""
    # A stored run may contain any JSON value.
    if isinstance(seconds, int | float) and 0 <= seconds < math.inf:
        test.set("time", f"{seconds:.3f}")
    return test


def _comparison(suite: str, case: str, edge: str, rows: Sequence[Measurement]) -> ET.Element:
    group, name = f"{suite}.{case}", edge_name(edge)
    gates = sum(m.verdict is not Verdict.INFO for m in rows)
    if not gates:
        return _test(group, name, SKIPPED, "no tolerance applies: nothing was judged")
    first = first_divergence(rows)
    if first is None:
        return _test(group, name)
    failing = [m for m in rows if m.verdict is Verdict.FAIL]
    other = [m for m in rows if m.verdict is Verdict.NOT_COMPARABLE]
    text = _lines(_row(m) for m in (*failing, *other))
    what = "failure" if failing else "error"
    starts = f"starts at {_row(first)}; {len(failing) + len(other)} of {count(gates, 'gate')}"
    return _test(group, name, what, starts, text)


def _probe(probe: str, rows: Sequence[Finding]) -> ET.Element:
    errors = [f for f in rows if f.severity is Severity.ERROR]
    if not errors:
        return _test("probes", probe)
    text = _lines(f"{f.subject}: {f.message} {f.remedy}".strip() for f in errors)
    return _test("probes", probe, "failure", f"{count(len(errors), 'error')}: {text}", text)


def _verdict(decision: Decision) -> ET.Element:
    # Decided by the exit code, not by a list of words: a word added later must not pass by default.
    if decision.exit_code == ExitCode.PASS:
        return _test("verdict", "verdict")
    tag = "failure" if decision.word is Word.REGRESSED else "error"
    text = _lines(f"{c.what}: {c.quantity} in {c.case} {c.note}".strip() for c in decision.changes)
    return _test("verdict", "verdict", tag, f"{decision.word}: {decision.sentence}", text)


def _row(m: Measurement) -> str:
    if m.verdict is Verdict.NOT_COMPARABLE:
        return f"{m.quantity}: not comparable: {m.note}"
    size = f"{metric_name(m.metric)} {number(m.value)} of {number(m.tolerance)}"
    return f"{m.quantity}: {size} {m.note}".strip()


def _lines(rows: Iterable[str]) -> str:
    texts = [label(row, 400) for row in rows]
    more = [f"and {len(texts) - SHOWN:,} more"] if len(texts) > SHOWN else []
    return "\n".join([*texts[:SHOWN], *more])
