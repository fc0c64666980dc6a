"""The program `megalodon-numerics`: progress on stderr, answers on stdout, verdict as exit code.

Exit codes: 0 pass, 1 regression, 2 usage or bad input, 3 incomplete, 4 not comparable, 5 nothing
selected, 6 internal error. Source: docs/reports.md "Command line".
"""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class

from megalodon_jax.extras import EXTRA_OF, install
from parity.executors.interrupts import ended_in_time
from parity.executors.machine import FIELDS, host
from reports.cli import cases as case_commands
from reports.cli import compare as compare_commands
from reports.cli import demo as demo_commands
from reports.cli import deploy as deploy_commands
from reports.cli import dtypes as dtype_commands
from reports.cli import export as export_commands
from reports.cli import measure as measure_commands
from reports.cli import mesh as mesh_commands
from reports.cli import parity as parity_commands
from reports.cli import ports as port_commands
from reports.cli import repeat as repeat_commands
from reports.cli import runs as run_commands
from reports.cli import stability as stability_commands
from reports.cli import store as store_commands
from reports.cli import subjects as subject_commands
from reports.cli import tasks as task_commands
from reports.cli.console import INCOMPLETE, INTERNAL_ERROR, USAGE, examples
from reports.printable import printable

# Everything heavy is imported inside the commands: help and usage errors must be instant.

PROGRAM = "megalodon-numerics"


_EXPERIMENTS = "python -m tools.experiments"
FORMER = {
    ("bless",): "pin",
    ("subject", "record"): "parity record --subject mla-moe",
    ("subject", "defects"): f"{_EXPERIMENTS} defects",
    ("subject", "train"): f"{_EXPERIMENTS} guard",
    **{(n,): f"{_EXPERIMENTS} {n}" for n in ("train", "drill", "founding-case", "gemm-drill")},
}
"""Current name of each renamed command, by the words of its former name."""


SECTIONS = {
    "Begin here": {
        "demo": "a healthy run and one with a planted bug, as two pages",
        "case": "differences people reported, reproduced in seconds",
        "doctor": "what to change on this machine, and its facts",
        "nightly": "run every suite, store the run, write its page",
        "port": "compare your own port with its original",
    },
    "Ask stored runs": {
        "list": "all runs, with their verdicts",
        "open": "open the page of a run in the browser",
        "gate": "judge a run again; the exit code is the verdict's",
        "history": "how gates developed over all runs",
        "compare": "what changed from one run to another",
        "export": "a run as JUnit, OpenMetrics or Arrow, for other tools",
        "report": "draw the page of a run again, with this version",
        "pin": "declare a run the baseline for drift",
        "retire": "stop expecting gates that a run no longer has",
        "prune": "delete old runs that nothing needs",
        "merge": "merge the shards of a nightly into one run",
    },
    "Ask a checkpoint or a step of yours": {
        "parity": "a checkpoint in torch and in JAX; cases, faults",
        "stability": "effects of storage in few bits on a checkpoint",
        "activations": "values of a step outside narrow formats",
        "mesh": "a step on one device and on meshes of many",
        "tasks": "two language models, or one with itself, on a text",
        "same": "the first value that differs in two runs of a training",
        "adopt": "convert an original's parameters for its port",
        "capture": "what one side of a port computes, as files",
        "export-model": "a folder for megalodon-hf, verified on both sides",
        "bench": "seconds and memory of JAX and megalodon-hf",
    },
    "Renew what is committed": {
        "dtypes": "tables of the dtypes that programs compute in",
        "subject": "the second architecture: parity, training",
    },
    "Scripts": {
        "completion": "complete commands, cases, faults and runs in a shell",
        "schema": "the JSON Schema of what --json prints",
    },
}
"""Every command, by purpose, with a description that fits one line of the help."""


class Guarded(click.Group):
    """Group of commands that turns every error into a message and a documented exit code."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands to the help text by section, one per line."""
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(list(commands.items()))
        listed = {name for commands in SECTIONS.values() for name in commands}
        if more := [
            (n, c.get_short_help_str()) for n, c in self.commands.items() if n not in listed
        ]:
            with formatter.section("More"):
                formatter.write_dl(more)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Return name, command and remaining arguments of the requested command.

        Raises:
            click.UsageError: the command was renamed; the message has its new name.
        """
        for words, name in FORMER.items():
            # Shell completion also calls this and must get no errors.
            if tuple(args[: len(words)]) == words and not ctx.resilient_parsing:
                raise click.UsageError(f"{' '.join(words)!r} is now {name!r}.", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; exit with a message and 2 (bad input), 3 (interrupted) or 6 (a bug)."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            click.echo("interrupted: no run was written", err=True)
            ctx.exit(INCOMPLETE)
        except BrokenPipeError:
            # The reader of stdout has closed it, as `head` does.
            raise
        except (ValueError, OSError) as error:
            click.echo(printable(f"error: {error}"), err=True)
            ctx.exit(USAGE)
        except Exception as error:
            if type(error).__name__ == "ReferenceUnavailableError":
                click.echo(printable(f"error: {error}"), err=True)
                ctx.exit(USAGE)
            if isinstance(error, ModuleNotFoundError) and (name := _missing(error)):
                click.echo(
                    printable(
                        f"error: {name} is not installed, which this command needs: "
                        f"pip install {name}, or {install(EXTRA_OF.get(name, 'nightly'))}"
                    ),
                    err=True,
                )
                ctx.exit(USAGE)
            click.echo(printable(traceback.format_exc()), err=True)
            click.echo("internal error: a bug of megalodon-numerics, please report it", err=True)
            ctx.exit(INTERNAL_ERROR)


def _missing(error: ModuleNotFoundError) -> str:
    """Return the name of the package that could not be imported; "" for one of our own."""
    name = (error.name or "").partition(".")[0]
    own = ("megalodon_jax", "megalodon_numerics", "parity", "reports", "stability")
    return "" if name in own else name


@click.group(
    cls=Guarded,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        "doctor",
        "demo",
        "nightly --case plain",
        "gate latest",
        "history plain logits",
        "port docs/examples/my_port.py",
        codes=True,
        about="Progress goes to stderr, answers to stdout. NO_COLOR is respected.",
    ),
)
@click.version_option(package_name=PROGRAM)
def main() -> None:
    """Compare ports with their originals, above all Megalodon in JAX with megalodon-hf."""
    context = click.get_current_context()
    context.with_resource(ended_in_time(INCOMPLETE))
    if "jax" not in sys.modules:
        # The doctor compiles one tiny program and must not write anything.
        _store_programs(small=context.invoked_subcommand != "doctor")


@main.command(
    epilog=examples(
        "completion bash >> ~/.bashrc",
        "completion zsh >> ~/.zshrc",
        "completion fish > ~/.config/fish/completions/megalodon-numerics.fish",
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes commands, options and runs in SHELL."""
    script = get_completion_class(shell)
    if script is None:
        raise click.UsageError(f"expected a shell that click supports, got {shell}; update click")
    variable = f"_{PROGRAM.upper().replace('-', '_')}_COMPLETE"
    click.echo(script(main, {}, PROGRAM, variable).source())


for module in (
    measure_commands, port_commands, mesh_commands, run_commands, compare_commands,
    store_commands,
    parity_commands, stability_commands, subject_commands, dtype_commands,
    demo_commands, case_commands, repeat_commands, task_commands, export_commands, deploy_commands,
):  # fmt: skip
    for command in module.COMMANDS:
        main.add_command(command)


def _store_programs(small: bool = True) -> None:
    """Enable JAX's compilation cache, unless it is configured or its folder cannot be written.

    A probe of 200 million parameters takes a quarter less time with it. Each machine has a separate
    folder, since several may share a home, and a program compiled for the instructions of one
    processor can crash on another.

    Args:
        small: whether to store also programs that compile in less than a second.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    there = next(folder for folder in (caches, *caches.parents) if folder.exists())
    if not os.access(there, os.W_OK):
        return
    identity = host()
    machine = hashlib.sha256(" ".join(identity[n] for n in FIELDS).encode()).hexdigest()[:12]
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(caches / PROGRAM / "jax" / machine)
    # By default JAX stores programs that take a second to compile. Of the 1,100 programs of a night
    # 900 take less than a tenth: about 10 ms to compile, and 2 ms to read.
    if small:
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
