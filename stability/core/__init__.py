"""Shared by all probes: findings, number formats, named leaves, rounding in jit, dtype rules.

The other packages of `stability` import everything they need from here.
"""

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
