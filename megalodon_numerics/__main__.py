"""The command `megalodon-numerics`, and `python -m megalodon_numerics`."""

from __future__ import annotations

import importlib.util
import sys

from megalodon_numerics import PACKAGES, _folder


def main() -> None:
    """Run the command line with the packages of this project, whatever else has their names.

    The process is ours alone, so packages of the working directory or of PYTHONPATH with the same
    names are not looked at.
    """
    for name in PACKAGES:
        folder = _folder(name)
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        if name not in sys.modules:
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
    from reports.cli import main as command

    sys.exit(command())


if __name__ == "__main__":
    main()
