"""Why mutants that nothing found are equivalent, one by one."""

from __future__ import annotations

ARGUED: dict[str, str] = {
    "truth_may_be_nan": "where the truth holds a NaN or an infinity, the difference of the two or "
    "its quotient by the truth's norm is NaN, which is what the check returns",
    "plan_of_the_last_worker": "every worker of pytest-xdist collects all tests, and xdist refuses "
    "workers that collected others, so that the plan of one is the plan of all",
    "rule_needs_four": "three quarters of three pairs are all three of them, so that three never "
    "have an exception, whichever number is enough",
}
"""By name of the mutant."""
