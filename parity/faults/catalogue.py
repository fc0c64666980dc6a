"""The catalogue of planted bugs, a folder of Python files beside the packages of a checkout.

Each file is about one part of the model and defines `FAULTS`. An installed wheel lacks this folder:
it has only the bug of the demonstration and the two controls.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from parity.executors.identity import FAULTS as FOLDER
from parity.executors.identity import ROOT
from parity.faults.demonstration import DEMONSTRATION
from parity.faults.fault import Family, Fault, unique


def faults_of(root: Path = ROOT) -> tuple[Fault, ...]:
    """Return the faults of a checkout, ordered by family and, within a family, by file name.

    Without the catalogue (the folder `FOLDER` in `root`), only `DEMONSTRATION`.

    Args:
        root: the folder that contains the packages.

    Raises:
        ValueError: two faults have the same name.
    """
    found: list[Fault] = []
    for path in sorted((root / FOLDER).glob("[!_]*.py")):
        # By path, since another package may be called `tools`.
        spec = importlib.util.spec_from_file_location(f"planted_faults.{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += module.FAULTS
    order = list(Family)
    return unique(sorted(found or [DEMONSTRATION], key=lambda fault: order.index(fault.family)))
