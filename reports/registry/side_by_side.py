"""Two stored runs side by side: the commits between them, and a page that shows both.

Source: docs/reports.md "Two runs side by side".
"""

from __future__ import annotations

from pathlib import Path

from megalodon_jax.files import written_aside
from reports.page.side_by_side import render
from reports.registry.lookup import JudgedRun, read_judgeable, runs_from
from reports.verdict import since
from reports.verdict.agreement import agreement
from reports.verdict.decide import decide


def range_lines(before: Path, after: JudgedRun) -> list[str]:
    """Return lines that say how many gates two runs share, and which commits lie between the runs.

    The line about the gates is left out if the verdict's sentence already has it.

    Args:
        before: Folder of the earlier run.
        after: The later run, judged against the earlier.

    Raises:
        StoreError: the earlier run cannot be read.
    """
    then, now, decision = read_judgeable(before), after.run, after.decision
    found = agreement(then, now)
    shared = [] if found.sentence() in decision.sentence else [f"compared: {found.sentence()}"]
    changed = bool(decision.changes) and not found.equal
    return [*shared, f"commits: {since.commits(then.manifest, now.manifest, changed)}"]


def write_page(page: Path, before: Path, after: Path, judged: JudgedRun) -> None:
    """Write the page that shows two runs side by side.

    Args:
        page: path of the page.
        before: folder of the earlier run.
        after: folder of the later run.
        judged: the later run, judged against the earlier.

    Raises:
        StoreError: the earlier run cannot be read.
        OSError: the page cannot be written; the old page is kept.
    """
    then = read_judgeable(before)
    text = render(
        then,
        decide(then, None),
        judged.run,
        judged.decision,
        (f"{runs_from(page, before)}/{before.name}", f"{runs_from(page, after)}/{after.name}"),
    )
    with written_aside(page) as aside:
        aside.write_text(text, encoding="utf-8")
