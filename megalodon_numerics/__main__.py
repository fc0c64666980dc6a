"""The command `megalodon-numerics`, and `python -m megalodon_numerics`."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from megalodon_numerics import PACKAGES, _folder

_USAGE = 2
"""Exit code of wrong usage and of a missing extra: `reports.verdict.decide.ExitCode.USAGE`."""


def main() -> None:
    """Run the command line with this project's packages, even if others have the same names.

    Packages of the same names in the working directory or in PYTHONPATH are ignored: no other
    code shares this process.
    """
    _load("parity")
    from parity.executors.supervision import supervised

    # Fork before the first package imports JAX: its threads do not survive a fork.
    sys.exit(supervised(_command))


def _command() -> Any:
    for name in PACKAGES[:-1]:
        _load(name)
    try:
        _load(PACKAGES[-1])
    except ModuleNotFoundError as error:
        print(f"Error: {error}", file=sys.stderr)
        return _USAGE
    from reports.cli import main as command

    return command()


def _load(name: str) -> None:
    """Import one of our packages from its own folder."""
    if name in sys.modules:
        return
    folder = _folder(name)
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    main()
