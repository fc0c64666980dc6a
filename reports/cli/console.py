"""Shared parts of all commands: exit codes, options, progress on stderr, tables, help texts."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from reports.printable import printable

# Everything heavy is imported inside the commands: help and usage errors must be instant.

OK, REGRESSED, USAGE, INCOMPLETE, NOT_COMPARABLE, INTERNAL_ERROR = 0, 1, 2, 3, 4, 6

EXIT_CODES = """\b
Exit codes:
  0  pass, or changed within every tolerance
  1  regression: a broken tolerance, a probe's error, a value that got worse
  2  wrong usage or bad input; the message says what to do
  3  incomplete: a suite did not finish, or the run was interrupted
  4  not comparable: the two sides are not the same work
  5  nothing selected: nothing was measured against a tolerance
  6  internal error"""
RUN = "RUN is a folder, an id or its beginning, `latest`, or `pinned`, the newest pinned run."


def examples(*lines: str, codes: bool = False, about: str = "") -> str:
    """Return the end of a help text: `about`, examples and, if `codes`, the table of exit codes.

    `about` is a paragraph, "" for none. `lines` are the examples: commands without the program's
    name.
    """
    parts = [about] if about else []
    shown = "\n".join(f"  megalodon-numerics {line}" for line in lines)
    parts.append(f"\b\nExamples:\n{shown}")
    return "\n\n".join([*parts, *([EXIT_CODES] if codes else [])])


def known_runs(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return names of runs in the folder of --out that start with `incomplete`, for the shell."""
    root = Path(ctx.params.get("out") or "runs")
    names = [p.name for p in root.iterdir() if (p / "run.json").is_file()] if root.is_dir() else []
    return [n for n in ("latest", "pinned", *sorted(names)) if n.startswith(incomplete)]


class RunsFolder(click.Path):
    """Type of an option for a folder of runs: a local path, or an address of shared storage."""

    def __init__(self, exists: bool = False, patterns: bool = False, copied: bool = True) -> None:
        """Configure the type.

        Args:
            exists: whether the folder must exist.
            patterns: whether a pattern with `*` or `?` is allowed in place of a folder.
            copied: whether runs on shared storage are copied to this machine first.
        """
        super().__init__(path_type=Path, exists=exists, file_okay=patterns)
        self.patterns, self.copied = patterns, copied

    def convert(self, value: Any, param: Any, ctx: click.Context | None) -> Any:
        """Return a path; for an address of shared storage the path of its local copy.

        A pattern is returned as text.
        """
        text = str(value)
        if isinstance(value, str) and ":" in text:
            from reports.store.addresses import check_address

            check_address(text)
        if self.patterns and any(sign in text for sign in "*?"):
            return text
        # Path() turns "s3://" into "s3:/", so only a string can be an address.
        if isinstance(value, str) and "://" in text:
            from reports.store.shared import copy_of, open_copy

            # Shell completion runs this at each key and must not wait for the network.
            if ctx and ctx.resilient_parsing:
                return copy_of(text)
            return open_copy(text, self.copied)
        return super().convert(value, param, ctx)


def _runs_option(kind: RunsFolder) -> Callable[..., Any]:
    return click.option(
        "--out",
        type=kind,
        default=Path("runs"),
        show_default=True,
        help="Folder that holds the runs, here or on shared storage: s3://bucket/runs.",
    )


runs_option = _runs_option(RunsFolder())
listed_runs_option = _runs_option(RunsFolder(copied=False))
"""Like `runs_option`, but does not copy runs from shared storage: for commands that only list."""
FILE = click.Path(path_type=Path, dir_okay=False)


def count_option(name: str, default: int, text: str, **more: Any) -> Callable[..., Any]:
    """Return an option for an integer of at least 1; `text` is its help."""
    kind = click.IntRange(min=1)
    return click.option(name, type=kind, default=default, show_default=True, help=text, **more)


def choice_option(name: str, choices: Sequence[str], text: str, **more: Any) -> Callable[..., Any]:
    """Return an option for one of `choices`; the first is the default. `text` is its help."""
    kind, first = click.Choice(choices), choices[0]
    return click.option(name, type=kind, default=first, show_default=True, help=text, **more)


def reference_option(text: str) -> Callable[..., Any]:
    """Return the option --reference: compare with the live reference or its recordings.

    `text` is its help.
    """
    return choice_option("--reference", ("auto", "live", "recorded"), text)


def executor_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options --executor and --address, which select where parallel work runs."""
    executor = click.option(
        "--executor",
        metavar="local[:N]|ray",
        help="Distribute the work: N local processes (default: as many as fit), or a Ray cluster.",
    )
    address = click.option("--address", help="Address of a Ray cluster; `auto` finds a local one.")
    return executor(address(command))


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
quiet_option = click.option("--quiet", is_flag=True, help="No progress.")
summary_option = click.option(
    "--summary-md",
    type=FILE,
    default=lambda: os.environ.get("GITHUB_STEP_SUMMARY") or None,
    help="Append a summary in Markdown.  [default: the step-summary file when set]",
)

EVERY = 30.0
"""Smallest number of seconds between two progress lines that state the remaining time."""


class Progress:
    """Progress of a command on stderr: lines, with a bar below them in a terminal.

    Call the object with each line, and `step` after each finished part. With `quiet` nothing is
    written.
    """

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.clock = quiet, time.perf_counter()
        self.told = -math.inf
        self.bar: Any = None

    def __call__(self, line: str) -> None:
        """Write a progress line to stderr, after the seconds since the start."""
        if self.quiet:
            return
        text = f"[{time.perf_counter() - self.clock:6.1f} s] {line}"
        if self.bar is None:
            click.echo(text, err=True)
        else:
            self.bar.console.print(text, markup=False, highlight=False)

    def step(self, done: int, planned: int, left: str = "") -> None:
        """Update the bar; without a terminal, write the time left from time to time.

        Args:
            done: Number of finished parts.
            planned: Number of all parts.
            left: Time left in words; if "", the bar estimates it from equally long parts.
        """
        if self.quiet:
            return
        if not sys.stderr.isatty():
            now = time.perf_counter()
            if left and now - self.told >= EVERY:
                self.told = now
                self(f"{done} of {planned}, {left}")
            return
        if self.bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
            from rich.progress import TimeRemainingColumn as ByCount

            remaining = TextColumn("{task.description}") if left else ByCount()
            columns = BarColumn(), MofNCompleteColumn(), remaining
            self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self.bar.add_task("", total=planned)
            self.bar.start()
        task = self.bar.task_ids[0]
        self.bar.update(task, completed=done, total=planned, description=left)

    def stop(self) -> None:
        """Remove the progress bar, if there is one."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def progress(quiet: bool) -> Progress:
    """Return a `Progress` for the running command; its bar is removed when the command ends."""
    report = Progress(quiet)
    click.get_current_context().call_on_close(report.stop)
    return report


def unchecked() -> None:
    """Disable the model's checks on traced values until the running command ends.

    The inputs of commands are known to be valid. A check calls back into Python, and a program that
    does so is not stored in the compilation cache.
    """
    from megalodon_jax import traced_checks

    click.get_current_context().with_resource(traced_checks(False))


def append(path: Path, text: str) -> None:
    """Append to a text file; if that fails, report the error without failing the command."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        click.echo(f"--summary-md: the summary was not written: {error}", err=True)


def show(table: Any) -> None:
    """Print a `rich` table to stdout; if piped, 200 columns wide."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 200).print(table)


def show_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table of texts; the first column is never wrapped."""
    from rich.table import Table
    from rich.text import Text

    table = Table(*heads, box=None)
    table.columns[0].no_wrap = True
    for row in rows:
        # Names are data and may look like rich markup.
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    show(table)


def columns(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts as lines that are never wrapped.

    Much faster than rich: ten thousand rows take 0.2 s instead of 4 s.
    """
    lines = [tuple(heads), *(tuple(map(printable, row)) for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    padded = ("  ".join(map(str.ljust, line, widths)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


def say(ctx: click.Context, decision: Any, as_json: bool, lines: Any = (), **more: Any) -> None:
    """Print a verdict with details as text or JSON, and exit with the verdict's code.

    Args:
        ctx: context of the running command.
        decision: verdict to print (`reports.verdict.decide.Decision`).
        as_json: whether to print JSON.
        lines: further lines of the text output; ignored with `as_json`.
        more: further keys of the JSON output; ignored without `as_json`.
    """
    from reports.registry.lookup import as_document

    if as_json:
        click.echo(json.dumps(as_document(decision) | more))
    else:
        text = [f"{decision.word}: {decision.sentence}", *lines]
        click.echo("\n".join(map(printable, text)))
    ctx.exit(int(decision.exit_code))
