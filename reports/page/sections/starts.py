"""First divergences: the first failing stage of every case, since which run it fails, and why.

The explanations of cases are stored in the run. Pure functions from a run to plain data.
Source: docs/reports.md "What broke, and where".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from parity.engine.measure.localize import Stage
from parity.engine.measure.measurement import Measurement, Verdict
from parity.engine.programs.explanation import NOTE, Explanation
from parity.tolerances import PORT_EDGES
from reports.page.sections.lines import lines, shortened
from reports.page.sections.stages import stage_row
from reports.page.sections.tables import group_id
from reports.store.manifest import Manifest
from reports.store.runs import Run
from reports.store.schema import PAGE, RunKind
from reports.text import edge_name, label, metric_name, number, record_id
from reports.verdict import since
from reports.verdict.changes import What
from reports.verdict.decide import Decision, Word
from reports.verdict.history import History
from reports.verdict.replays import account_commands, command, suite_of
from stability.core.findings import Severity

ROWS = 40
"""Largest number of first divergences listed, each of one case and edge."""
CASES = 12
"""Largest number of failing cases shown with their explanations."""
AROUND = 3
"""Number of stages shown before and after the first wrong one; a collapsed list has all."""


def starts(run: Run, decision: Decision, history: History, runs: str) -> dict[str, Any]:
    """Return the first divergences, and the explanations of the first `CASES` failing cases.

    Args:
        run: The run, with the explanations made during it.
        decision: Verdict on the run.
        history: Earlier runs, to find since when a gate fails.
        runs: Relative URL from the page to the folder of runs, for links to their pages.
    """
    rows = [_row(m, run, history, runs) for m in decision.starts[:ROWS]]
    for above, row in list(itertools.pairwise(rows))[::-1]:
        row["same"] = bool(row["since"]) and (row["case"], row["since"]) == (
            above["case"],
            above["since"],
        )
    failing = [m for m in decision.starts if m.verdict is Verdict.FAIL]
    cases = list(dict.fromkeys((m.case, suite_of(m)) for m in failing))
    accounts = {explanation.case: explanation for explanation in run.explanations}
    errors = [f for f in run.findings if f.severity is Severity.ERROR]
    shown = [
        _case(case, suite, accounts.get(case), _notes(failing, case), run.manifest)
        for case, suite in cases[:CASES]
    ]
    return {
        "first": _first(rows, shown),
        "rows": rows,
        "since": any(row["since"] for row in rows),
        "omitted": max(0, len(decision.starts) - ROWS),
        "cases": shown,
        "cases_omitted": max(0, len(cases) - CASES),
        "findings": [
            {
                "id": record_id(f.probe, "", f.subject, f.metric),
                "probe": label(f.probe, 40),
                "subject": label(f.subject),
                "message": label(f.message, 300),
            }
            for f in errors[:ROWS]
        ],
        "findings_omitted": max(0, len(errors) - ROWS),
        "failing": len(failing) + len(errors),
    }


def _first(rows: list[dict[str, Any]], cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the first screen shows about the first failing case.

    These are the positions of the wrong elements, the source line that computed them, the
    parameters that the first wrong stage uses, since which run the case fails, and the command
    that explains the case. `rows` and `cases` are those of the result of `starts`.
    """
    case = cases[0] if cases else {"account": None, "commands": []}
    account = case["account"] or {"parameters": [], "where": "", "lines": []}
    named = [shortened(line) for line in account["lines"][:1]]
    return {
        "since": rows[0]["since"] if rows else None,
        "parameters": account["parameters"],
        "where": account["where"],
        "lines": named,
        "commands": case["commands"][:1],
    }


def target(decision: Decision) -> str:
    """Return the HTML id of the section that the verdict's sentence is about; "" for a pass."""
    failed = decision.counts.new + decision.counts.persisting
    if decision.word is Word.REGRESSED and not failed:
        return group_id(_worse(decision))
    places = {
        Word.REGRESSED: "starts",
        Word.NOT_COMPARABLE: "starts",
        Word.INCOMPLETE: "suites",
        Word.CHANGED: "changes",
        Word.PASS: "",
    }
    return places[decision.word]


def _worse(decision: Decision) -> What:
    """Return WORSE if a value rose above its earlier ones, else DRIFTED: the level of a group of
    gates (geometric mean or largest value) grew beyond its limit."""
    there = {change.what for change in decision.changes}
    return What.WORSE if What.WORSE in there else What.DRIFTED


def counts(decision: Decision) -> list[dict[str, Any]]:
    """Return the numbers shown under the verdict, with their names and link targets."""
    c = decision.counts
    # Without an earlier run no failure can be called new.
    new = "new failures" if decision.baseline_id else "failures"
    rows = (
        (c.new, new, "bad", group_id(What.NEW)),
        (c.persisting, "persisting", "bad", group_id(What.PERSISTING)),
        (c.worse, "worse", "bad", group_id(_worse(decision))),
        (c.fixed, "fixed", "", group_id(What.FIXED)),
        (c.changed, "values changed", "note", group_id(What.CHANGED)),
        (c.not_comparable, "not comparable", "note", "records?verdict=not+comparable"),
        (c.skipped, "skipped", "note", "suites"),
        (c.not_run, "not run", "note", "suites"),
        (c.warnings, "warnings", "note", "records?verdict=warning"),
    )
    return [
        {"n": n, "what": what, "state": state if n else "zero", "href": place if n else ""}
        for n, what, state, place in rows
    ]


def before(run: Run, history: History, runs: str) -> dict[str, str] | None:
    """Return the baseline's name, a link to its page and the commits since it; None without one."""
    if history.baseline is None:
        return None
    manifest = history.baseline.manifest
    return {
        "run": label(manifest.id, 60),
        "href": page_link(f"{runs}/{manifest.id}", manifest),
        "commits": f"commits since: {since.commits(manifest, run.manifest)}",
    }


def page_link(folder: str, manifest: Manifest) -> str:
    """Return the URL of the page in a run's folder; "" for a kind of run that has no page."""
    return f"{folder}/{PAGE}" if manifest.kind in (RunKind.NIGHTLY, RunKind.PORT) else ""


def _row(m: Measurement, run: Run, history: History, runs: str) -> dict[str, Any]:
    fails = m.verdict is Verdict.FAIL
    times = m.fraction
    return {
        "id": record_id(*m.key),
        "state": "fail" if fails else "blocked",
        "quantity": label(m.quantity),
        "case": label(m.case, 48),
        "edge": edge_name(m.edge),
        "metric": metric_name(m.metric),
        "value": number(m.value),
        "tolerance": number(None if math.isnan(m.tolerance) else m.tolerance),
        "times": f"{times:,.1f}×" if math.isfinite(times) and times < 1e4 else number(times),
        "since": _since(m, run, history, runs) if fails else None,
        "same": False,
    }


def _since(m: Measurement, run: Run, history: History, runs: str) -> dict[str, str] | None:
    found = since.since_when(m, run, history)
    if found is None:
        return None
    held = found.held
    return {
        "sentence": since.sentence(found, run),
        "run": label(found.folder, 60),
        "href": page_link(f"{runs}/{found.folder}", held) if held else "",
        "commits": since.commits(held, found.failed) if held else "",
        "command": since.log_command(held, found.failed) if held else "",
    }


def _case(
    case: str, suite: str, explanation: Explanation | None, notes: list[str], manifest: Manifest
) -> dict[str, Any]:
    commands = account_commands(case, suite, manifest.fault)
    again = {"label": f"measure {case} again", "command": command(case, manifest)}
    others = bool(manifest.ports) or manifest.without_megalodon
    return {
        "name": label(case, 48),
        "account": explanation and _account(explanation),
        "notes": notes,
        "explainable": bool(commands),
        "commands": [*commands, *([] if others else [again])],
    }


def _notes(failing: Sequence[Measurement], case: str) -> list[str]:
    """Return the distinct notes of a case's failing measurements, such as on a wrong collective."""
    notes = (m.note for m in failing if m.case == case and m.note)
    return [label(note, 400) for note in dict.fromkeys(notes)]


def _account(explanation: Explanation) -> dict[str, Any]:
    stages = [_stage(stage, explanation) for stage in explanation.stages]
    at = next((i for i, stage in enumerate(stages) if stage["here"]), None)
    worst = explanation.worst
    return {
        "sentence": _sentence(explanation),
        "edge": edge_name(explanation.edge),
        "truth": "the original's" if explanation.edge in PORT_EDGES else "the oracle's",
        "near": [] if at is None else stages[max(0, at - AROUND) : at + AROUND + 1],
        "stages": stages,
        "worst": worst
        and {
            "index": f"[{', '.join(map(str, worst.index))}]",
            "actual": repr(worst.actual),
            "expected": repr(worst.expected),
        },
        "where": label(explanation.where, 300),
        "lines": lines(explanation.lines),
        "parameters": [label(name, 120) for name in explanation.parameters],
        "also": [label(name, 120) for name in explanation.also_broken],
        "carried": _carried(explanation) if at is not None else "",
    }


def _carried(explanation: Explanation) -> str:
    if not explanation.carried:
        return "No other stage is wrong because of it."
    if explanation.carried == 1:
        return "1 later stage is wrong only because of what it was fed."
    return f"{explanation.carried:,} later stages are wrong only because of what they were fed."


def _sentence(explanation: Explanation) -> str:
    if explanation.holds:
        return f"Between JAX and the oracle: {explanation.meaning}"
    size = f"relative L2 {number(explanation.value)}, tolerance {number(explanation.tolerance)}"
    what = label(explanation.quantity, 120)
    said = explanation.note[:1].upper() + explanation.note[1:]
    note = f" {label(said, NOTE)}." if said else ""
    if explanation.culprit:
        return f"It starts at {what}, {explanation.meaning}: {size}.{note}"
    return f"It starts at {what}: {size}.{note} {explanation.meaning}"


def _stage(stage: Stage, explanation: Explanation) -> dict[str, Any]:
    here = explanation.culprit is stage
    return stage_row(stage.name, stage.free, stage.forced, stage.tolerance, here) | {
        "amplification": number(stage.amplification),
    }
