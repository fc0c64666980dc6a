"""Page that compares two runs: facts about both, where each starts to fail, and what changed.

It uses the templates, names and colours of a run's own page. Source: docs/reports.md "Two runs side
by side".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parity.engine.measure.measurement import Measurement, Verdict
from reports.page.render import environment, script, style
from reports.page.sections import facts, heat, tables
from reports.page.sections.starts import page_link
from reports.provenance.host import processor
from reports.store.runs import Run
from reports.subject import main
from reports.text import edge_name, edge_rank, label, metric_name, number, share
from reports.verdict import since
from reports.verdict.agreement import agreement
from reports.verdict.decide import Decision
from reports.verdict.replays import suite_of
from stability.core.findings import Severity

CASES = 60
"""Largest number of rows in the table of cases that fail in either run."""
MAPS = 6
"""Largest number of pairs of heat maps; each edge has at most one pair."""


def render(before: Run, then: Decision, after: Run, now: Decision, folders: tuple[str, str]) -> str:
    """Return the page of two runs as one HTML text; equal arguments give equal bytes.

    Args:
        before: The earlier run.
        then: Verdict on the earlier run without a baseline; only its first divergences are shown.
        after: The later run.
        now: Verdict on the later run, compared with the earlier one.
        folders: Relative URLs from the page to the folders of both runs, for links.
    """
    first, second = before.manifest, after.manifest
    log = since.log_command(first, second)
    found = agreement(before, after)
    hrefs = [page_link(folder, m) for folder, m in zip(folders, (first, second), strict=True)]
    context = {
        "style": style(),
        "script": script("page.js"),
        "names": [label(run.id, 60) for run in (before, after)],
        "hrefs": hrefs,
        "decision": now,
        "slug": now.word.value.lower().replace(" ", "-"),
        "commits": since.commits(first, second, bool(now.changes) and not found.equal),
        "agreement": "" if found.sentence() in now.sentence else found.sentence(),
        "log": log,
        "facts": _facts(before, after),
        "machine": facts.environment(second, first),
        "edges": _edges(before, then, after, now),
        "cases": (cases := _cases(before, then, after, now))[:CASES],
        "cases_omitted": max(0, len(cases) - CASES),
        "maps": _maps(before, then, after, now),
        "changes": tables.change_rows(now.changes),
    }
    return environment().get_template("side_by_side.html.j2").render(context)


def _facts(before: Run, after: Run) -> list[tuple[str, str, str, bool]]:
    """Return facts about both runs: (name, earlier value, later value, whether they differ)."""
    columns = [facts_of(run) for run in (before, after)]
    return [
        (name, then, columns[1][name], then != columns[1][name])
        for name, then in columns[0].items()
    ]


def facts_of(run: Run) -> dict[str, str]:
    """Return facts about a run as text by name, such as time, verdict, gates, commit, machine."""
    manifest, gates = run.manifest, [m for m in run.measurements if m.verdict is not Verdict.INFO]
    held = sum(m.verdict is Verdict.PASS for m in gates)
    severities = [f.severity for f in run.findings]
    commit = label(manifest.commit or "unknown", 60)
    reference = manifest.environment.reference
    return {
        "when": facts.moment(manifest.created),
        "verdict when it was stored": label(manifest.verdict or "unknown", 40),
        "gates held": f"{held:,} of {len(gates):,}",
        "findings that are errors": f"{severities.count(Severity.ERROR):,}",
        "warnings": f"{severities.count(Severity.WARNING):,}",
        "planted fault": label(manifest.fault or "none", 60),
        "cases": label(", ".join(manifest.selected) or "all", 200),
        "commit": f"{commit} with uncommitted changes" if manifest.dirty else commit,
        "reference": label(f"{reference.kind or 'absent'} {reference.commit or ''}".strip(), 60),
        "processor": label(processor(manifest.environment), 120),
        "measured in": f"{sum(manifest.durations.values()):.0f} s",
    }


def _edges(before: Run, then: Decision, after: Run, now: Decision) -> list[dict[str, Any]]:
    """Return one row per edge (comparison): for each run its number of passing gates and one gate.

    That gate is the first divergence of the most severe case on the edge; without one it is the
    gate closest to its tolerance. None stands for a run without gates on the edge.
    """
    sides = [
        {edge: _edge(rows, decision.starts) for edge, rows in _by_edge(run).items()}
        for run, decision in ((before, then), (after, now))
    ]
    edges = sorted({*sides[0], *sides[1]}, key=edge_rank)
    return [
        {"name": edge_name(edge), "sides": [side.get(edge) for side in sides]} for edge in edges
    ]


def _by_edge(run: Run) -> dict[str, list[Measurement]]:
    groups: dict[str, list[Measurement]] = {}
    for m in run.measurements:
        if m.verdict is not Verdict.INFO:
            groups.setdefault(m.edge, []).append(m)
    return groups


def _edge(gates: Sequence[Measurement], divergences: Sequence[Measurement]) -> dict[str, Any]:
    held = sum(m.verdict is Verdict.PASS for m in gates)
    start = next((m for m in divergences if m.edge == gates[0].edge), None)
    shown = start or max(gates, key=tables.rank_of)
    return {
        "state": tables.state_of(gates),
        "held": f"{held:,} / {len(gates):,}",
        "cell": tables.cell(shown),
        "starts": start is not None,
    }


def _cases(before: Run, then: Decision, after: Run, now: Decision) -> list[dict[str, Any]]:
    """Return one row per case and edge that fails in either run: the first divergence in each run.

    A run without one has a note instead: nothing fails there, or it was not measured.
    """
    sides = [{(m.case, m.edge): m for m in decision.starts} for decision in (then, now)]
    judged = [
        {(m.case, m.edge) for m in run.measurements if m.verdict is not Verdict.INFO}
        for run in (before, after)
    ]
    # Failures of the later run come first; cases that it repaired come last.
    keys = dict.fromkeys((*sides[1], *sides[0]))
    return [
        {
            "case": label(case, 48),
            "edge": edge_name(edge),
            "sides": [
                _start(side.get((case, edge)), (case, edge) in there)
                for side, there in zip(sides, judged, strict=True)
            ],
        }
        for case, edge in keys
    ]


def _start(m: Measurement | None, judged: bool) -> dict[str, str]:
    if m is None:
        state, what = ("pass", "nothing fails") if judged else ("info", "not measured")
        return {"state": state, "quantity": "", "size": what}
    return {
        "state": "fail" if m.verdict is Verdict.FAIL else "blocked",
        "quantity": label(m.quantity),
        "size": f"{metric_name(m.metric)} {number(m.value)}, {share(m.fraction)} of its tolerance",
    }


def _maps(before: Run, then: Decision, after: Run, now: Decision) -> list[dict[str, Any]]:
    """Return at most `MAPS` pairs of heat maps (earlier run, later run), one pair per edge.

    A pair shows the edge's first case that fails in the later run; without one, its first case that
    fails in the earlier run. An edge without failing cases has no pair.
    """
    starts_of = [{(m.case, m.edge): m for m in decision.starts} for decision in (then, now)]
    chosen: dict[str, str] = {}
    for case, edge in (*starts_of[1], *starts_of[0]):
        chosen.setdefault(edge, case)
    pairs = []
    for edge in sorted(chosen, key=edge_rank):
        key = (chosen[edge], edge)
        maps = [
            heat.heat_map_of(_network(run), *key, first.get(key))
            for run, first in zip((before, after), starts_of, strict=True)
        ]
        if any(maps):
            pairs.append({"name": edge_name(edge), "case": label(key[0], 48), "maps": maps})
    return pairs[:MAPS]


def _network(run: Run) -> list[Measurement]:
    return [m for m in run.measurements if suite_of(m) == main().suite]
