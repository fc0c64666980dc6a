"""Commands `nightly`, `merge` and `bench`: they measure a night, whole or in shards, and speed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
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


def _shard(ctx: click.Context, parameter: click.Parameter, text: str | None) -> Any:
    if text is None:
        return None
    from reports.nightly.shards import Shard

    return Shard.parse(text)


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
    help="Run only this case (repeatable); probes then run only with --checkpoint.",
)
@reference_option("Compare with megalodon-hf itself or with its recordings.")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder with model.safetensors and config.json, used instead of the committed byte model.",
)
@click.option("--fault", type=FAULT, help="Plant a known bug first, to see whether it is found.")
@click.option(
    "--shard", metavar="K/N", callback=_shard, help="Run the K-th of N parts, for `merge`."
)
@executor_options
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    callback=lambda ctx, parameter, value: value or "",
    help="With --executor: measure every part on this class of device, or fail.",
)
@click.option(
    "--resume/--no-resume",
    default=True,
    help="With --executor: reuse the finished parts of a driver that was killed.",
)
@watch_option
@summary_option
@json_option
@quiet_option
@click.pass_context
def nightly(ctx, watch, summary_md, as_json, quiet, executor, address, resume, **asked):
    """Run every suite, store the run, write its page and print the verdict.

    The run is compared with the newest earlier run of the same work, with the history of noisy
    values, and with the pinned run. It is stored in a new folder: run.json, measurements.parquet,
    findings.parquet and report.html. A whole night uses one process per processor, which share a
    GPU where there is one; --executor local:1 uses a single process.
    """
    if watch:
        if not asked["cases"]:
            raise click.UsageError(
                "--watch runs again after each change; select cases with --case.", ctx
            )
        ctx.exit(run_again(MODEL, without_watch()))
    report = progress(quiet)
    unchecked()
    outcome = _night(ctx, report, executor, address, resume, **asked)
    report.stop()
    if outcome.decision is None:
        click.echo(outcome.folder.resolve())
        return
    if summary_md is not None:
        from reports.cli.views.summary import markdown

        append(summary_md, markdown(outcome.run, outcome.decision))
    page = str(outcome.page.resolve())
    say(ctx, outcome.decision, as_json, [*outcome.against, page], page=page)


def _night(ctx, report, executor, address, resume, **asked):
    """Run a nightly on the named executor, else in this process, and return its `Outcome`.

    A whole night without --executor uses local processes if there are several processors.
    """
    from parity.device import device_kind
    from parity.executors.item import accelerators
    from reports.nightly.run import Options
    from reports.nightly.run import nightly as run_nightly
    from reports.provenance.gpu import repeatable
    from reports.store.runs import check_writable

    repeatable()
    options = Options(**asked)
    if executor is None and (address or options.device or not resume):
        raise click.UsageError(
            "--address, --device and --no-resume go with --executor; add it or omit them.", ctx
        )
    if executor is not None and options.shard:
        raise click.UsageError("--executor makes its own shards: omit --shard.", ctx)
    whole = not (options.shard or options.cases)
    here = executor is None or executor.startswith("local")
    on_gpu = here and device_kind() == "cuda"
    # Processes can share a CUDA GPU, but no other accelerator.
    if executor is None and whole and threads() > 1 and (accelerators() or not on_gpu):
        # Resuming an interrupted night requires an explicit --executor.
        executor, resume = "local", False
    if executor is not None and on_gpu and accelerators():
        # A worker that requests no device would reserve most of the GPU's memory for itself.
        options = replace(options, device=options.device or "cuda")
    check_writable(options.out)
    if executor is None:
        return run_nightly(options, report, report.step)
    from parity.executors.sweep import open_executor
    from reports.nightly.fan_out import fan_out

    return fan_out(options, open_executor(executor, address), report, resume)


@click.command(
    epilog=examples(
        "nightly --case plain --case byte_lm --shard 1/2 --out shards",
        "nightly --case plain --case byte_lm --shard 2/2 --out shards",
        "merge shards",
        "merge shards --partial",
        about="A FOLDER is a shard, or contains shards at any depth.",
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
    help="Merge even if shards are missing; the verdict will be INCOMPLETE.",
)
@click.option(
    "--mixed-machines",
    "mixed",
    is_flag=True,
    help="Merge shards of several machines; no value of the run is then expected to repeat.",
)
@runs_option
@quiet_option
def merge(folders: tuple[Path, ...], partial: bool, mixed: bool, out: Path, quiet: bool) -> None:
    """Merge the shards of a nightly into one run, write its page, and print its folder.

    Each shard must be there once, and all must have equal code, checkpoint and environment;
    otherwise the error names the shard. The exit code is 0 once the run is stored: `gate latest`
    judges it.
    """
    report = progress(quiet)
    from reports.nightly.shards import find_shards, merge_shards
    from reports.registry.outcome import store

    parts = find_shards(folders)
    report(f"merging {len(parts)} shards")
    outcome = store(out, merge_shards(parts, partial, mixed), report)
    click.echo(outcome.folder.resolve())


def _integers(ctx: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    """Parse a text such as "1,8,64" as distinct integers of at least 1, sorted; "" gives ()."""
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
        raise click.BadParameter(f"expected a second length to compare, such as 2048,{numbers[0]}.")
    return numbers


def _list_option(name: str, read: Callable[..., Any], every: str, text: str) -> Callable[..., Any]:
    """Return an option for a list of integers, empty by default.

    Args:
        name: Name of the option.
        read: Callback that parses the text.
        every: Text that the value "all" stands for, such as "1,8,64".
        text: Help of the option.
    """

    def value(ctx: click.Context, parameter: click.Parameter, given: str) -> tuple[int, ...]:
        return read(ctx, parameter, every if given == "all" else given)

    return click.option(name, default="", metavar="N,N,...", callback=value, help=text)


@click.command(
    epilog=examples(
        "bench",
        "bench --repeats 9 --no-memory",
        "bench --lengths all --rows all --bfloat16",
        "bench --rows 1,8 --other build/megalodon-jax",
        "bench --no-memory --nights main",
        about="--lengths, --rows, --bfloat16 and --other add minutes of work each, --nights four "
        "nights; `all` is 2048,8192,32768,131072 tokens, or 1,8,64 rows.",
    )
)
@runs_option
@count_option("--repeats", 3, "Timed rounds; medians are reported.")
@click.option("--memory/--no-memory", default=True, help="Measure peak memory, in extra processes.")
@_list_option(
    "--lengths",
    _lengths,
    "2048,8192,32768,131072",
    "Time and memory per token at these sequence lengths, relative to the shortest.",
)
@_list_option("--rows", _integers, "1,8,64", "Decode and generate with these batch sizes.")
@click.option("--bfloat16", is_flag=True, help="Compare products in bfloat16 with float32.")
@click.option(
    "--nights",
    metavar="COMMIT",
    default="",
    help="Compare a first and a second night with those of this commit, in processor seconds.",
)
@click.option(
    "--other",
    type=click.Path(path_type=Path),
    envvar="MEGALODON_JAX_OTHER",
    help="Also time PyPI's megalodon-jax, installed in this folder, environment or Python.",
)
@quiet_option
def bench(out: Path, quiet: bool, **asked: Any) -> None:
    """Time the same work in JAX and in megalodon-hf alternately; report ratios and lower bounds.

    The page of the next nightly run shows the newest bench, with its history.
    """
    # With cached programs the compile times would be meaningless.
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
