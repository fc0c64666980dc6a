"""Commands `parity ...`: compare checkpoints, explain cases, plant faults, record the reference."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path

import click

from reports.cli.console import (
    OK,
    REGRESSED,
    choice_option,
    examples,
    executor_options,
    progress,
    quiet_option,
    show_table,
    unchecked,
)
from reports.cli.names import CASE, FAMILY, FAULT, RECORDED_CASE

# Everything heavy is imported inside the commands: help and usage errors must be instant.


@click.group(
    invoke_without_command=True,
    epilog=examples(
        "parity --torch parity/data/byte_lm --text README.md",
        "parity --torch parity/data/byte_lm --text README.md --length 64 --layerwise",
        "parity explain plain",
        codes=True,
    ),
)
@click.option(
    "--torch",
    "torch_path",
    type=click.Path(path_type=Path),
    help="The torch side: a Hugging Face folder, or a weights file (with --config).",
)
@click.option(
    "--jax",
    "jax_path",
    type=click.Path(path_type=Path),
    help="The JAX side: a native checkpoint or a safetensors file.  [default: converted]",
)
@click.option("--config", type=click.Path(path_type=Path), help="config.json of a weights file.")
@click.option("--text", type=click.Path(path_type=Path), help="Text to compare on.")
@click.option("--ids", type=click.Path(path_type=Path), help="Token ids instead: an .npy file.")
@click.option(
    "--length",
    type=click.IntRange(min=2),
    help="Tokens per row.  [default: 9/8 of a chunk, or the whole text if shorter]",
)
@click.option("--grad/--no-grad", default=None, help="Compare gradients.  [default: if feasible]")
@click.option("--layerwise", is_flag=True, help="One layer in memory at a time, forward only.")
@click.option("--oracle-only", is_flag=True, help="Do not run megalodon-hf.")
@click.option("--json", "as_json", is_flag=True, help="Print all results as JSON.")
@quiet_option
@click.pass_context
def parity(ctx, torch_path, jax_path, as_json, quiet, **fields) -> None:
    """Compare your own checkpoint in torch and in JAX, on your own text.

    The subcommands are about the project's own cases.
    """
    if ctx.invoked_subcommand is not None:
        return
    if torch_path is None:
        raise click.UsageError("give a checkpoint with --torch, or name a subcommand.", ctx)
    unchecked()
    from rich.console import Console

    from reports.cli.checkpoint_pair import Options, compare
    from reports.cli.views.pair_tables import as_document, show

    options = Options(torch_path, jax_path, **fields)
    result = compare(options, progress(quiet))
    if as_json:
        click.echo(json.dumps(as_document(result)))
    else:
        show(result, Console())
    ctx.exit(result.verdict[1])


@parity.command(
    epilog=examples("parity explain plain", "parity explain plain --fault rope_keys_one_late")
)
@click.argument("case", type=CASE)
@click.option("--fault", type=FAULT, help="Plant a known bug first.")
@click.pass_context
def explain(ctx, case: str, fault: str | None) -> None:
    """Show at which stage CASE first exceeds a tolerance, and whether the error starts there."""
    unchecked()
    from parity.faults import by_name as fault_by_name
    from parity.megalodon.cases import by_name
    from reports.cli.views import explain as module

    with fault_by_name(fault).planted() if fault else nullcontext():
        text, holds = module.explain(by_name(case), fault)
    click.echo(text)
    ctx.exit(OK if holds else REGRESSED)


@parity.command(epilog=examples("parity shrink plain --fault rmsnorm_plus_one_dropped"))
@click.argument("case", type=CASE)
@click.option("--fault", type=FAULT, help="Plant a known bug first.")
@quiet_option
def shrink(case: str, fault: str | None, quiet: bool) -> None:
    """Find the smallest sizes and shortest text with which CASE still fails in the same way."""
    unchecked()
    from parity.faults import by_name as fault_by_name
    from parity.megalodon.cases import by_name
    from reports.cli.views import explain as module

    with fault_by_name(fault).planted() if fault else nullcontext():
        click.echo(module.shrink_case(by_name(case), fault, progress(quiet)))


@parity.command(
    epilog=examples("parity faults", "parity faults --family cema", "parity faults --healthy 100")
)
@click.option(
    "--fault", "names", type=FAULT, multiple=True, help="Plant only this fault (repeatable)."
)
@click.option("--family", type=FAMILY, help="Plant only the faults of this family.")
@click.option("--list", "as_list", is_flag=True, help="Only list the faults and their families.")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
@click.option(
    "--markdown",
    "as_markdown",
    is_flag=True,
    help="Print docs/tables/detection.md: each fault on both edges, and margins of tolerances.",
)
@click.option(
    "--healthy",
    type=click.IntRange(min=1),
    help="Instead, run this many random cases without a fault: none may raise an alarm.",
)
@choice_option(
    "--dtype",
    ("float64", "float32"),
    "Precision of the healthy cases; float32 also measures their noise floors.",
)
@executor_options
@quiet_option
@click.pass_context
def faults(
    ctx, names, family, as_list, as_json, as_markdown, healthy, dtype, executor, address, quiet
) -> None:
    """Plant each known porting bug and print whether it is found, where, and by what margin."""
    if as_list:
        from parity.faults import absent, select

        rows = [(fault.name, fault.family, fault.how) for fault in select(names, family)]
        show_table(("fault", "family", "what is done"), rows)
        return click.echo(absent()) if absent() else None
    unchecked()
    # Many small programs: store even those that compile quickly, if there is a cache.
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    report = progress(quiet)
    from parity.executors.sweep import open_executor

    engine = open_executor(executor or "local", address)
    if healthy:
        from parity.faults.healthy_cases import shared_alarms
        from reports.cli.views.detection import alarm_lines

        lines = alarm_lines(shared_alarms(healthy, dtype, engine, report))
        click.echo("\n".join([f"{healthy} healthy cases in {dtype}: {len(lines)} alarms", *lines]))
        return ctx.exit(REGRESSED if lines else OK)
    from rich.console import Console

    from parity.faults import detection, select
    from reports.cli.views.detection import markdown, print_table, summary

    table = detection.run(select(names, family), report, engine, each=as_markdown)
    detections = table.detections
    if as_markdown:
        click.echo(markdown(table), nl=False)
    elif as_json:
        click.echo(json.dumps([detection.as_dict(row) for row in detections]))
    else:
        print_table(detections, Console())
        click.echo(summary(detections))
    return ctx.exit(REGRESSED if detection.missed(detections) else OK)


@parity.command(epilog=examples("parity calibrate", "parity calibrate --executor ray"))
@executor_options
@quiet_option
def calibrate(executor: str | None, address: str | None, quiet: bool) -> None:
    """Measure how float32 rounding affects every case; rewrite the tolerance table's numbers."""
    from parity.executors.sweep import open_executor
    from parity.megalodon import noise_floors
    from parity.megalodon.cases import CASES
    from parity.tolerances import NOISE_FILE

    report = progress(quiet)
    report(f"calibrating {len(CASES)} cases with the oracle")
    engine = open_executor(executor or "local", address)
    noise_floors.write(CASES, responses=noise_floors.shared_responses(CASES, engine, report))
    click.echo(NOISE_FILE)


@parity.command(
    epilog=examples(
        "parity record", "parity record --case plain", "parity record --subject mla-moe"
    )
)
@click.option(
    "--case",
    "cases",
    type=RECORDED_CASE,
    multiple=True,
    help="Record only this case (repeatable).",
)
@click.option(
    "--subject",
    type=click.Choice(["megalodon", "mla-moe"]),
    default="megalodon",
    show_default=True,
    help="Whose reference: megalodon-hf, or Transformers' DeepSeek-V3.",
)
@quiet_option
def record(cases: tuple[str, ...], subject: str, quiet: bool) -> None:
    """Run a live reference on its cases and rewrite the committed recordings of its values."""
    if subject == "megalodon":
        from parity.megalodon import recordings as module
    else:
        from parity.deepseek_v3 import recordings as module

    report = progress(quiet)
    for path in module.record_all(cases):
        report(f"  {path.name}: {path.stat().st_size / 1024:.0f} KiB")
    click.echo(module.FOLDER)


@parity.command(epilog=examples("parity cases", "parity explain plain"))
def cases() -> None:
    """List the cases of `nightly --case`, `explain` and `shrink`, with their purposes."""
    from reports.subject import model, names_by_part, parts, registered

    reasons = {name: why for s in registered() for name, why in s.suites().reasons.items()}
    rows = [(case.name, "model", case.why) for case in model().cases]
    names = names_by_part()
    for part in (part for part in parts() if part.name in names):
        rows += [(n, part.what, reasons.get(n, part.why)) for n in sorted(names[part.name])]
    show_table(("case", "what is compared", "why"), rows)
    click.echo(
        "\nmodel: the JAX model, megalodon-hf and a float64 oracle, each with the others, on one "
        "text. `explain` and `shrink` take only these cases."
    )


COMMANDS = (parity,)
