"""Commands that train the models in documents: byte-level model, founding case, GEMM drill."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from reports.cli.console import examples, unchecked

# Everything heavy is imported inside the commands: help and usage errors must be instant.

DOCUMENT = click.argument("document", type=click.Path(path_type=Path, dir_okay=False, exists=True))
STEPS = click.option("--steps", type=click.IntRange(min=1), help="Optimiser steps.")


@click.command(epilog=examples("train byte-model", "train byte-model --steps 20"))
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@STEPS
@click.option("--seed", type=int, help="Seed of weights and data.")
def train(out: Path, steps: int | None, seed: int | None) -> None:
    """Train the byte-level model that nights use, and write it to OUT; takes minutes."""
    unchecked()
    from rich.console import Console

    from stability.experiments import train as module

    # Detect a folder that cannot be written before the training.
    out.parent.mkdir(parents=True, exist_ok=True)
    choices = {"steps": steps, "seed": seed}
    recipe = replace(module.Recipe(), **{k: v for k, v in choices.items() if v is not None})
    model, curves = module.train(module.BYTE_LM_CONFIG, recipe, Console(stderr=True))
    module.write(out, model, module.record(module.BYTE_LM_CONFIG, recipe, curves))
    click.echo(f"{out}: validation loss {curves['val_loss'][-1]} nats per byte")


@click.command("founding-case", epilog=examples("founding-case docs/stability.md"))
@DOCUMENT
@STEPS
def founding_case(document: Path, steps: int | None) -> None:
    """Train a model whose norm weights freeze in bfloat16, once per remedy; takes minutes.

    Rewrites the table between the markers of DOCUMENT, and the chart beside it.
    """
    unchecked()
    from stability.experiments import founding

    size = founding.DEFAULT if steps is None else replace(founding.DEFAULT, steps=steps)
    results = founding.compare(size)
    founding.write(document, results)
    click.echo(founding.table(results))


@click.command("gemm-drill", epilog=examples("gemm-drill docs/formats.md"))
@DOCUMENT
@STEPS
def gemm_drill(document: Path, steps: int | None) -> None:
    """Train the byte-level model with every backend of matrix products; takes minutes.

    Rewrites the table between the markers of DOCUMENT, and the charts beside it.
    """
    unchecked()
    from stability.experiments import drill
    from stability.experiments import gemm_drill as module

    plan = drill.Plan() if steps is None else drill.Plan(steps=steps)
    outcomes = drill.run(plan, module.VARIANTS, report=click.echo)
    others = module.losses_without_training()
    module.write(document, outcomes, others)
    click.echo(module.table(outcomes, others))


COMMANDS = (train, founding_case, gemm_drill)
