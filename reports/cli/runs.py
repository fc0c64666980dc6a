"""Commands `list`, `gate`, `report` and `open` about stored runs; `doctor` about the machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from reports.cli.console import (
    FILE,
    RUN,
    append,
    columns,
    examples,
    json_option,
    known_runs,
    listed_runs_option,
    runs_option,
    say,
    summary_option,
)
from reports.printable import printable

# Everything heavy is imported inside the commands: help and usage errors must be instant.


@click.command("list", epilog=examples("list", "list --html", "list --json"))
@listed_runs_option
@click.option(
    "--html",
    is_flag=True,
    help="Write the page of all runs, index.html beside them, and print its path.",
)
@json_option
def list_command(out: Path, html: bool, as_json: bool) -> None:
    """List the stored runs with their verdicts, oldest first.

    The verdict is that given when the run was stored; `gate RUN` judges it again. A run without a
    stored verdict, from an old version, shows `gate RUN` instead; a bench shows `none`. --html
    writes the list as a page: verdicts over time, when gates began or ceased to fail, a filter, and
    links to the pages of the runs. The page is also written after each nightly run.
    """
    if html:
        if as_json:
            raise click.UsageError("--html writes a page and --json prints; use one of them.")
        click.echo(_write_page(out))
        return
    from reports.registry.listing import summarise_runs
    from reports.store.runs import check_root, none_yet

    check_root(out)
    runs, unreadable = summarise_runs(out)
    if as_json:
        failures = [{"folder": str(folder), "why": why} for folder, why in unreadable]
        click.echo(json.dumps({"runs": [asdict(run) for run in runs], "unreadable": failures}))
        return
    heads = ("run", "verdict", "kind", "device", "reference", "gates", "broken", "planted")
    rows = []
    for run in runs:
        numbers = (f"{run.gates:,}", f"{run.broken:,}") if run.gates else ("", "")
        verdict = run.verdict or ("gate RUN" if run.gates else "none")
        rows.append((run.id, verdict, run.kind, run.device, run.reference, *numbers, run.fault))
    if runs:
        click.echo(columns(heads, rows))
    else:
        click.echo(none_yet(out))
    for folder, why in unreadable:
        click.echo(printable(f"unreadable: {folder.name}: {why}"), err=True)


def _write_page(out: Path) -> Path:
    from reports.registry.runs_page import write_runs_page
    from reports.store.shared import refresh

    # For shared storage the page is written to the local copy.
    refresh(out)
    return write_runs_page(out).resolve()


@click.command(
    epilog=examples(
        "gate latest",
        "gate latest --against pinned",
        "gate latest --max-age 2",
        "gate latest --json",
        codes=True,
        about=RUN,
    )
)
@click.argument("run", shell_complete=known_runs)
@click.option(
    "--against",
    metavar="RUN",
    shell_complete=known_runs,
    help="Judge against this run only.  [default: baseline, history and pinned run]",
)
@click.option(
    "--max-age",
    type=click.FloatRange(min=0, min_open=True),
    metavar="HOURS",
    help="Fail if the run is older: after a job that stored nothing, `latest` is an earlier run.",
)
@runs_option
@summary_option
@json_option
@click.pass_context
def gate(ctx, run, against, max_age, out, summary_md, as_json) -> None:
    """Judge a stored run again; the exit code is that of the verdict.

    Prints which run was judged and its age. If `latest` passes but a newer folder is damaged, the
    verdict is INCOMPLETE, since it is unknown whether the newest run passes.
    """
    from reports.cli.views.summary import markdown
    from reports.registry.lookup import (
        check_age,
        comparison_lines,
        explanations_of,
        find_run,
        judge_stored,
        look_up,
        run_line,
        withheld,
    )
    from reports.store.runs import one_look

    with one_look():
        other = find_run(out, against) if against else None
        found = look_up(out, run)
        if other is not None and other.resolve() == found.folder.resolve():
            raise click.UsageError(
                f"expected another run than {found.folder.name} to judge it against: a run is "
                "always equal to itself"
            )
        if max_age is not None:
            check_age(found.folder, max_age)
        result = judge_stored(found.folder, other)
    decision = withheld(result.decision, found)
    if summary_md is not None:
        append(summary_md, markdown(result.run, decision))
    damaged = [f"newer, and damaged: {folder.name}: {why}" for folder, why in found.newer]
    others = [f"of another subject, not judged here: {name}: {word}" for name, word in found.others]
    lines = [run_line(found, result.run), *damaged, *others, *comparison_lines(result)]
    newer = [{"folder": str(folder), "why": why} for folder, why in found.newer]
    more: dict[str, Any] = {
        "run": found.folder.name,
        "created": result.run.manifest.created,
        "damaged": newer,
    }
    if as_json:
        more["explanations"] = explanations_of(result.run)
    say(ctx, decision, as_json, lines, **more)


@click.command(epilog=examples("report latest", "report latest --page night.html", about=RUN))
@click.argument("run", shell_complete=known_runs)
@click.option(
    "--page",
    type=FILE,
    default=Path("report.html"),
    show_default=True,
    help="File to write; the stored run is not changed.",
)
@runs_option
def report(run: str, page: Path, out: Path) -> None:
    """Draw the page of a stored run again, with the installed version of megalodon-numerics."""
    from megalodon_jax.files import written_aside
    from reports.registry.lookup import find_run, page_of

    text = page_of(find_run(out, run), page)
    with written_aside(page) as aside:
        aside.write_text(text, encoding="utf-8")
    click.echo(page.resolve())


@click.command("open", epilog=examples("open", "open latest --out runs", "open --list", about=RUN))
@click.argument("run", default="latest", shell_complete=known_runs)
@click.option("--list", "listed", is_flag=True, help="Open the page of all runs, updated.")
@runs_option
def open_command(run: str, listed: bool, out: Path) -> None:
    """Open the page of a stored run in the browser, or the page of all runs."""
    from reports.registry.lookup import find_run
    from reports.store.runs import PAGE

    page = _write_page(out) if listed else find_run(out, run) / PAGE
    if not page.is_file():
        raise FileNotFoundError(f"{page} not found; `report {run}` draws it again.")
    click.echo(page.resolve())
    click.launch(page.resolve().as_uri())


@click.command(epilog=examples("doctor", "doctor --json"))
@runs_option
@json_option
def doctor(out: Path, as_json: bool) -> None:
    """Show what to change on this machine, and the facts that affect results. Writes nothing."""
    from reports.cli.doctor import examine
    from reports.cli.views.doctor import show_lines

    lines = examine(out)
    if as_json:
        click.echo(json.dumps([asdict(line) for line in lines]))
        return
    show_lines(lines)


COMMANDS = (list_command, gate, report, open_command, doctor)
