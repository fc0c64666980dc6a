"""Why mutants that nothing found are equivalent, one by one."""

from __future__ import annotations

ARGUED: dict[str, str] = {
    "truth_may_be_nan": "where the truth holds a NaN or an infinity, the difference of the two or "
    "its quotient by the truth's norm is NaN, which is what the check returns",
}
"""By name of the mutant."""
