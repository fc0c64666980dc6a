"""Checks of every annotated signature while testing."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

from beartype import BeartypeConf
from beartype.claw import beartype_packages
from jaxtyping import install_import_hook

ARRAYS = (
    "megalodon_jax",
    "parity.deepseek_v3",
    "stability.activations",
    "stability.moe",
    "stability.products",
    "stability.recovery",
    "stability.repeat",
    "stability.storage",
)
"""Packages that annotate shapes and dtypes of arrays, or have named tuples: for jaxtyping."""
NAMES = (
    "parity.deployed",
    "parity.engine.programs.marks",
    "parity.mesh.suite",
    "reports.cases",
    "reports.nightly.pytest_session",
    "reports.provenance.code",
    "reports.subject",
    "reports.subjects.megalodon.record",
    "reports.subjects.mla_moe.record",
    "reports.watching.session",
    "stability.dtype_audit.pinned_rows",
    "stability.dtype_audit.scopes",
)
"""Modules with named tuples, a `ParamSpec`, wrappers that take over the annotations of others'
functions, or imports for type checkers alone, in whose annotations beartype cannot look up names;
jaxtyping leaves such annotations alone."""
UNCHECKED = ("parity.port.compare",)
"""Modules that a test calls with wrong types, as users do, who have no checks. Only jaxtyping's
checks can be switched off."""
OTHERS = ("parity", "stability", "reports")
"""Packages whose other modules beartype checks alone, without shapes. jaxtyping binds the arguments
of each call, which took a third of the time of tests of ports."""


class _BeforePytest(MetaPathFinder):
    """Finder that takes the modules of `OTHERS` from the search path, where beartype's hook is.

    Otherwise pytest, which rewrites assertions of distributions with plugins, would load them.
    """

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in OTHERS:
            return PathFinder.find_spec(fullname, path, target)
        return None


def check_annotations() -> None:
    """Check the annotations of what is imported from now on. An int is a float, as in PEP 484."""
    sys.meta_path.insert(0, _BeforePytest())
    # As of jaxtyping, a wrong type is a `TypeError`: what reads documents of others expects that.
    conf = BeartypeConf(is_pep484_tower=True, claw_is_pep526=False, violation_type=TypeError)
    beartype_packages(OTHERS, conf=conf)
    checker = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
    # The last hook comes first.
    install_import_hook((*ARRAYS, *NAMES, *UNCHECKED), checker)
