"""The command `mesh`: compares a user's training step on one device and on device meshes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import click

from reports.cli.console import FILE, OK, REGRESSED, count_option, examples, unchecked

# Everything heavy is imported inside the commands: help and usage errors must be instant.


@click.command(
    epilog=examples(
        "mesh docs/examples/my_step.py",
        "mesh docs/examples/my_step.py --mesh data=2,tensor=4 --mesh data=8,tensor=1",
        codes=True,
    )
)
@click.argument("step", type=FILE)
@click.option(
    "--mesh",
    "meshes",
    multiple=True,
    help="Axis sizes, instead of those in the step file (repeatable).",
)
@click.option(
    "--precision",
    type=click.Choice(["float64", "float32", "both"]),
    default=None,
    help="Precision to compare in.  [default: as in the step file]",
)
@count_option("--devices", 8, "Number of virtual devices to split a CPU into.")
@click.option("--json", "as_json", is_flag=True, help="Print every measurement as JSON.")
@click.pass_context
def mesh(
    ctx: click.Context,
    step: Path,
    meshes: tuple[str, ...],
    precision: str | None,
    devices: int,
    as_json: bool,
) -> None:
    """Compare the step in the Python file STEP on one device and on meshes of several.

    The file has a function step() that returns a parity.mesh.MeshComparison: docs/sharding.md.
    """
    unchecked()
    from parity.mesh.step import parse_mesh, prepare_devices, read_step
    from reports.text import for_json

    prepare_devices(devices)
    comparison = read_step(step)
    if meshes:
        comparison = comparison.on([parse_mesh(text) for text in meshes])
    if precision is not None:
        both = ("float64", "float32")
        chosen = both if precision == "both" else (precision,)
        comparison = replace(comparison, precisions=chosen)
    report = comparison.run()
    if as_json:
        rows = [for_json(asdict(m)) for m in report.measurements]
        starts = {r.case: {"start": r.start, "collectives": [str(c) for c in r.suspects]}
                  for r in report.results if not r.holds}  # fmt: skip
        click.echo(json.dumps({"holds": report.holds, "parts": starts, "measurements": rows}))
    else:
        click.echo(report.table())
    ctx.exit(OK if report.holds else REGRESSED)


COMMANDS = (mesh,)
