"""Lowest versions that pyproject.toml allows, as constraints for pip: `python -m tools.lowest`.

`make test-lowest` installs them and runs tests. This module imports only Python's standard library,
since it runs before anything is installed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
_FLOOR = re.compile(r"([\w.-]+)(?:\[[\w,-]+\])?>=([\w.]+)(?:,<[\w.]+)?")


def constraints(requirements: Iterable[str]) -> list[str]:
    """Return `NAME==VERSION` for requirements `NAME>=VERSION`, with or without an upper bound.

    Raises:
        ValueError: a requirement has no lowest version.
    """
    found = []
    for requirement in requirements:
        if not (match := _FLOOR.fullmatch(requirement)):
            raise ValueError(
                f"expected a requirement with a lowest version, such as numpy>=2.0, received "
                f"{requirement!r}; name one in pyproject.toml."
            )
        found.append(f"{match[1]}=={match[2]}")
    return found


def main() -> None:
    """Print the constraints of an installation with the extra `nightly`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["nightly"]]
    print("\n".join(constraints(wanted)))


if __name__ == "__main__":
    main()
