"""What is known of mutants that nothing found: equivalent, one by one, or open."""

from __future__ import annotations

ARGUED: dict[str, str] = {
    "truth_may_be_nan": "where the truth holds a NaN or an infinity, the difference of the two or "
    "its quotient by the truth's norm is NaN, which is what the check returns",
    "ema_log_without_log1p": "open, not equivalent: in float64 the logarithm of a pole loses up to "
    "1e-16 over its decay, 1e-10 at a memory of a million tokens, which no test asks of float64",
    "timenorm_single_token": "open: the listed tests pass, and other tests were not asked",
}
"""By name of the mutant."""
