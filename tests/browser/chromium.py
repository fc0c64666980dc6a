"""Where Chromium is, and why tests in a browser cannot run."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

_DEBIAN = Path("/usr/bin/chromium")
_PACKAGES = ("playwright", "axe_playwright_python")


def executable() -> str | None:
    """Return the path of the system's Chromium; playwright's own download is never used."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    return found or (str(_DEBIAN) if _DEBIAN.exists() else None)


def missing() -> str | None:
    """Return why tests marked browser cannot run, or None."""
    absent = [name for name in _PACKAGES if find_spec(name) is None]
    if absent:
        return f"not run: no {' and no '.join(absent)}"
    return None if executable() else "not run: no chromium"
