"""Pinned rows: committed tables of the dtype audit, and changes since they were written.

There is one file per table in `stability/data/audits/`. `megalodon-numerics dtypes renew` writes
the tables, `check` prints the differences, `show` prints tables side by side. Line numbers of the
source are not compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from megalodon_jax.config import MegalodonConfig
from stability.core.findings import DIFFERENCES, Finding, Severity
from stability.dtype_audit.programs import audit_config
from stability.dtype_audit.rows import Row, RowChange, diff, from_json, to_json

if TYPE_CHECKING:
    from parity.megalodon.reference.dispatch import Mode

FOLDER = Path(__file__).parents[1] / "data" / "audits"
SCHEMA = 1
PROBE = "dtype_golden"
"""Name of the probe. Stored runs contain it, so it keeps "golden", the former word for pinned."""
PLAIN = MegalodonConfig(swiglu=True)
NARROW = MegalodonConfig(swiglu=True, compute_dtype="bfloat16")
RENEW = "megalodon-numerics dtypes renew"


def _torch(config: MegalodonConfig, mode: Mode) -> tuple[Row, ...]:
    from stability.dtype_audit.torch_side import audit_torch

    return audit_torch(config, mode)


PROGRAMS: Mapping[str, Callable[..., tuple[Row, ...]]] = {
    "float32": partial(audit_config, PLAIN),
    "bfloat16_compute": partial(audit_config, NARROW),
    "torch_autocast": partial(_torch, PLAIN, "autocast"),
    "torch_bfloat16": partial(_torch, PLAIN, "bfloat16"),
}
"""Functions that compute the current rows, by name of the committed table: two tables of this
project's model, two of the torch reference."""


@dataclass(frozen=True, slots=True)
class PinnedRows:
    """A committed table of the dtype audit, and the versions that produced it."""

    name: str
    versions: Mapping[str, str]
    """Version of jax and its platform (such as "cpu"), or versions of torch and megalodon-hf."""
    rows: tuple[Row, ...]


def versions_now(name: str) -> dict[str, str]:
    """Return the versions in use now, in the form in which the table `name` records them."""
    if name.startswith("torch"):
        return {package: _version(package) for package in ("torch", "megalodon-hf")}
    return {"jax": jax.__version__, "platform": jax.default_backend()}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def read_pinned(name: str, folder: Path = FOLDER) -> PinnedRows:
    """Read a committed table of the dtype audit by its name, a key of `PROGRAMS`.

    Raises:
        ValueError: there is no table of this name, or its file is unreadable or has another schema.
    """
    path = folder / f"{name}.json"
    if not path.is_file():
        raise ValueError(f"pinned rows {name!r}: {path.name} is not there; run `{RENEW}`.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        schema = content["schema"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"pinned rows {name!r} is not readable ({error}); run `{RENEW}`."
        ) from None
    if schema != SCHEMA:
        raise ValueError(
            f"pinned rows {name!r} has schema {schema!r}, expected {SCHEMA}; run `{RENEW}`."
        )
    return PinnedRows(name, content["versions"], from_json(content["rows"]))


def write_pinned(name: str, rows: Iterable[Row], folder: Path = FOLDER) -> None:
    """Write a table of the dtype audit to `<name>.json`, one row per line for readable diffs."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(entry) for entry in to_json(rows))
    head = f' "schema": {SCHEMA},\n "versions": {json.dumps(versions_now(name))},\n'
    (folder / f"{name}.json").write_text(
        f'{{\n{head} "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8"
    )


def changes_since(name: str, rows: Iterable[Row], folder: Path = FOLDER) -> tuple[RowChange, ...]:
    """Return the `RowChange`s from the committed table `name` to `rows`.

    Raises:
        ValueError: see `read_pinned`.
    """
    return diff(read_pinned(name, folder).rows, rows)


def pinned_findings(name: str, rows: Iterable[Row], folder: Path = FOLDER) -> list[Finding]:
    """Return a finding with the number of changed rows, then one finding per difference.

    The severity of a difference depends on the view (form of the program) of the row:

    - jaxpr: an error if jax and platform are those of the table, since the model then computes in
      other dtypes than were committed; else a warning.
    - torch: a warning if the versions are those of the table, else a note.
    - compiled program: a note, since XLA chooses dtypes by version and processor.

    Raises:
        ValueError: see `read_pinned`.
    """
    pinned = read_pinned(name, folder)
    now = versions_now(name)
    source = f"stability/data/audits/{name}.json"
    changes = diff(pinned.rows, rows)
    # At most a note, since each difference has a finding with its own severity.
    severity = Severity.NOTE if changes else Severity.OK
    message = f"{len(pinned.rows)} rows, {len(changes) or 'none'} changed"
    # Present with differences too: see `findings.DIFFERENCES`.
    count = Finding(PROBE, severity, name, DIFFERENCES, float(len(changes)), 0.0, source, message)
    same = dict(pinned.versions) == now
    made = ", ".join(f"{k} {v}" for k, v in pinned.versions.items())
    each = [
        Finding(
            PROBE,
            _severity(change.row, same),
            f"{change.row.module or '(no module)'} {change.row.op}",
            change.kind,
            float(change.after),
            float(change.before),
            source,
            f"{change.kind} in {change.row.view}: {change.row.describe()}, {change.before} -> "
            f"{change.after} (pinned with {made})",
            f"if the change is intended, run `{RENEW}` and commit the table",
        )
        for change in changes
    ]
    return [count, *each]


def _severity(row: Row, same_versions: bool) -> Severity:
    if row.view == "jaxpr":
        return Severity.ERROR if same_versions else Severity.WARNING
    return Severity.WARNING if row.view == "torch" and same_versions else Severity.NOTE
