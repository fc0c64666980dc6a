"""Commands `history`, `pin`, `retire` and `prune`, which use many stored runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from reports.cli.console import (
    RUN,
    RunsFolder,
    count_option,
    examples,
    json_option,
    known_runs,
    runs_option,
    show,
)
from reports.cli.names import stored_names
from reports.printable import printable

# Everything heavy is imported inside the commands: help and usage errors must be instant.


@click.command(
    epilog=examples(
        "history",
        "history plain",
        "history plain logits",
        "history plain logits --out 'runs/*' --json",
        "history --kind port mlp",
        about="--out takes patterns that DuckDB can read, also 's3://bucket/*/runs/*'. The trend "
        "covers the newest 24 runs, scaled from their minimum to their maximum.",
    )
)
@click.argument("case", required=False, shell_complete=stored_names)
@click.argument("quantity", required=False, shell_complete=stored_names)
@click.option(
    "--out",
    "place",
    type=RunsFolder(patterns=True),
    default="runs",
    show_default=True,
    help="Folder that holds the runs, here or on shared storage, or a pattern of run folders.",
)
@click.option(
    "--kind",
    type=click.Choice(("nightly", "port", "pytest")),
    help="Kind of runs.  [default: nightly, or the kind that exists]",
)
@count_option("--limit", 40, "Maximal number of rows; --json prints all.")
@json_option
def history(case, quantity, place, kind, limit, as_json) -> None:
    """Show how gates developed over all stored runs.

    Without arguments: every gate, the one that uses most of its tolerance first. With CASE: the
    gates of that case. With CASE and QUANTITY: each value, oldest first. Runs with a planted fault
    are left out, and unreadable ones are named.
    """
    from reports.registry.lookback import EVERYTHING, look_back
    from reports.store.schema import RunKind
    from reports.store.shared import address_of

    most = EVERYTHING if as_json else limit
    answer = look_back(str(place), case, quantity, most, RunKind(kind) if kind else None)
    if as_json:
        from reports.text import for_json

        rows = [for_json(row) for row in answer.rows]
        failures = [{"folder": folder, "why": why} for folder, why in answer.unreadable]
        click.echo(json.dumps({"runs": answer.runs, "rows": rows, "unreadable": failures}))
        return
    _print_history(answer.rows, answer.runs, place if isinstance(place, str) else address_of(place))
    for folder, why in answer.unreadable:
        click.echo(printable(f"unreadable: {folder}: {why}"), err=True)


def _print_history(rows: list[dict[str, Any]], runs: int, place: str) -> None:
    from rich.table import Table
    from rich.text import Text

    from reports.registry.lookback import sparkline
    from reports.text import number, share

    if not rows:
        click.echo(f"no gates in {runs} runs of {place}; `nightly` makes a run")
        return
    if "id" in rows[0]:
        table = Table("run", "value", "used", "verdict", "compared", "metric", box=None)
        for row in rows:
            size = number(row["value"]), share(row["share"])
            words = (row[name] for name in ("id", "verdict", "edge", "metric"))
            name, *rest = map(printable, words)
            table.add_row(*map(Text, (name, *size, *rest)))
    else:
        heads = ("case", "quantity", "compared", "metric", "used", "last", "median", "runs")
        table = Table(*heads, "trend", box=None)
        for row in rows:
            names = (printable(row[name]) for name in ("case", "quantity", "edge", "metric"))
            size = share(row["share"]), number(row["last"]), number(row["median"])
            cells = (*names, *size, str(row["runs"]), sparkline(row["recent"]))
            # Names are data and may look like rich markup.
            table.add_row(*map(Text, cells))
    # Names must stay searchable: they wrap and are never cut.
    for column in table.columns:
        column.overflow = "fold"
    show(table)


@click.command(
    epilog=examples(
        'pin latest --reason "sums in float32 are ordered differently, docs/parity.md"',
        about=RUN,
    )
)
@click.argument("run", shell_complete=known_runs)
@click.option("--reason", required=True, help="Why these error levels are right, for a reviewer.")
@runs_option
@json_option
def pin(run: str, reason: str, out: Path, as_json: bool) -> None:
    """Pin RUN: later nightly runs may not drift from its error levels.

    Writes a file in reports/pinned for the run's machine and kind of reference, or for a port in
    `pinned` beside the folder of its runs. It has one line per case, comparison and kind of
    quantity, to be reviewed and committed as a diff. Refused (exit code 2) in a tree with
    uncommitted changes, and for a run made in one, of only some cases, with a planted fault or a
    broken tolerance.
    """
    from reports.registry.lookup import find_run
    from reports.registry.pin import pin_run

    done = pin_run(find_run(out, run), reason)
    if as_json:
        fields = {"run": done.pin.run, "path": str(done.path), "levels": len(done.pin.groups)}
        click.echo(json.dumps(fields))
        return
    lines = [f"pinned {done.pin.run}", *done.lines(), f"{done.path}", "review: git diff"]
    click.echo(printable("\n".join(lines)))


@click.command(
    epilog=examples(
        "retire latest slow_decay --reason 'covered by large_mean'",
        "retire latest 'jax64:oracle | gradient' --reason 'no oracle of gradients any more'",
        about=RUN + " NAME is a suite, case, comparison or kind of gates, or several of them.",
    )
)
@click.argument("run", shell_complete=known_runs)
@click.argument("name")
@click.option("--reason", required=True, help="Why NAME is no longer measured, for a reviewer.")
@runs_option
def retire(run: str, name: str, reason: str, out: Path) -> None:
    """Stop expecting NAME, which earlier runs measured and RUN does not.

    A run that does not plan what earlier ones measured is INCOMPLETE until that is retired. Writes
    retired.json beside the pinned runs, to be reviewed and committed. A later run that measures
    NAME again makes it expected again.
    """
    from reports.registry.lookup import find_run
    from reports.registry.retire import retire as retire_work

    done = retire_work(find_run(out, run), name, reason)
    lines = [f"retired {name}: {done.suites} suites, {done.groups} groups of gates"]
    lines += [f"still expected: {done.left} more suites or groups"] if done.left else []
    click.echo(printable("\n".join([*lines, f"{done.path}", "review: git diff"])))


@click.command(epilog=examples("prune", "prune --keep 365", "prune --keep 90 --delete"))
@count_option("--keep", 90, "Newest runs to keep of each kind on each class of device.")
@click.option(
    "--delete", "really", is_flag=True, help="Delete them; otherwise they are only listed."
)
@runs_option
@json_option
def prune(keep: int, really: bool, out: Path, as_json: bool) -> None:
    """List old runs that are neither pinned nor a baseline; with --delete, delete them.

    Pinned runs and the baseline of the newest run are always kept, and unreadable folders are named
    and kept.
    """
    from reports.registry import retention
    from reports.registry.runs_page import RUNS_PAGE, renew_runs_page
    from reports.store.runs import check_root

    check_root(out)
    plan = retention.plan(out, keep)
    if really:
        retention.clean(out)
    for folder in plan.goes if really else ():
        retention.delete(folder)
    if really and (out / RUNS_PAGE).is_file():
        # Its links would lead to deleted runs.
        renew_runs_page(out, lambda line: click.echo(printable(line), err=True))
    if as_json:
        goes = [str(folder) for folder in plan.goes]
        spared = {str(folder): why for folder, why in (*plan.spared, *plan.unreadable)}
        click.echo(
            json.dumps({"deleted": really, "kept": plan.newest, "goes": goes, "spared": spared})
        )
        return
    verb = "deleted" if really else "would delete"
    gone = "\n".join(f"{verb} {folder.name}" for folder in plan.goes)
    click.echo(printable(gone) or "nothing to delete")
    for folder, why in plan.spared:
        click.echo(printable(f"keeping {folder.name}: {why}"))
    for folder, why in plan.unreadable:
        click.echo(printable(f"unreadable, kept: {folder.name}: {why}"), err=True)
    if plan.goes and not really:
        click.echo("nothing was deleted; run it again with --delete to delete them", err=True)


COMMANDS = (history, pin, retire, prune)
