"""Why mutants that nothing found are equivalent, one by one."""

from __future__ import annotations

ARGUED: dict[str, str] = {}
"""By name of the mutant."""
