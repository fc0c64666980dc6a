"""The command that compares stored runs side by side, as text, JSON or a page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from reports.cli.console import (
    FILE,
    RUN,
    columns,
    examples,
    json_option,
    known_runs,
    runs_option,
    say,
)

# Everything heavy is imported inside the commands: help and usage errors must be instant.


@click.command(
    epilog=examples(
        "compare pinned latest",
        "compare A B --html difference.html",
        "compare A B latest --html runs.html",
        "compare A B --json",
        codes=True,
        about=RUN,
    )
)
@click.argument("before", shell_complete=known_runs)
@click.argument("after", shell_complete=known_runs)
@click.argument("more", nargs=-1, shell_complete=known_runs)
@runs_option
@click.option("--html", type=FILE, help="Write one HTML page that shows the runs side by side.")
@json_option
@click.pass_context
def compare(
    ctx: click.Context,
    before: str,
    after: str,
    more: tuple[str, ...],
    out: Path,
    html: Path | None,
    as_json: bool,
) -> None:
    """Compare two or more stored runs; the exit code is the verdict on the later one.

    More than two runs are printed as a table: a column for each run, a row for every gate
    (measurement with a tolerance) that differs from the first run in any of them. Each run is
    judged against the first only, and the exit code is that of the most severe verdict.
    """
    from reports.registry.lookup import change_lines, find_run, judge_stored
    from reports.registry.side_by_side import range_lines, write_page

    if more:
        folders = [find_run(out, name) for name in (before, after, *more)]
        _compare_several(ctx, folders, html, as_json)
        return
    then, now = find_run(out, before), find_run(out, after)
    judged = judge_stored(now, then)
    lines = [*range_lines(then, judged), *change_lines(judged.decision.changes)]
    page: dict[str, Any] = {}
    if html is not None:
        write_page(html, then, now, judged)
        page = {"page": str(html.resolve())}
        lines.append(page["page"])
    say(ctx, judged.decision, as_json, lines, **page)


def _compare_several(
    ctx: click.Context, folders: list[Path], html: Path | None, as_json: bool
) -> None:
    from reports.registry.several import (
        as_values,
        more_line,
        read_several,
        run_lines,
        table,
        write_several_page,
    )

    several = read_several(folders)
    heads, rows, omitted = table(several)
    lines = [*run_lines(several), columns(heads, rows), *more_line(omitted)]
    found = as_values(several)
    if html is not None:
        write_several_page(html, folders, several)
        found["page"] = str(html.resolve())
        lines.append(found["page"])
    decision = several.decisions[several.gravest]
    if not as_json:
        run = several.runs[several.gravest]
        said = f"run {run.id} against run {several.runs[0].id}: {decision.sentence}"
        decision = replace(decision, sentence=said)
    say(ctx, decision, as_json, lines, **found)


COMMANDS = (compare,)
