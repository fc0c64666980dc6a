"""The command `tasks`: compares perplexity and continuations of two language models, or one model
with itself."""

from __future__ import annotations

import math
from pathlib import Path

import click

from reports.cli.console import OK, REGRESSED, examples
from reports.printable import printable

# Everything heavy is imported inside the command: help and usage errors must be instant.

ABOUT = """\
FILE defines `models()`, which returns one or two `parity.LanguageModel`, and `ids()`, the token ids
of a text (N,). With one model, `stepwise(ids)` may return its logits token by token. Exit code 0:
within --margin; 1: not; 5: there is no --margin, so nothing was tested."""


def _finite(_ctx: click.Context, _parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise click.BadParameter(f"expected a finite number above 0, got {value}.")
    return value


@click.command(
    epilog=examples(
        "tasks docs/examples/my_tasks.py",
        "tasks docs/examples/my_tasks.py --margin 0.01 --prompts 0",
        about=ABOUT,
    )
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--margin", type=float, callback=_finite, help="Largest change in nats.")
@click.option("--window", type=click.IntRange(2), default=256, show_default=True, help="Tokens.")
@click.option(
    "--rows", type=click.IntRange(1), default=8, show_default=True, help="Windows in a call."
)
@click.option(
    "--prompts", type=click.IntRange(0), default=20, show_default=True, help="Prompts to continue."
)
@click.option(
    "--new-tokens", type=click.IntRange(1), default=32, show_default=True, help="For each prompt."
)
@click.pass_context
def tasks(ctx, file, margin, window, rows, prompts, new_tokens) -> None:
    """Compare language models on a text: perplexity and greedy continuations.

    With one model, compare it with itself: each row alone and in a batch, and a text whole and
    token by token.
    """
    from reports.cli.views.tasks import agreements
    from reports.verdict.decide import ExitCode

    lines, within = agreements(file, window, rows, prompts, new_tokens, margin)
    click.echo(printable("\n".join(lines)))
    if margin is None:
        click.echo("no --margin: nothing was tested")
        ctx.exit(ExitCode.NOTHING_SELECTED)
    click.echo(f"within {margin:g} nats: {'yes' if within else 'no'}")
    ctx.exit(OK if within else REGRESSED)


COMMANDS = (tasks,)
