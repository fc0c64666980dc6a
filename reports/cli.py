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
from pathlib import Path
from typing import Any

import click

# Everything heavy is imported inside the commands: help and usage errors must be instant.

OK, USAGE, INCOMPLETE, INTERNAL_ERROR = 0, 2, 3, 6


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
        path = recordings.write(case, reference.run(case), reference.provenance)
        report(f"  {path.name}: {path.stat().st_size / 1024:.0f} KiB")
    click.echo(recordings.FOLDER)


@main.command()
@click.option("--quiet", is_flag=True, help="No progress.")
def calibrate(quiet: bool) -> None:
    """Measure the noise floor of every case and rewrite the tolerance table's numbers."""
    from parity import calibrate
    from parity.cases import CASES
    from parity.tolerances import NOISE_FILE

    _progress(quiet, time.perf_counter())(f"calibrating {len(CASES)} cases with the oracle")
    calibrate.write(CASES)
    click.echo(NOISE_FILE)


@main.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs"),
    show_default=True,
    help="Folder that holds the runs; the next nightly shows the table on its page.",
)
@click.option("--repeats", default=3, show_default=True, help="Timed rounds; medians are reported.")
@click.option("--memory/--no-memory", default=True, help="Measure peak memory in processes apart.")
@click.option("--quiet", is_flag=True, help="No progress.")
def bench(out: Path, repeats: int, memory: bool, quiet: bool) -> None:
    """Time the same work in JAX and in megalodon-hf, alternating, as ratios and against floors."""
    from datetime import UTC, datetime

    from parity.reference import why_unavailable
    from reports import bench as module

    report = _progress(quiet, time.perf_counter())
    sides = ("jax",) if why_unavailable() else ("jax", "reference")
    peaks = {side: module.peak_memory(side) for side in sides} if memory else {}
    for side, peak in peaks.items():
        report(f"  train_step peak memory, {side}: {peak / 2**30:.2f} GiB")
    rows = module.measure(module.CONFIG, module.LENGTH, repeats, report)
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%SZ")
    click.echo(module.table(rows, peaks))
    click.echo(module.save(rows, peaks, out, stamp))


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
