"""Commands that train the models in documents and pages.

    python -m tools.experiments --help

Each trains for minutes and writes the result into the repository.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from reports.cli.console import OK, REGRESSED, progress, quiet_option, unchecked
from reports.cli.program import Guarded
from stability.core import documents

# JAX is imported inside the commands: help and usage errors must be instant.

DOCUMENT = click.argument("document", type=click.Path(path_type=Path, dir_okay=False, exists=True))
STEPS = click.option("--steps", type=click.IntRange(min=1), help="Optimiser steps.")
SEED = click.option("--seed", type=int, default=0, show_default=True, help="Weights and batches.")


def out_option(name: str) -> Callable[..., Any]:
    """Return the option `--out` of a command that writes the document called `name`."""
    kind = click.Path(path_type=Path, dir_okay=False)
    return click.option("--out", type=kind, default=documents.path_of(name), show_default=True)


class _Group(Guarded):
    """Group of commands with the error messages and exit codes of `megalodon-numerics`."""

    format_commands = click.Group.format_commands
    resolve_command = click.Group.resolve_command


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Train the models whose results are in documents and pages."""
    unchecked()


@main.command()
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@STEPS
@SEED
def train(out: Path, steps: int | None, seed: int) -> None:
    """Train the byte-level model that nights use, and write it to OUT."""
    from rich.console import Console

    from tools.experiments import train as module

    # Detect a folder that cannot be written before the training.
    out.parent.mkdir(parents=True, exist_ok=True)
    recipe = replace(module.Recipe(), seed=seed)
    recipe = recipe if steps is None else replace(recipe, steps=steps)
    model, curves = module.train(module.BYTE_LM_CONFIG, recipe, Console(stderr=True))
    module.write(out, model, module.record(module.BYTE_LM_CONFIG, recipe, curves))
    click.echo(f"{out}: validation loss {curves['val_loss'][-1]} nats per byte")


@main.command("founding-case")
@DOCUMENT
@STEPS
def founding_case(document: Path, steps: int | None) -> None:
    """Train a model whose norm weights freeze in bfloat16, once per remedy.

    Rewrites the table between the markers of DOCUMENT, and the chart beside it.
    """
    from tools.experiments import founding

    size = founding.DEFAULT if steps is None else replace(founding.DEFAULT, steps=steps)
    results = founding.compare(size)
    founding.write(document, results)
    click.echo(founding.table(results))


@main.command("gemm-drill")
@DOCUMENT
@STEPS
def gemm_drill(document: Path, steps: int | None) -> None:
    """Train the byte-level model with every backend of matrix products.

    Rewrites the table between the markers of DOCUMENT, and the charts beside it.
    """
    from tools.experiments import drill as drills
    from tools.experiments import gemm_drill as module

    plan = drills.Plan() if steps is None else drills.Plan(steps=steps)
    outcomes = drills.run(plan, module.VARIANTS, report=click.echo)
    others = module.losses_without_training()
    module.write(document, outcomes, others)
    click.echo(module.table(outcomes, others))


@main.command()
@STEPS
@SEED
@out_option(documents.DRILL)
@quiet_option
def drill(steps: int | None, seed: int, out: Path, quiet: bool) -> None:
    """Train the byte-level model in float32, in bfloat16, and with each remedy."""
    from tools.experiments import drill as module
    from tools.experiments import drill_report

    documents.check_writable(out)
    plan = module.Plan(seed=seed) if steps is None else module.Plan(seed=seed, steps=steps)
    report = progress(quiet)
    report(f"training {len(module.VARIANTS)} variants for {plan.steps} steps")
    content = drill_report.document(plan, module.run(plan, report=report))
    documents.write(out, content, indent=1)
    click.echo("\n".join([*content["conclusion"], str(out)]))


@main.command()
@out_option(documents.DEFECTS)
@click.pass_context
def defects(ctx: click.Context, out: Path) -> None:
    """Plant every known defect of MLA + MoE and print which the probes catch."""
    from stability.moe.examine import examine
    from tools.experiments import moe_defects as module

    documents.check_writable(out)
    rows = module.rows()
    content = module.document(rows, examine("small", 2, 128, False))
    documents.write(out, content)
    click.echo(f"{module.table(content)}\n\n{out}")
    ctx.exit(OK if all(row.caught for row in rows) else REGRESSED)


@main.command()
@out_option(documents.TRAINING)
@quiet_option
def guard(out: Path, quiet: bool) -> None:
    """Destabilise a short training of MLA + MoE, with and without the guard."""
    from tools.experiments import moe_training as module

    documents.check_writable(out)
    plan = module.Plan()
    content = module.document(plan, module.run(plan, progress(quiet)))
    documents.write(out, content)
    click.echo(f"{module.table(content)}\n\n{out}")


if __name__ == "__main__":
    main(prog_name="python -m tools.experiments")
