"""Commands for other tools: a stored run in their formats, and schemas of what --json prints."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from reports.cli.console import FILE, RUN, examples, known_runs, runs_option
from reports.cli.names import Name

# Everything heavy is imported inside the commands: help and usage errors must be instant.

SCHEMAS = Path(__file__).parent / "schemas"


@click.command(
    epilog=examples(
        "export latest junit --to junit.xml",
        "export latest openmetrics",
        "export latest arrow --to night.arrow",
        about=RUN,
    )
)
@click.argument("run", shell_complete=known_runs)
@click.argument("form", metavar="FORMAT", type=click.Choice(["junit", "openmetrics", "arrow"]))
@click.option("--to", type=FILE, help="Where to write it.  [default: stdout; arrow wants a file]")
@runs_option
def export(run: str, form: str, to: Path | None, out: Path) -> None:
    """Write a stored run in FORMAT, for a tool that people look at already.

    junit: a test per case and comparison, for the test tab of a CI system. openmetrics: gauges with
    the time of the run, for Prometheus and Grafana; needs prometheus_client. arrow: every
    measurement, for data frames and experiment trackers.

    The run is judged as `gate` does, but the exit code is 0 once the file is written.
    """
    if form == "arrow" and to is None:
        raise click.UsageError("an Arrow file is not text; say where it goes: --to FILE.")
    from megalodon_jax.files import written_aside
    from reports.exports import arrow_file, junit, openmetrics
    from reports.registry.lookup import find_run, judge_stored

    folder = find_run(out, run)
    judged = judge_stored(folder)
    if form == "arrow":
        assert to is not None
        with written_aside(to) as aside:
            arrow_file(judged.run, judged.decision, folder, aside)
    else:
        text = {"junit": junit, "openmetrics": openmetrics}[form](judged.run, judged.decision)
        if to is None:
            sys.stdout.write(text)
            return
        with written_aside(to) as aside:
            aside.write_text(text, encoding="utf-8")
    click.echo(to.resolve())


def schema_names() -> list[str]:
    """Return the commands with --json, as the schemas are called."""
    return sorted(path.stem for path in SCHEMAS.glob("*.json"))


@click.command(epilog=examples("schema", "schema gate", "schema parity-faults"))
@click.argument("command", required=False, type=Name("schema", schema_names))
def schema(command: str | None) -> None:
    """Print the JSON Schema of what COMMAND --json prints, or the names of all schemas.

    Keys may be added from version to version; none that a schema requires goes away or changes its
    type within a major version.
    """
    if command is None:
        click.echo("\n".join(schema_names()))
        return
    click.echo((SCHEMAS / f"{command}.json").read_text(encoding="utf-8"), nl=False)


COMMANDS = (export, schema)
