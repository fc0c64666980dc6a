"""Commands that measure: the nightly, in one or in shards, and the bench."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from parity.executors.machine import threads
from reports.cli.console import (
    RunsFolder,
    append,
    count_option,
    examples,
    executor_options,
    json_option,
    progress,
    quiet_option,
    reference_option,
    runs_option,
    say,
    summary_option,
    unchecked,
)
from reports.cli.names import FAULT, NIGHTLY_CASE
from reports.cli.watch import MODEL, watch_option, without_watch
from reports.cli.watch import watch as run_again

# Everything heavy is imported inside the commands: help and usage errors must be instant.


@click.command(
    epilog=examples(
        "nightly",
        "nightly --case plain --case byte_lm --reference recorded",
        "nightly --case byte_lm --checkpoint parity/data/byte_lm --json",
        "nightly --case plain --fault rope_keys_one_late",
        "nightly --case plain --watch",
        "nightly --shard 2/3 --out shards",
        "nightly --executor local",
        "nightly --executor ray --address auto",
        codes=True,
        about="With --shard the exit code is 0 once the part is stored; `merge` and `gate` judge.",
    )
)
@runs_option
@click.option(
    "--case",
    "cases",
    type=NIGHTLY_CASE,
    multiple=True,
    help="Run only this case (repeatable), and probe only a --checkpoint.",
)
@reference_option("Compare with megalodon-hf itself or with its recordings.")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder with model.safetensors and config.json, in place of the committed byte model.",
)
@click.option("--fault", type=FAULT, help="Plant a known bug first, to see the harness find it.")
@click.option("--shard", "part", metavar="K/N", help="Run the K-th of N parts, to be merged.")
@executor_options
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="With --executor: measure every part on this class of device, or not at all.",
)
@click.option(
    "--resume/--no-resume",
    default=True,
    help="With --executor: take the finished parts of a driver that was killed.",
)
@watch_option
@summary_option
@json_option
@quiet_option
@click.pass_context
def nightly(ctx, out, cases, watch, summary_md, as_json, quiet, **asked):
    """Run every suite, store the run, write its page and say the verdict.

    The run is compared with the newest earlier run of the same work, with what noisy values were
    before, and with the pinned run. It is stored in a folder of its own: run.json,
    measurements.parquet, findings.parquet and report.html. A whole night is shared by as many
    processes as there are processors; --executor local:1 takes one, as does a GPU.
    """
    if watch:
        if not cases:
            raise click.UsageError("--watch runs again and again; say which --case.", ctx)
        ctx.exit(run_again(MODEL, without_watch()))
    report = progress(quiet)
    unchecked()
    outcome = _night(ctx, out, tuple(cases), report, **asked)
    report.stop()
    if outcome.decision is None:
        click.echo(outcome.folder.resolve())
        return
    if summary_md is not None:
        from reports.cli.views.summary import markdown

        append(summary_md, markdown(outcome.run, outcome.decision))
    page = str(outcome.page.resolve())
    say(ctx, outcome.decision, as_json, [*outcome.against, page], page=page)


def _night(
    ctx, out, cases, report, reference, checkpoint, fault, part, executor, address, device, resume
):
    """Run a night in this process, or on an executor: a whole one on all processors there are.

    Where computations run on an accelerator it stays in one process, which takes its memory.
    """
    from reports.nightly.run import Options
    from reports.nightly.run import nightly as run_nightly
    from reports.nightly.shards import Shard
    from reports.provenance.device import device_kind
    from reports.store.runs import check_writable

    if executor is None and (address or device or not resume):
        raise click.UsageError("--address, --device and --no-resume go with --executor.", ctx)
    if executor is not None and part:
        raise click.UsageError("--executor makes its own shards: leave out --shard.", ctx)
    whole = not (part or cases)
    if executor is None and whole and threads() > 1 and device_kind() == "cpu":
        # Whoever wants an interrupted night to go on says so.
        executor, resume = "local", False
    shard = Shard.parse(part) if part else None
    check_writable(out)
    options = Options(out, cases, reference, checkpoint, fault, shard)
    if executor is None:
        return run_nightly(options, report, report.step)
    from parity.executors.sweep import open_executor
    from reports.nightly.fan_out import fan_out

    return fan_out(options, open_executor(executor, address), report, resume, device or "")


@click.command(
    epilog=examples(
        "nightly --case plain --case byte_lm --shard 1/2 --out shards",
        "nightly --case plain --case byte_lm --shard 2/2 --out shards",
        "merge shards",
        "merge shards --partial",
        about="A FOLDER is a shard, or holds shards anywhere below it.",
    )
)
@click.argument(
    "folders",
    metavar="FOLDER...",
    nargs=-1,
    required=True,
    type=RunsFolder(exists=True),
)
@click.option(
    "--partial",
    is_flag=True,
    help="Merge although shards are missing; the verdict will be INCOMPLETE.",
)
@click.option(
    "--mixed-machines",
    "mixed",
    is_flag=True,
    help="Merge shards of several machines; no value of the run is then held to repeat elsewhere.",
)
@runs_option
@quiet_option
def merge(folders: tuple[Path, ...], partial: bool, mixed: bool, out: Path, quiet: bool) -> None:
    """Make one run of the shards of a nightly, with its page, and print its folder.

    Shards must be whole, each there once, and of one code, one checkpoint and one environment; what
    is not is named. The exit code is 0 once the run is stored: `gate latest` judges it.
    """
    report = progress(quiet)
    from reports.nightly.shards import find_shards, merge_shards
    from reports.registry.outcome import store

    parts = find_shards(folders)
    report(f"merging {len(parts)} shards")
    outcome = store(out, merge_shards(parts, partial, mixed), report)
    click.echo(outcome.folder.resolve())


def _integers(ctx: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    """Read "1,8,64" as distinct integers of at least 1, in order."""
    try:
        numbers = {int(part) for part in text.split(",") if part.strip()}
    except ValueError:
        numbers = {0}
    if not all(number >= 1 for number in numbers):
        raise click.BadParameter(f"expected integers such as 1,8,64, received {text!r}.")
    return tuple(sorted(numbers))


def _lengths(ctx: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    numbers = _integers(ctx, parameter, text)
    if len(numbers) == 1:
        raise click.BadParameter(f"expected a length to compare with, as 2048,{numbers[0]}.")
    return numbers


def _list_option(name: str, read: Callable[..., Any], every: str, text: str) -> Callable[..., Any]:
    """Return an option that is a list of integers; "all" reads as `every`."""

    def value(ctx: click.Context, parameter: click.Parameter, given: str) -> tuple[int, ...]:
        return read(ctx, parameter, every if given == "all" else given)

    return click.option(name, default="", metavar="N,N,...", callback=value, help=text)


@click.command(
    epilog=examples(
        "bench",
        "bench --repeats 9 --no-memory",
        "bench --lengths all --rows all --bfloat16",
        "bench --rows 1,8 --other build/megalodon-jax",
        about="Options after --memory add minutes of work each; `all` is 2048,8192,32768,131072 "
        "tokens, or 1,8,64 rows.",
    )
)
@runs_option
@count_option("--repeats", 3, "Timed rounds; medians are reported.")
@click.option("--memory/--no-memory", default=True, help="Measure peak memory in processes apart.")
@_list_option(
    "--lengths",
    _lengths,
    "2048,8192,32768,131072",
    "Time and memory of a token in sequences of so many, over those in the shortest.",
)
@_list_option("--rows", _integers, "1,8,64", "Decode and generate so many rows at a time.")
@click.option("--bfloat16", is_flag=True, help="Products in bfloat16 over those in float32.")
@click.option(
    "--other",
    type=click.Path(path_type=Path),
    envvar="MEGALODON_JAX_OTHER",
    help="Folder, environment or Python with the package index's megalodon-jax: one more side.",
)
@quiet_option
def bench(out: Path, quiet: bool, **asked: Any) -> None:
    """Time the same work in JAX and in megalodon-hf, alternating, as ratios and against floors.

    The next nightly shows the newest bench on its page, with its history.
    """
    # A program that came from a cache would make the seconds of compiling a fiction.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
    from reports.bench.run import Options
    from reports.bench.run import bench as run_bench
    from reports.page.sections.speed import markdown
    from reports.store.runs import check_writable, write_run

    check_writable(out)
    run = run_bench(Options(**asked), progress(quiet))
    folder = write_run(out, run)
    click.echo(f"{markdown(run)}\n\n{folder}")


COMMANDS = (nightly, merge, bench)
