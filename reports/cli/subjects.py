"""Commands about architectures besides Megalodon: `subject`, and `stability --subject`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from reports.cli.console import (
    OK,
    REGRESSED,
    examples,
    progress,
    quiet_option,
    reference_option,
    unchecked,
)

# Everything heavy is imported inside the commands: help and usage errors must be instant.

SUBJECTS = ("mla-moe",)


def examine_subject(
    path: Path | None,
    as_json: bool,
    quiet: bool,
    *,
    size: str,
    batch_size: int,
    block_size: int,
    fp8_params: bool,
) -> int:
    """Run `stability --subject`: print what was found, and return the exit code."""
    unchecked()
    from reports.text import for_json
    from stability.moe.examine import examine

    result = examine(size, batch_size, block_size, fp8_params, path, progress(quiet))
    if as_json:
        rows = [for_json(asdict(f)) for f in result.findings]
        click.echo(json.dumps({"what": result.what, "findings": rows, "seconds": result.seconds}))
    else:
        click.echo(result.text())
    return REGRESSED if result.broken else OK


@click.group(epilog=examples("subject parity", "subject train"))
def subject() -> None:
    """A second architecture, MLA with sparse experts, held to the same instruments."""


@subject.command(epilog=examples("subject parity", "subject parity --reference recorded"))
@reference_option("Compare with Transformers' DeepSeek-V3 itself or with its recordings.")
@quiet_option
@click.pass_context
def parity(ctx: click.Context, reference: str, quiet: bool) -> None:
    """Compare five configurations with Transformers and print the table, as every night does."""
    unchecked()
    from stability.moe import results

    comparisons = results.compare_all(reference, progress(quiet))
    click.echo(results.parity_markdown(comparisons))
    ctx.exit(REGRESSED if any(f.broken for f in comparisons) else OK)


@subject.command(epilog=examples("subject defects"))
@click.pass_context
def defects(ctx: click.Context) -> None:
    """Plant every defect, print which are caught, examine a fresh model; renew the page's copy."""
    unchecked()
    from stability.core import documents
    from stability.moe import defects as module
    from stability.moe import results
    from stability.moe.examine import examine

    rows = module.rows()
    content = results.defect_rows(rows, examine("small", 2, 128, False))
    path = documents.path_of(documents.DEFECTS)
    documents.write(path, content)
    click.echo(f"{results.defect_markdown(content)}\n\n{path}")
    ctx.exit(OK if all(row.caught for row in rows) else REGRESSED)


@subject.command(epilog=examples("subject train"))
@quiet_option
def train(quiet: bool) -> None:
    """Break a short training run, with and without the guard; renew the page's curves."""
    unchecked()
    from stability.core import documents
    from stability.moe import results, training

    plan = training.Plan()
    content = training.document(plan, training.run(plan, progress(quiet)))
    path = documents.path_of(documents.TRAINING)
    documents.write(path, content)
    click.echo(f"{results.training_markdown(content)}\n\n{path}")


COMMANDS = (subject,)
