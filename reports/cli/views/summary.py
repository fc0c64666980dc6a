"""A verdict as Markdown of limited size, for the summary of a CI job.

Source: docs/reports.md "Command line".
"""

from __future__ import annotations

from itertools import accumulate

from reports.store.runs import Run
from reports.text import contrast, count, edge_name, label, metric_name
from reports.verdict.changes import Change
from reports.verdict.decide import Decision

LIMIT = 900 * 1024
"""Largest size in bytes of UTF-8: CI drops a step summary of more than 1 MiB as a whole."""
_HEAD = (
    "| What | Quantity | Case | Compared | Metric | Before | Now | Note |\n" + "| --- " * 8 + "|"
)


def markdown(run: Run, decision: Decision, limit: int = LIMIT) -> str:
    """Return the summary: verdict, facts about the comparison, and changes since earlier runs
    (`Decision.changes`), most severe first.

    Changes that do not fit into `limit` bytes are counted in the last line.
    """
    head = "\n".join(
        [
            f"## {decision.word}",
            "",
            _plain(decision.sentence, 2000),
            "",
            *(f"- {_plain(fact)}" for fact in _facts(run, decision)),
            "",
        ]
    )
    lines = [_row(change, decision.baseline_id is not None) for change in decision.changes]
    if not lines:
        return f"{head}\n"
    # Reserve 64 bytes for the last line, which counts the omitted changes.
    room = limit - len(f"{head}\n{_HEAD}\n".encode()) - 64
    shown = sum(size <= room for size in accumulate(len(line.encode()) + 1 for line in lines))
    more = len(lines) - shown
    end = [f"\nand {count(more, 'more change')}"] if more else []
    return "\n".join([head, _HEAD, *lines[:shown], *end, ""])


def _facts(run: Run, decision: Decision) -> list[str]:
    environment, counts = run.manifest.environment, decision.counts
    device, reference = environment.device, environment.reference
    facts = [
        f"run {run.id} on {device.kind or ''} ({device.name or ''})",
        f"megalodon-hf {reference.kind or 'absent'} {reference.commit or ''}; "
        f"baseline {decision.baseline_id or 'none'}",
        f"{counts.passed:,} of {counts.gates:,} gates hold; {counts.new:,} "
        f"{'new' if decision.baseline_id else 'failing'}, "
        f"{counts.persisting:,} persisting, {counts.fixed:,} fixed, "
        f"{counts.changed:,} values changed, "
        f"{counts.skipped:,} skipped, {counts.not_run:,} not run",
    ]
    return [*facts, *(f"levels compared with {text}" for text in decision.against)]


def _row(change: Change, baseline: bool) -> str:
    before, now = contrast(change.before, change.now)
    edge = edge_name(change.edge) if change.edge else ""
    names = (
        change.what.wording(baseline),
        change.quantity,
        change.case,
        edge,
        metric_name(change.metric),
    )
    return f"| {' | '.join([*map(_plain, names), before, now, _plain(change.note)])} |"


def _plain(text: str, size: int = 160) -> str:
    """Return a text escaped for Markdown and shortened to `size`: names are data, never markup."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>()#+!|~$&@" else c for c in label(text, size))
