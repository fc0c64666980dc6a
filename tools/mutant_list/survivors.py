"""Why mutants that nothing found are equivalent, one by one, or that a test of them is owed."""

from __future__ import annotations

OWED = "none: the listed tests and their sweeps pass with it, and a sharper test is owed"
ARGUED: dict[str, str] = {
    "truth_may_be_nan": "where the truth holds a NaN or an infinity, the difference of the two or "
    "its quotient by the truth's norm is NaN, which is what the check returns",
    "floors_added_in_squares_once": OWED,
    "port_trained_parameter_lost": OWED,
    "idle_values": OWED,
    "tied_untold": OWED,
    "no_floor_passes": OWED,
    "torch_rounds_nothing": OWED,
    "jax_masks_excuse": OWED,
}
"""By name of the mutant."""
