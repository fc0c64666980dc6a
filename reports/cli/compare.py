"""The command that sets two stored runs side by side: what changed, as text, JSON or a page."""

from __future__ import annotations

from pathlib import Path

import click

from reports.cli.console import FILE, RUN, examples, json_option, known_runs, runs_option, say

# Everything heavy is imported inside the commands: help and usage errors must be instant.


@click.command(
    epilog=examples(
        "compare pinned latest",
        "compare A B --html difference.html",
        "compare A B --json",
        codes=True,
        about=RUN,
    )
)
@click.argument("before", shell_complete=known_runs)
@click.argument("after", shell_complete=known_runs)
@runs_option
@click.option("--html", type=FILE, help="Write a page that shows both side by side, one file.")
@json_option
@click.pass_context
def compare(
    ctx: click.Context, before: str, after: str, out: Path, html: Path | None, as_json: bool
) -> None:
    """Say what changed from one stored run to another; the exit code judges the second."""
    from reports.registry.lookup import change_lines, find_run, judge_stored
    from reports.registry.side_by_side import range_lines, write_page

    then, now = find_run(out, before), find_run(out, after)
    judged = judge_stored(now, then)
    lines = [*range_lines(then, judged), *change_lines(judged.decision.changes)]
    more = {}
    if html is not None:
        write_page(html, then, now, judged)
        more = {"page": str(html.resolve())}
        lines.append(more["page"])
    say(ctx, judged.decision, as_json, lines, **more)


COMMANDS = (compare,)
