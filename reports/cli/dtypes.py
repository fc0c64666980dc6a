"""Commands `dtypes renew|check|show`: committed tables of the dtypes JAX and torch compute in."""

from __future__ import annotations

import click

from reports.cli.console import INCOMPLETE, OK, REGRESSED, examples
from reports.cli.names import TABLE

# Everything heavy is imported inside the commands: help and usage errors must be instant.

NAMES = click.argument("names", type=TABLE, nargs=-1)


@click.group(epilog=examples("dtypes check", "dtypes show float32", "dtypes renew"))
def dtypes() -> None:
    """Compare the dtypes in which the model and its reference compute with committed tables."""


@dtypes.command(epilog=examples("dtypes renew", "dtypes renew float32"))
@NAMES
def renew(names: tuple[str, ...]) -> None:
    """Recompute and overwrite the committed tables NAMES, or all that this machine can compute."""
    from stability.dtype_audit.pinned_rows import FOLDER, PROGRAMS, write_pinned

    for name in _chosen(names):
        rows = PROGRAMS[name]()
        write_pinned(name, rows)
        click.echo(f"{FOLDER.name}/{name}.json: {len(rows)} rows")


@dtypes.command(epilog=examples("dtypes check", "dtypes check bfloat16_compute"))
@NAMES
@click.pass_context
def check(ctx: click.Context, names: tuple[str, ...]) -> None:
    """Print how the current dtypes differ from the committed tables; exit code 1 if they do.

    Without NAMES, the exit code is 3 if megalodon-hf is not installed, which leaves torch's tables
    unchecked."""
    from stability.dtype_audit.pinned_rows import PROGRAMS, changes_since

    different, chosen = 0, _chosen(names)
    for name in chosen:
        changes = changes_since(name, PROGRAMS[name]())
        different += len(changes)
        click.echo(f"{name}: {len(changes)} changes")
        for change in changes:
            row = change.row
            click.echo(
                f"  {change.kind} {row.view} {row.module or '(no module)'}: {row.describe()}, "
                f"{change.before} -> {change.after}"
            )
    left_out = not names and len(chosen) < len(PROGRAMS)
    ctx.exit(REGRESSED if different else INCOMPLETE if left_out else OK)


@dtypes.command(epilog=examples("dtypes show", "dtypes show float32"))
@NAMES
def show(names: tuple[str, ...]) -> None:
    """Print committed tables side by side, per module, phase and family of operations."""
    from stability.dtype_audit.pinned_rows import PROGRAMS, read_pinned
    from stability.dtype_audit.rows import by_view, side_by_side

    chosen = names or tuple(sorted(PROGRAMS))
    tables = (by_view(name, read_pinned(name).rows) for name in chosen)
    for line in side_by_side({name: rows for table in tables for name, rows in table.items()}):
        click.echo(f"{line.module or '(no module)'} {line.phase} {line.family}")
        for name, cell in line.cells.items():
            click.echo(f"    {name:22} {cell or '-'}")


def _chosen(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return `names`; if empty, all tables, those of torch only if megalodon-hf can run here."""
    from parity.megalodon.reference import why_unavailable
    from stability.dtype_audit.pinned_rows import PROGRAMS

    if names:
        return names
    reason = why_unavailable()
    if reason is not None:
        click.echo(f"torch tables are skipped: {reason}; name tables to leave them out", err=True)
    return tuple(name for name in PROGRAMS if reason is None or not name.startswith("torch"))


COMMANDS = (dtypes,)
