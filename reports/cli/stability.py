"""Commands `stability` and `activations`: effects of low precision on a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import click
from click.core import ParameterSource

from reports.cli.console import (
    FILE,
    OK,
    REGRESSED,
    examples,
    progress,
    quiet_option,
    unchecked,
)
from reports.cli.subjects import SUBJECTS, examine_subject

# Everything heavy is imported inside the commands: help and usage errors must be instant.


@click.command(
    epilog=examples(
        "stability parity/data/byte_lm",
        "stability parity/data/byte_lm --schedule cosine:warmup=100,steps=2000,end=0.1",
        "stability parity/data/byte_lm --gradients docs/examples/my_gradients.py",
        "stability parity/data/byte_lm --text parity/data/byte_lm/heldout.txt",
        "stability parity/data/byte_lm --optimiser lion --lr 1e-4 --json",
        "stability --subject mla-moe --size small --fp8-params true",
    )
)
@click.argument("path", type=click.Path(path_type=Path), required=False)
@click.option("--subject", type=click.Choice(SUBJECTS), help="Examine this architecture instead.")
@click.option(
    "--size", default="small", show_default=True, help="With --subject: model size, if no PATH."
)
@click.option("--batch-size", type=int, default=2, show_default=True, help="With --subject: rows.")
@click.option(
    "--block-size", type=int, default=128, show_default=True, help="With --subject: bytes per row."
)
@click.option(
    "--fp8-params", type=bool, default=False, show_default=True, help="With --subject: use float8."
)
@click.option(
    "--optimiser",
    type=click.Choice(("adamw", "sgd", "lion", "muon")),
    help="Optimiser that trains PATH.  [default: that of its optimiser state, else adamw]",
)
@click.option("--lr", type=float, help="Learning rate.  [default: that of the optimiser state]")
@click.option("--weight-decay", type=float, help="Decoupled weight decay of the optimiser.")
@click.option("--betas", type=(float, float), metavar="B1 B2", help="Decay rates of its moments.")
@click.option("--eps", type=float, help="Epsilon of the optimiser.")
@click.option(
    "--format",
    "storage",
    default="bfloat16",
    show_default=True,
    help="Storage format to examine: bfloat16, float16, float8_e4m3fn or float8_e5m2.",
)
@click.option(
    "--text",
    type=FILE,
    help="Measure by training a Megalodon on this file's bytes, instead of with random gradients.",
)
@click.option(
    "--gradients",
    type=FILE,
    help="Python file whose function gradients() yields a torch module and its loss per batch, or "
    "gradients by name, instead of random ones.",
)
@click.option(
    "--order",
    type=FILE,
    help="Names of the parameters in the optimiser's order, as a JSON list or one per line, if its "
    "state does not name them and the order cannot be inferred.",
)
@click.option(
    "--schedule",
    metavar="KIND:steps=N,...",
    help="Learning rate over the run: constant, cosine or linear, with steps, warmup, and end as a "
    "fraction of the rate.  [default: constant]",
)
@click.option(
    "--base",
    type=click.Path(path_type=Path),
    help="PATH is a folder of LoRA adapters, as written by PEFT, of this checkpoint; also report "
    "what merging would lose.",
)
@click.option(
    "--what-if",
    is_flag=True,
    help="Report instead what low-precision products cost per matrix, and backend rules for them.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all results as JSON.")
@quiet_option
@click.pass_context
def stability(
    ctx, path, optimiser, lr, weight_decay, betas, eps, storage, text, gradients, order, schedule,
    base, what_if, as_json, quiet, subject, **subject_options,
) -> None:  # fmt: skip
    """Report what low-precision storage does to the checkpoint PATH, worst first, and what helps.

    PATH is a folder, a safetensors file or a torch file. A training checkpoint with its optimiser
    state is best, since it tells how the model was trained. With --subject a model of another
    architecture runs forward and generates, and all its probes examine it.

    Exit code 0: no finding, or warnings about what would freeze; 1: an error, such as weights that
    are not finite; 2: bad input.
    """
    _check_together(ctx, subject)
    if subject is not None:
        ctx.exit(examine_subject(path, as_json, quiet, **subject_options))
    if path is None:
        raise click.UsageError("give a checkpoint PATH, or an architecture with --subject.", ctx)
    unchecked()
    report = progress(quiet)
    if what_if:
        from reports.cli.views import products
        from reports.page.sections import what_if as module

        costs = products.examine(path, text, report)
        click.echo(json.dumps(module.as_document(costs)) if as_json else module.as_text(costs))
        return
    from reports.cli.views import diagnosis as module

    asked = {"lr": lr, "weight_decay": weight_decay, "eps": eps}
    asked |= dict(zip(("beta1", "beta2"), betas or (None, None), strict=True))
    settings = {name: value for name, value in asked.items() if value is not None}
    if text is not None and base is not None:
        raise click.UsageError(
            "--text trains a whole model, but --base means that PATH holds adapters; omit --text.",
            ctx,
        )
    if text is not None and gradients is not None:
        raise click.UsageError("--text computes its own gradients; leave --gradients out.", ctx)
    if text is not None and order is not None:
        raise click.UsageError("--text needs no names of parameters; leave --order out.", ctx)
    diagnosis = module.diagnose(
        path, optimiser, settings, storage, text, report, gradients, schedule, order, base
    )
    report.stop()
    click.echo(json.dumps(module.as_document(diagnosis)) if as_json else diagnosis.text())
    ctx.exit(REGRESSED if module.broken(diagnosis) else OK)


_OF_SUBJECT = ("size", "batch_size", "block_size", "fp8_params")
_OF_CHECKPOINT = (
    *("optimiser", "lr", "weight_decay", "betas", "eps", "storage", "text", "gradients"),
    *("order", "schedule", "base", "what_if"),
)


def _check_together(ctx: click.Context, subject: str | None) -> None:
    """Raise a usage error for options on the command line that would be ignored.

    Without --subject these are the options that need it (`_OF_SUBJECT`), with it the options about
    a checkpoint (`_OF_CHECKPOINT`).
    """
    of_other = _OF_SUBJECT if subject is None else _OF_CHECKPOINT
    on_command_line = {
        p for p in of_other if ctx.get_parameter_source(p) is ParameterSource.COMMANDLINE
    }
    names = [p.opts[0] for p in ctx.command.params if p.name in on_command_line]
    if names:
        wants = "goes with --subject only" if subject is None else "does not go with --subject"
        raise click.UsageError(f"{', '.join(names)} {wants}; omit what does not apply.", ctx)


@click.command(
    epilog=examples(
        "activations parity/data/byte_lm --text parity/data/byte_lm/heldout.txt",
        "activations parity/data/byte_lm --json",
    )
)
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--text",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Take the step on this file's bytes, instead of random token ids.",
)
@click.option("--json", "as_json", is_flag=True, help="Print every finding as JSON.")
@quiet_option
@click.pass_context
def activations(ctx, path, text, as_json, quiet) -> None:
    """Report the values in one step of the checkpoint PATH that leave narrow formats.

    Measures ranges of every named intermediate, its derivative and every gradient, and for each
    head the largest attention logit and the entropy.

    Exit code 0: no finding, or warnings; 1: an error, such as values that are not finite; 2: bad
    input.
    """
    unchecked()
    from reports.cli.views import activations as module

    findings = module.examine(path, text, progress(quiet))
    click.echo(json.dumps(module.as_document(findings)) if as_json else module.as_text(findings))
    ctx.exit(REGRESSED if module.broken(findings) else OK)


COMMANDS = (stability, activations)
