"""Commands `export` and `schema`: a stored run for other tools, and schemas of --json output."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from reports.cli.console import FILE, RUN, examples, known_runs, runs_option
from reports.cli.names import Name

# Everything heavy is imported inside the commands: help and usage errors must be instant.

SCHEMAS = Path(__file__).parent / "schemas"
TEXTS = ("junit", "openmetrics")
ARROW = "arrow"
TRACKERS = {"mlflow": "MLFLOW_TRACKING_URI", "wandb": "WANDB_PROJECT and WANDB_DIR"}
"""Experiment trackers, each with the environment variables that set its destination."""


@click.command(
    epilog=examples(
        "export latest junit --to junit.xml",
        "export latest openmetrics",
        "export latest arrow --to night.arrow",
        about=RUN,
    )
)
@click.argument("run", shell_complete=known_runs)
@click.argument("form", metavar="FORMAT", type=click.Choice([*TEXTS, ARROW, *TRACKERS]))
@click.option("--to", type=FILE, help="File to write.  [default: stdout; arrow needs a file]")
@click.option(
    "--history",
    "earlier",
    is_flag=True,
    help="mlflow, wandb: also log earlier runs as steps, so that trends are curves.",
)
@runs_option
def export(run: str, form: str, to: Path | None, earlier: bool, out: Path) -> None:
    """Export a stored run in FORMAT, for other tools.

    junit: a test per case and comparison, for the test tab of a CI system. openmetrics: gauges with
    the time of the run, for Prometheus and Grafana; needs prometheus_client. arrow: every
    measurement, for data frames. mlflow, wandb: a run of an experiment tracker with curves and the
    stored files, written by its own client, which is configured by its own variables
    (MLFLOW_TRACKING_URI; WANDB_MODE=offline).

    The run is judged as by `gate`, but the exit code is 0 once the export is written.
    """
    if form == ARROW and to is None:
        raise click.UsageError("an Arrow file is not text; give a file with --to FILE.")
    if form in TRACKERS and to is not None:
        raise click.UsageError(
            f"{form} takes its destination from {TRACKERS[form]}, not --to; omit --to."
        )
    if earlier and form not in TRACKERS:
        raise click.UsageError(
            f"--history is for {' and '.join(TRACKERS)}; {form} exports one run only: omit it."
        )
    from reports.registry.lookup import find_run

    folder = find_run(out, run)
    if form in TRACKERS:
        click.echo(_track(folder, form, earlier))
    elif to is None:
        sys.stdout.write(_text(folder, form))
    else:
        _write(folder, form, to)
        click.echo(to.resolve())


def _text(folder: Path, form: str) -> str:
    from reports.exports import junit, openmetrics
    from reports.registry.lookup import judge_stored

    judged = judge_stored(folder)
    return {"junit": junit, "openmetrics": openmetrics}[form](judged.run, judged.decision)


def _write(folder: Path, form: str, to: Path) -> None:
    from megalodon_jax.files import written_aside
    from reports.exports import arrow_file
    from reports.registry.lookup import judge_stored

    with written_aside(to) as aside:
        if form == ARROW:
            judged = judge_stored(folder)
            arrow_file(judged.run, judged.decision, folder, aside)
        else:
            aside.write_text(_text(folder, form), encoding="utf-8")


def _track(folder: Path, form: str, earlier: bool) -> str:
    """Log a run to an experiment tracker, and return a description of where it was logged.

    With `earlier`, the runs in the history of this run are logged as earlier steps, each judged by
    the runs before it; runs that cannot be read are named on stderr and skipped.
    """
    from reports.exports import step, to_mlflow, to_wandb
    from reports.registry.lookup import judge_stored
    from reports.store.schema import StoreError

    last = judge_stored(folder)
    steps = []
    for name in last.history.runs if earlier else ():
        try:
            judged = judge_stored(folder.parent / name)
        except StoreError as error:
            click.echo(f"skipped: {name}: {error}", err=True)
        else:
            steps.append(step(judged.run, judged.decision))
    steps.append(step(last.run, last.decision))
    return {"mlflow": to_mlflow, "wandb": to_wandb}[form](steps, folder)


def schema_names() -> list[str]:
    """Return the names of the schemas: one per command with --json, such as "parity-faults"."""
    return sorted(path.stem for path in SCHEMAS.glob("*.json"))


@click.command(epilog=examples("schema", "schema gate", "schema parity-faults"))
@click.argument("command", required=False, type=Name("schema", schema_names))
def schema(command: str | None) -> None:
    """Print the JSON Schema of the output of COMMAND --json, or the names of all schemas.

    A new version may add keys. Within a major version no required key is removed or changes its
    type.
    """
    if command is None:
        click.echo("\n".join(schema_names()))
        return
    click.echo((SCHEMAS / f"{command}.json").read_text(encoding="utf-8"), nl=False)


COMMANDS = (export, schema)
