"""The command `megalodon-numerics`, and `python -m megalodon_numerics`."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from megalodon_numerics import PACKAGES, _folder

_USAGE = 2
"""Exit code of wrong usage and of a missing extra: `reports.verdict.decide.ExitCode.USAGE`."""


class _OwnFirst(MetaPathFinder):
    """Finds this project's packages in their own folders, before others of the same names.

    A finder imports no package until one is needed: help works without JAX, and the folder of JAX's
    compilation cache has to be set before JAX is imported.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of one of our packages; None for any other module."""
        if name not in PACKAGES:
            return None
        folder = _folder(name)
        return importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


def main() -> None:
    """Run the command line with this project's packages, even if others have the same names.

    Packages of the same names in the working directory or in PYTHONPATH are ignored. That is safe,
    since no other code runs in this process.
    """
    # JAX would take three quarters of a GPU's memory at once, and this process shares it with its
    # workers and with torch.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    sys.meta_path.insert(0, _OwnFirst())
    from parity.executors.supervision import supervised

    # Fork before the first package imports JAX: JAX's threads do not survive a fork.
    sys.exit(supervised(_command))


def _command() -> Any:
    try:
        import reports  # noqa: F401
    except ModuleNotFoundError as error:
        print(f"Error: {error}", file=sys.stderr)
        return _USAGE
    from reports.cli import main as command

    return command()


if __name__ == "__main__":
    main()
