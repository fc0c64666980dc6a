"""Documents on the page: stored results that a command measured once, not in the shown run.

Source: docs/reports.md "The page".
"""

from __future__ import annotations

from typing import Any

from reports.store.runs import Run
from stability.core import documents


def drill(run: Run) -> dict[str, Any]:
    """Return the stored results (JSON document) of the training drill; {} if they are unreadable or
    the run has no probes."""
    return _of(run, "drill") or _read(run, documents.DRILL)


def second_architecture(run: Run) -> dict[str, Any]:
    """Return the documents `defects` and `training` of the second architecture, by these names.

    {} unless both exist and the run has probes.
    """
    names = {"defects": documents.DEFECTS, "training": documents.TRAINING}
    content = _of(run, "mla_moe") or {key: _read(run, name) for key, name in names.items()}
    return content if all(content.values()) else {}


def _of(run: Run, name: str) -> dict[str, Any]:
    """Return a document's copy in run.json; {} without one: only old versions stored copies."""
    return run.manifest.stability.get(name) or {}


def _read(run: Run, name: str) -> dict[str, Any]:
    if not run.manifest.stability:
        return {}
    try:
        return documents.read(name)
    except ValueError:
        return {}  # The page names the command that writes the document.
