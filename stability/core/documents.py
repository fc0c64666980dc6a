"""Documents: committed results of slow measurements, which are not repeated in every run.

A document is a JSON file in `stability/data/`, written by one command (`COMMANDS`). A nightly page
and the docs show the results with the package versions that produced them.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from megalodon_jax.files import written_aside

FOLDER = Path(__file__).parents[1] / "data"
SCHEMA = 1
DRILL, DEFECTS, TRAINING = "drill", "mla_moe/defects", "mla_moe/training"
COMMANDS = {
    DRILL: "python -m tools.experiments drill",
    DEFECTS: "python -m tools.experiments defects",
    TRAINING: "python -m tools.experiments guard",
}
"""Shell command that measures and writes a document, by document name. It needs a checkout of the
repository; an installed package has no `tools`."""
KEYS = {DRILL: ("variants", "quantiles"), DEFECTS: ("defects",), TRAINING: ("plan", "variants")}
"""Keys that a document must have, since a page shows them, by document name."""


def path_of(name: str, folder: Path = FOLDER) -> Path:
    """Return the path of a document."""
    return folder / f"{name}.json"


def read(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    """Read a document (a JSON file) by its name, a key of `COMMANDS`.

    Raises:
        ValueError: the file is missing, unreadable or incomplete, or has another schema. The
            message names the command that writes it.
    """
    path = path_of(name, folder)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        schema = content.get("schema", SCHEMA)
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path.name} cannot be read ({error!r}); run `{COMMANDS[name]}`."
        ) from error
    missing = [key for key in KEYS[name] if key not in content]
    if schema != SCHEMA or missing:
        raise ValueError(
            f"{path.name} has schema {schema!r} and lacks the keys {', '.join(missing) or 'none'}; "
            f"expected schema {SCHEMA} with {', '.join(KEYS[name])}; run `{COMMANDS[name]}`."
        )
    return content


def check_writable(path: Path) -> None:
    """Check that a document (a JSON file) can be written.

    Commands call this first, so that minutes of training are not lost at the end.

    Raises:
        FileNotFoundError: the folder does not exist.
        PermissionError: the folder is not writable.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}; create it first.")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(
            f"{path}: the folder {path.parent} is not writable; name another file with --out."
        )


def write(path: Path, content: Mapping[str, Any], indent: int | None = None) -> None:
    """Write a document (a JSON file) atomically; after an interruption the old file is intact.

    Raises:
        FileNotFoundError: the folder does not exist.
        PermissionError: the folder is not writable.
        ValueError: a number in the content is NaN or infinite.
    """
    check_writable(path)
    text = json.dumps(content, allow_nan=False, indent=indent)
    with written_aside(path) as aside:
        aside.write_text(f"{text}\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """Return versions by name: of Python, and of the packages on which measured numbers depend."""
    packages = ("jax", "jaxlib", "equinox", "optax", "numpy")
    return {"python": platform.python_version()} | {n: metadata.version(n) for n in packages}


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, from the titles of its columns and the cells of its rows."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
