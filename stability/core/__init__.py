"""Modules shared by all probes: findings, number formats, named leaves, rounding in jit, dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalodon_jax.lazy import on_first_use

if TYPE_CHECKING:
    from stability.core.dtype_rules import Policy
    from stability.core.findings import Finding, Severity
    from stability.core.number_formats import BF16, E2M1, E4M3, FORMATS, Format, by_name, format_of
    from stability.core.parameter_leaves import (
        Leaf,
        check_names,
        decays,
        is_megalodon,
        kind_of,
        leaves_of,
        listed,
        parameters_of,
        sample,
        seed_of,
    )
    from stability.core.recommendation import NEVER, recommend
    from stability.core.rounding import check_conversion, check_rounding, nearest, stochastic

__all__ = [
    "BF16",
    "E2M1",
    "E4M3",
    "FORMATS",
    "NEVER",
    "Finding",
    "Format",
    "Leaf",
    "Policy",
    "Severity",
    "by_name",
    "check_conversion",
    "check_names",
    "check_rounding",
    "decays",
    "format_of",
    "is_megalodon",
    "kind_of",
    "leaves_of",
    "listed",
    "nearest",
    "parameters_of",
    "recommend",
    "sample",
    "seed_of",
    "stochastic",
]

_ROOMS = {
    "stability.core.dtype_rules": ("Policy",),
    "stability.core.findings": (
        "Finding",
        "Severity",
    ),
    "stability.core.number_formats": (
        "BF16",
        "E2M1",
        "E4M3",
        "FORMATS",
        "Format",
        "by_name",
        "format_of",
    ),
    "stability.core.parameter_leaves": (
        "Leaf",
        "check_names",
        "decays",
        "is_megalodon",
        "kind_of",
        "leaves_of",
        "listed",
        "parameters_of",
        "sample",
        "seed_of",
    ),
    "stability.core.recommendation": (
        "NEVER",
        "recommend",
    ),
    "stability.core.rounding": (
        "check_conversion",
        "check_rounding",
        "nearest",
        "stochastic",
    ),
}
__getattr__, __dir__ = on_first_use(__name__, _ROOMS)
