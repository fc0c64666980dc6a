"""The command line. Progress goes to stderr, the verdict to stdout, the meaning to the exit code.

Exit codes (spec/reports.md): 0 pass, 1 regression, 2 usage or bad input, 3 incomplete, 4 not
comparable, 5 nothing selected, 6 internal error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from reports.run_commands import COMMANDS
from reports.subject_commands import SUBJECTS, examined, subject

# Everything heavy is imported inside the commands: help and usage errors must be instant.

OK, REGRESSED, USAGE, INCOMPLETE, INTERNAL_ERROR = 0, 1, 2, 3, 6


class Guarded(click.Group):
    """A group whose commands end in a clear message and the specified exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; bad input, interruption and bugs each get their own exit code."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            click.echo("interrupted: nothing was written", err=True)
            ctx.exit(INCOMPLETE)
        except (ValueError, FileNotFoundError, PermissionError) as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(USAGE)
        except Exception as error:
            if type(error).__name__ == "ReferenceUnavailableError":
                click.echo(f"error: {error}", err=True)
                ctx.exit(USAGE)
            traceback.print_exc()
            click.echo("internal error: this is a bug of megalodon-numerics", err=True)
            ctx.exit(INTERNAL_ERROR)


@click.group(cls=Guarded, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="megalodon-numerics")
def main() -> None:
    """Compare Megalodon in JAX with megalodon-hf, and ask what precision does to it."""
    signal.signal(signal.SIGTERM, _interrupt)


@main.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs"),
    show_default=True,
    help="Folder that holds the runs.",
)
@click.option("--case", "cases", multiple=True, help="Run only this case (repeatable).")
@click.option(
    "--reference",
    type=click.Choice(["auto", "live", "recorded"]),
    default="auto",
    show_default=True,
    help="Compare with megalodon-hf itself or with its recordings.",
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder with model.safetensors and config.json, in place of the committed byte model.",
)
@click.option("--fault", help="Plant a known bug first, to see the harness find it.")
@click.option(
    "--summary-md",
    type=click.Path(path_type=Path, dir_okay=False),
    default=lambda: os.environ.get("GITHUB_STEP_SUMMARY"),
    help="Append a summary in Markdown (default: the step-summary file when set).",
)
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
@click.option("--quiet", is_flag=True, help="No progress.")
@click.pass_context
def nightly(ctx, out, cases, reference, checkpoint, fault, summary_md, as_json, quiet) -> None:
    """Run every suite, store the run and write its page."""
    clock = time.perf_counter()
    # A check inside a compiled function calls back to Python, and such a program is never cached.
    # The cases' token ids are valid by construction, so the night can do without.
    os.environ.setdefault("EQX_ON_ERROR", "off")
    from reports.nightly import Options
    from reports.nightly import nightly as run_nightly
    from reports.store import check_writable

    check_writable(out)
    options = Options(out, tuple(cases), reference, checkpoint, fault)
    outcome = run_nightly(options, _progress(quiet, clock))
    decision, page = outcome.decision, outcome.page.resolve()
    if summary_md is not None:
        _append(
            summary_md, f"## {decision.word}\n\n{decision.sentence}\n\nRun `{outcome.run.id}`\n"
        )
    if as_json:
        fields = {"verdict": decision.word, "sentence": decision.sentence, "page": str(page)}
        click.echo(json.dumps(fields | {"exit_code": int(decision.exit_code)}))
    else:
        click.echo(f"{decision.word}: {decision.sentence}\n{page}")
    ctx.exit(int(decision.exit_code))


@main.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs"),
    show_default=True,
    help="Folder that holds the runs; the next nightly shows the newest bench on its page.",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Timed rounds; medians are reported.",
)
@click.option("--memory/--no-memory", default=True, help="Measure peak memory in processes apart.")
@click.option("--quiet", is_flag=True, help="No progress.")
def bench(out: Path, repeats: int, memory: bool, quiet: bool) -> None:
    """Time the same work in JAX and in megalodon-hf, alternating, as ratios and against floors."""
    # A program that came from a cache would make the seconds of compiling a fiction.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
    from reports.bench import bench as run_bench
    from reports.speed import markdown
    from reports.store import check_writable, write_run

    check_writable(out)
    run = run_bench(repeats, memory, _progress(quiet, time.perf_counter()))
    folder = write_run(out, run)
    click.echo(f"{markdown(run)}\n\n{folder}")


@main.group(invoke_without_command=True)
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
@click.option("--text", type=click.Path(path_type=Path), help="The text to compare on.")
@click.option("--ids", type=click.Path(path_type=Path), help="... or its token ids, an .npy file.")
@click.option(
    "--length",
    type=click.IntRange(min=2),
    help="Tokens per row.  [default: a chunk and an eighth, at most the text]",
)
@click.option("--grad/--no-grad", default=None, help="Compare gradients.  [default: if they fit]")
@click.option("--layerwise", is_flag=True, help="One layer in memory at a time, forward only.")
@click.option("--oracle-only", is_flag=True, help="Do without megalodon-hf.")
@click.option("--json", "as_json", is_flag=True, help="Print everything found as JSON.")
@click.option("--quiet", is_flag=True, help="No progress.")
@click.pass_context
def parity(ctx, torch_path, jax_path, as_json, quiet, **asked) -> None:
    """Compare your own checkpoint in torch and in JAX, on your own text.

    The commands below ask about the harness and its cases instead.
    """
    if ctx.invoked_subcommand is not None:
        return
    if torch_path is None:
        raise click.UsageError("name a checkpoint with --torch, or one of the commands.", ctx)
    os.environ.setdefault("EQX_ON_ERROR", "off")
    from rich.console import Console

    from reports.checkpoint_pair import Options, compare
    from reports.pair_tables import as_document, show

    options = Options(torch_path, jax_path, **asked)
    result = compare(options, _progress(quiet, time.perf_counter()))
    if as_json:
        click.echo(json.dumps(as_document(result)))
    else:
        show(result, Console())
    ctx.exit(result.verdict[1])


@parity.command()
@click.argument("case")
@click.option("--fault", help="Plant a known bug first.")
@click.pass_context
def explain(ctx, case: str, fault: str | None) -> None:
    """Say where CASE leaves the oracle first, whether it starts there, and what acts there."""
    os.environ.setdefault("EQX_ON_ERROR", "off")
    from parity.cases import by_name
    from parity.faults import by_name as fault_by_name
    from reports import explain as module

    with fault_by_name(fault).planted() if fault else nullcontext():
        text, holds = module.explain(by_name(case), fault)
    click.echo(text)
    ctx.exit(OK if holds else REGRESSED)


@parity.command()
@click.argument("case")
@click.option("--fault", help="Plant a known bug first.")
@click.option("--quiet", is_flag=True, help="No progress.")
def shrink(case: str, fault: str | None, quiet: bool) -> None:
    """Find the smallest sizes and the shortest text at which CASE still fails the same way."""
    os.environ.setdefault("EQX_ON_ERROR", "off")
    from parity.cases import by_name
    from parity.faults import by_name as fault_by_name
    from reports import explain as module

    with fault_by_name(fault).planted() if fault else nullcontext():
        click.echo(module.shrunk(by_name(case), fault, _progress(quiet, time.perf_counter())))


@parity.command()
@click.option("--fault", "names", multiple=True, help="Plant only this fault (repeatable).")
@click.option("--family", help="Plant only the faults of this family.")
@click.option("--json", "as_json", is_flag=True, help="Print the matrix as JSON.")
@click.option(
    "--markdown",
    "as_markdown",
    is_flag=True,
    help="Print docs/kill-matrix.md: both edges about every fault, and the room on both sides.",
)
@click.option(
    "--healthy",
    type=click.IntRange(min=1),
    help="Instead, run this many random cases without a fault: nothing may be reported.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float64", "float32"]),
    default="float64",
    show_default=True,
    help="What healthy cases run in; float32 also measures their noise floors.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Processes that share the faults.",
)
@click.option("--quiet", is_flag=True, help="No progress.")
@click.pass_context
def faults(ctx, names, family, as_json, as_markdown, healthy, dtype, workers, quiet) -> None:
    """Plant every known porting bug and print which are found, where, and how loudly."""
    os.environ.setdefault("EQX_ON_ERROR", "off")
    # Single operations compile in no time, but there are many: where there is a cache, keep them.
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    report = _progress(quiet, time.perf_counter())
    if healthy:
        from parity.healthy import alarms
        from reports.killmatrix import alarm_lines

        lines = alarm_lines(alarms(range(healthy), dtype, report))
        click.echo("\n".join([f"{healthy} healthy cases in {dtype}: {len(lines)} alarms", *lines]))
        ctx.exit(REGRESSED if lines else OK)
    from rich.console import Console

    from parity import killmatrix
    from parity.faults import select
    from reports.killmatrix import markdown, print_matrix, summary

    matrix = killmatrix.run(select(names, family), report, workers, each=as_markdown)
    kills = matrix.kills
    if as_markdown:
        click.echo(markdown(matrix), nl=False)
    elif as_json:
        click.echo(json.dumps([killmatrix.as_dict(kill) for kill in kills]))
    else:
        print_matrix(kills, Console())
        click.echo(summary(kills))
    ctx.exit(REGRESSED if killmatrix.survivors(kills) else OK)


@parity.command()
@click.option("--quiet", is_flag=True, help="No progress.")
def calibrate(quiet: bool) -> None:
    """Measure the noise floor of every case and rewrite the tolerance table's numbers."""
    from parity import calibrate
    from parity.cases import CASES
    from parity.tolerances import NOISE_FILE

    _progress(quiet, time.perf_counter())(f"calibrating {len(CASES)} cases with the oracle")
    calibrate.write(CASES)
    click.echo(NOISE_FILE)


@parity.command()
@click.option("--case", "cases", multiple=True, help="Record only this case (repeatable).")
@click.option("--quiet", is_flag=True, help="No progress.")
def record(cases: tuple[str, ...], quiet: bool) -> None:
    """Run the live reference on the case matrix and rewrite its recordings."""
    from parity import recordings
    from parity.cases import CASES, by_name
    from parity.reference import LiveReference

    report = _progress(quiet, time.perf_counter())
    reference = LiveReference()
    for case in map(by_name, cases) if cases else CASES:
        for path in recordings.record(case, reference):
            report(f"  {path.name}: {path.stat().st_size / 1024:.0f} KiB")
    if not cases:
        recordings.record_seams(reference)
    click.echo(recordings.FOLDER)


@main.command()
@click.argument("path", type=click.Path(path_type=Path), required=False)
@click.option("--subject", type=click.Choice(SUBJECTS), help="Examine this architecture instead.")
@click.option("--size", default="small", show_default=True, help="... freshly drawn, without PATH.")
@click.option("--batch-size", type=int, default=2, show_default=True, help="... on so many rows.")
@click.option(
    "--block-size", type=int, default=128, show_default=True, help="... of so many bytes."
)
@click.option("--fp8-params", type=bool, default=False, show_default=True, help="... in float8.")
@click.option(
    "--optimiser",
    type=click.Choice(["adamw", "sgd", "lion", "muon"]),
    default="adamw",
    show_default=True,
    help="What trains it.",
)
@click.option("--lr", type=float, help="Its learning rate.  [default: the optimiser's own]")
@click.option(
    "--format",
    "storage",
    default="bfloat16",
    show_default=True,
    help="The storage in question: bfloat16, float16, float8_e4m3fn or float8_e5m2.",
)
@click.option(
    "--text",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Measure by training a Megalodon on this file's bytes, not on drawn gradients.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything found as JSON.")
@click.option("--quiet", is_flag=True, help="No progress.")
@click.pass_context
def stability(ctx, path, optimiser, lr, storage, text, as_json, quiet, subject, **asked) -> None:
    """Say what low-precision storage does to the checkpoint PATH, worst first, and what helps.

    PATH is a folder, a safetensors file or a torch file. With --subject a model of another
    architecture runs forward and generates, and all of its probes look at it.

    Exit code 0: nothing, or warnings, which say what would freeze; 1: an error, such as weights
    that are not finite; 2: bad input.
    """
    if subject is not None:
        ctx.exit(examined(path, as_json, quiet, **asked))
    if path is None:
        raise click.UsageError("name a checkpoint PATH, or an architecture with --subject.", ctx)
    os.environ.setdefault("EQX_ON_ERROR", "off")
    from reports import diagnosis as module

    report = _progress(quiet, time.perf_counter())
    found = module.diagnose(path, optimiser, lr, storage, text, report)
    click.echo(json.dumps(module.as_document(found)) if as_json else found.text())
    ctx.exit(REGRESSED if module.broken(found) else OK)


@main.command()
@click.option("--steps", type=click.IntRange(min=1), help="Optimiser steps.  [default: 120]")
@click.option("--seed", type=int, default=0, show_default=True, help="Of weights and batches.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where the result goes.  [default: the committed one that the nightly shows]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--quiet", is_flag=True, help="No progress.")
def drill(steps, seed, out, as_json, quiet) -> None:
    """Train the byte-level model in float32, in bfloat16 and with each remedy; minutes."""
    os.environ.setdefault("EQX_ON_ERROR", "off")
    from stability import drill as module
    from stability import drill_report

    out = drill_report.FILE if out is None else out
    drill_report.check_writable(out)
    plan = module.Plan(seed=seed) if steps is None else module.Plan(seed=seed, steps=steps)
    report = _progress(quiet, time.perf_counter())
    report(f"training {len(module.VARIANTS)} variants for {plan.steps} steps")
    content = drill_report.document(plan, module.run(plan, report=report))
    drill_report.write(out, content)
    said = json.dumps(content) if as_json else "\n".join([*content["conclusion"], str(out)])
    click.echo(said)


for command in (*COMMANDS, subject):
    main.add_command(command)


def _interrupt(*_: Any) -> None:
    # A terminated run must clean up after itself like an interrupted one.
    raise KeyboardInterrupt


def _progress(quiet: bool, clock: float):
    def report(line: str) -> None:
        if not quiet:
            click.echo(f"[{time.perf_counter() - clock:6.1f} s] {line}", err=True)

    return report


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


if __name__ == "__main__":
    sys.exit(main())
