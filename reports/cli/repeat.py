"""The command `same`: finds the first value that differs between two runs of one training."""

from __future__ import annotations

from pathlib import Path

import click

from reports.cli.console import INCOMPLETE, NOT_COMPARABLE, OK, REGRESSED, examples
from reports.printable import printable

# Everything heavy is imported inside the command: help and usage errors must be instant.


@click.command(
    epilog=examples(
        "same first.jsonl second.jsonl",
        about="Exit code 0: equal; 1: they differ; 3: equal where both have values, but one lacks "
        "some; 4: no value in common.",
    )
)
@click.argument("first", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("second", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.pass_context
def same(ctx: click.Context, first: Path, second: Path) -> None:
    """Show where two runs of one training first differ: the step, and the first unequal value.

    FIRST and SECOND are files of digests, which `stability.repeat.DigestLog` writes while a run
    trains (docs/training.md). Values are compared bit by bit, by their digests.
    """
    from stability.repeat import compare_logs, read_log

    one, other = read_log(first), read_log(second)
    if first.resolve() == second.resolve():
        raise click.UsageError("expected two different files: a run is always equal to itself")
    answer = compare_logs(one, other)
    code = OK if answer.equal else REGRESSED
    code = INCOMPLETE if answer.equal and not answer.whole else code
    code = code if answer.compared else NOT_COMPARABLE
    lines = [answer.sentence()]
    for name in sorted(one.about.keys() | other.about.keys()):
        was, now = (log.about.get(name, "unknown") for log in (one, other))
        lines += [f"  {name}: {was} | {now}"] if was != now else []
    click.echo(printable("\n".join(lines)))
    ctx.exit(code)


COMMANDS = (same,)
