"""Stores, judges and shows runs: run folder, history, verdict, page and command line.

Source: docs/reports.md, docs/verdicts.md.

Raises:
    ModuleNotFoundError: the extra `nightly` is not installed; the message says how to install it.
"""

from __future__ import annotations

import importlib.util

from megalodon_jax.extras import install

NIGHTLY = ("click", "duckdb", "jinja2", "msgspec", "pandas", "pyarrow", "rich")
"""Modules that the extra `nightly` installs. `megalodon_jax`, `parity` and `stability` work without
them."""


def _check_extra() -> None:
    # Check all of them at import: otherwise each command would report only the first it imports.
    missing = [name for name in NIGHTLY if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            "expected the extra 'nightly', which runs, pages and commands need, but "
            f"{', '.join(missing)} cannot be imported: {install('nightly')}",
            name=missing[0],
        )


_check_extra()

# Every room knows subjects by the register alone, so it must be filled before any is used.
from reports import subjects  # noqa: E402, F401
