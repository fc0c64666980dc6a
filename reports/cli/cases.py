"""The command `case`: reproduces porting bugs and differences that people reported in public."""

from __future__ import annotations

from typing import Any

import click

from reports.cli.console import OK, REGRESSED, examples
from reports.cli.names import PUBLIC_CASE

# Everything heavy is imported inside the command: help and usage errors must be instant.


@click.command(
    epilog=examples(
        "case same_padding",
        "case rounding_only",
        about="Exit code 0: the difference is found where the public report puts it, and the "
        "corrected port passes.",
    )
)
@click.argument("name", required=False, type=PUBLIC_CASE)
@click.pass_context
def case(ctx: click.Context, name: str | None) -> None:
    """Reproduce a porting difference that someone reported in public; without NAME list all.

    Each is a small file in examples/cases with tiny random weights. See docs/cases.md.
    """
    from reports.cases import cases, run

    known = cases()
    if name is None:
        width = max(map(len, known))
        for each in known.values():
            click.echo(f"{each.name:<{width}}  {each.title}\n{'':<{width}}  {each.report}")
        return
    chosen = known[name]
    click.echo("\n".join([chosen.title, "", chosen.text, "", *_facts(chosen), ""]))
    answer = run(chosen)
    click.echo(answer.text)
    click.echo()
    if answer.mended:
        click.echo(f"with the cause removed: {answer.mended}")
    click.echo(
        f"{answer.seconds:.1f} s; {'as reported' if answer.as_reported else 'NOT AS REPORTED'}"
    )
    ctx.exit(OK if answer.as_reported else REGRESSED)


def _facts(chosen: Any) -> list[str]:
    return [f"report: {chosen.report}", f"search for the cause: {chosen.tried}"]


COMMANDS = (case,)
