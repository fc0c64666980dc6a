"""Commands about a second architecture, MLA + MoE: `subject`, and `stability --subject`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
    """Run `stability --subject`: examine a model, print the findings and return the exit code.

    `path` is a checkpoint; None examines random weights of the given `size`.
    """
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


@click.group(epilog=examples("subject parity", "subject fit run"))
def subject() -> None:
    """Test a second architecture, MLA with sparse experts, with the same instruments."""


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


def _fit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each setting in `_FIT`; an option that is not given has the value None."""
    for name, kind, text in reversed(_FIT):
        command = click.option(f"--{name}", type=kind, help=text)(command)
    return command


_FIT: tuple[tuple[str, Any, str], ...] = (
    ("size", str, "tiny (trainable on a CPU), small, medium, large or xl."),
    ("steps", int, "Parameter updates."),
    ("batch-size", int, "Rows per micro-batch."),
    ("block-size", int, "Tokens per row."),
    ("accumulation", int, "Micro-batches per update; their gradients are averaged."),
    ("optimizer-type", str, "adam or lion."),
    ("learning-rate", float, "Peak learning rate."),
    ("min-lr", float, "Learning rate at the end, and at the end of each cycle."),
    ("warmup-iters", int, "Updates over which the rate rises."),
    ("schedule", str, "cosine, or cyclic: the rate rises again in each cycle."),
    ("cycles", int, "Cycles of the cyclic schedule."),
    ("grad-clip", float, "Gradient norm above which gradients are scaled down."),
    ("router-z-loss-coef", float, "Weight of the router's z-loss; reduce it if it causes NaN."),
    ("dropout", float, "Dropout while training; evaluation has none."),
    ("storage", str, "float32, bfloat16 or float8: emulated precision of the parameters."),
    ("fp8-mla-params", bool, "Also store MLA's parameters in float8, which is risky."),
    ("activation-limit", float, "Limit to which hidden states are clipped."),
    ("guarded", bool, "Skip spikes, roll back, cut the rate; default true."),
    ("save-every", int, "Updates between checkpoints."),
    ("keep", int, "Checkpoints kept, for an emergency to go back to."),
    ("seed", int, "Seed of weights, batches and dropout."),
)


@subject.command(
    epilog=examples(
        "subject fit run --steps 200 --warmup-iters 20 --learning-rate 1e-2",
        "subject fit lion --optimizer-type lion --grad-clip 1.0 --dropout 0.1",
    )
)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@_fit_options
@quiet_option
def fit(folder: Path, quiet: bool, **given: Any) -> None:
    """Train MLA + MoE on the project's byte text; FOLDER holds the run, new or to be continued."""
    unchecked()
    from stability.moe import fit as module
    from stability.moe.options import OPTIONS, Options, read_options

    chosen = {name: value for name, value in given.items() if value is not None}
    there = (folder / OPTIONS).is_file() and not chosen
    options = read_options(folder) if there else Options(**chosen)
    click.echo(_ended(lambda: module.fit(options, folder, progress(quiet)), folder))


@subject.command(epilog=examples("subject emergency run", "subject emergency run --steps 100"))
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="New run's folder.")
@click.option(
    "--steps", type=click.IntRange(min=2), help="Updates.  [default: those that were left]"
)
@quiet_option
def emergency(folder: Path, out: Path | None, steps: int | None, quiet: bool) -> None:
    """Resume an unstable run of FOLDER from its best checkpoint, with emergency settings.

    The settings: a third of the learning rate, gradients clipped at 0.5, a z-loss of 0.0001, a
    longer warm-up, clipped activations, the guard, and fresh moments. The new run is
    FOLDER/emergency; the old one is kept.
    """
    unchecked()
    from stability.moe import fit as module

    click.echo(_ended(lambda: module.emergency(folder, out, steps, progress(quiet)), folder))


def _ended(train: Callable[[], Any], folder: Path) -> str:
    """Call `train` and return its result as text.

    Exit with code 1 if no rollback to a checkpoint could save the training.
    """
    from stability.recovery.rollback import RecoveryFailedError

    try:
        return train().text()
    except RecoveryFailedError as error:
        click.echo(f"{folder}: {error}", err=True)
        raise click.exceptions.Exit(REGRESSED) from error


COMMANDS = (subject,)
