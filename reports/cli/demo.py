"""The command `demo`: a healthy run, the same run with a planted bug, and their pages."""

from __future__ import annotations

import shlex
import webbrowser
from pathlib import Path
from typing import Any

import click

from reports.cli.console import OK, REGRESSED, examples, progress, quiet_option, unchecked
from reports.cli.names import CASE, FAULT

# Everything heavy is imported inside the commands: help and usage errors must be instant.


@click.command(
    epilog=examples(
        "demo",
        "demo --no-open",
        "demo --case plain --fault cema_not_causal --no-open",
    )
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("demo"),
    show_default=True,
    help="Folder for the two runs, separate from the folder of nightly runs.",
)
@click.option("--case", type=CASE, default="length_c", show_default=True, help="Case to compare.")
@click.option(
    "--fault",
    type=FAULT,
    default="rope_keys_one_late",
    show_default=True,
    help="Bug to plant in the second run.",
)
@click.option("--open/--no-open", "opened", default=True, help="Open both pages in the browser.")
@quiet_option
@click.pass_context
def demo(ctx, out: Path, case: str, fault: str, opened: bool, quiet: bool) -> None:
    """Show in a minute what a nightly run reports: one that passes, and one with a planted bug.

    Both are real runs of one case, compared with the recordings of megalodon-hf, so only this
    package is needed. Exit code 0: the first run passed and the bug was found in the second.
    """
    report = progress(quiet)
    unchecked()
    from parity.faults import by_name
    from reports.nightly.run import Options, nightly
    from reports.store.runs import check_writable
    from reports.verdict.decide import ExitCode

    check_writable(out)
    report("first run: the unmodified model")
    healthy = nightly(Options(out, (case,), "recorded"), report)
    report(f"second run: {by_name(fault).how}")
    broken = nightly(Options(out, (case,), "recorded", fault=fault), report)
    assert healthy.decision is not None and broken.decision is not None
    for decision, page in ((healthy.decision, healthy.page), (broken.decision, broken.page)):
        click.echo(f"{decision.word}: {page.resolve()}")
    click.echo("\n".join(_what_to_look_at(healthy.decision, broken.decision, by_name(fault))))
    where = "" if out == Path("runs") else f" --out {shlex.quote(str(out))}"
    ask = [f"`megalodon-numerics {command}{where}`" for command in ("list", "gate latest")]
    click.echo(f"try with these runs: {', '.join(ask)}")
    if opened:
        for outcome in (healthy, broken):
            webbrowser.open(outcome.page.resolve().as_uri())
    held = healthy.decision.exit_code is ExitCode.PASS
    found = broken.decision.exit_code is ExitCode.REGRESSION
    ctx.exit(OK if held and found else REGRESSED)


def _what_to_look_at(healthy: Any, broken: Any, fault: Any) -> list[str]:
    """Return three lines on what to see on the pages: both verdicts and the second's heat map."""
    from reports.text import count

    start = broken.starts[0].quantity if broken.starts else "nothing"
    gates = count(healthy.counts.gates, "gate")
    return [
        f"1. the first page: {healthy.counts.passed:,} of {gates} hold, and the sentence names the "
        "one closest to its tolerance",
        f"2. the second page: its sentence says that the difference starts at {start}; the planted "
        f"bug is {fault.name}: {fault.how}",
        "3. its heat map: layers down, modules across; the first red cell has a thick frame, and "
        "later red cells only propagate its error",
    ]


COMMANDS = (demo,)
