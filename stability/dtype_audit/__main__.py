"""Command line of the golden audits: `python -m stability.dtype_audit renew|check|show`."""

from __future__ import annotations

import sys

import click

from parity.megalodon.reference import why_unavailable
from stability.dtype_audit.golden import (
    FOLDER,
    PROGRAMS,
    changes_since,
    read_golden,
    write_golden,
)
from stability.dtype_audit.rows import by_view, side_by_side

NAMES = click.argument("names", nargs=-1, type=click.Choice(sorted(PROGRAMS)))


@click.group()
def main() -> None:
    """Audit in which dtypes the model and its reference compute, against committed tables."""


@main.command()
@NAMES
def renew(names: tuple[str, ...]) -> None:
    """Write the golden audits, all that can be made here or those named."""
    for name in _chosen(names):
        rows = PROGRAMS[name]()
        write_golden(name, rows)
        click.echo(f"{FOLDER.name}/{name}.json: {len(rows)} rows")


@main.command()
@NAMES
def check(names: tuple[str, ...]) -> None:
    """Print what differs from the golden audits; exit code 1 if anything does."""
    different = 0
    for name in _chosen(names):
        changes = changes_since(name, PROGRAMS[name]())
        different += len(changes)
        click.echo(f"{name}: {len(changes)} changes")
        for change in changes:
            row = change.row
            click.echo(
                f"  {change.kind} {row.view} {row.module or '(no module)'}: {row.describe()}, "
                f"{change.before} -> {change.after}"
            )
    sys.exit(1 if different else 0)


@main.command()
@NAMES
def show(names: tuple[str, ...]) -> None:
    """Print committed tables side by side, one line per module, phase and family."""
    chosen = names or tuple(sorted(PROGRAMS))
    tables = (by_view(name, read_golden(name).rows) for name in chosen)
    for line in side_by_side({name: rows for table in tables for name, rows in table.items()}):
        click.echo(f"{line.module or '(no module)'} {line.phase} {line.family}")
        for name, cell in line.cells.items():
            click.echo(f"    {name:22} {cell or '-'}")


def _chosen(names: tuple[str, ...]) -> tuple[str, ...]:
    if names:
        return names
    reason = why_unavailable()
    if reason is not None:
        click.echo(f"torch tables are left out: {reason}", err=True)
    return tuple(name for name in PROGRAMS if reason is None or not name.startswith("torch"))


if __name__ == "__main__":
    main()
