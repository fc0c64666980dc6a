"""Audit of stored parameters: float32 where needed, not rounded to bfloat16 before, all finite.

Source: docs/model.md "Precision", docs/formats.md "Stored parameters".
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from megalodon_jax.precision import (
    audit_rounded_values,
    audit_sensitive_param_dtypes,
    other_leaves,
    sensitive_leaves,
)
from megalodon_jax.weights import named_leaves, role_of
from stability.core.findings import Finding, Severity, judge, non_finite

SOURCE = 'docs/formats.md "Stored parameters"'


def audit_parameters(model: Any) -> list[Finding]:
    """Return the findings of the probes `dtypes`, `values` and `finite` on a model's parameters.

    Every sensitive parameter (norms, EMA, gains) has one finding of `dtypes` (is it float32?) and
    one of `values` (are all values exactly bfloat16 numbers?). `finite` reports only parameters
    with NaN or infinity. A parameter without a role, such as an adapter's, gets a note: it is
    unknown whether it tolerates a narrow dtype.
    """
    return [*_dtypes(model), *_others(model), *_values(model), *_finite(model)]


def _dtypes(model: Any) -> list[Finding]:
    wrong = audit_sensitive_param_dtypes(model)
    source = 'docs/model.md "Precision": sensitive parameters stay float32'
    remedy = (
        "call megalodon_jax.precision.ensure_sensitive_param_dtype, and reload the checkpoint: a "
        "cast back to float32 does not restore lost digits"
    )
    rows = []
    for name, leaf in sensitive_leaves(model).items():
        bad, size = name in wrong, float(leaf.dtype.itemsize)
        severity = Severity.ERROR if bad else Severity.OK
        message = f"{role_of(name)}: {leaf.dtype.name}" + (", expected float32" if bad else "")
        fix = remedy if bad else ""
        rows.append(
            Finding("dtypes", severity, name, "bytes_per_element", size, 4.0, source, message, fix)
        )
    return rows


def _others(model: Any) -> list[Finding]:
    message = "no rule gives it a role: treated as not sensitive"
    fix = "to audit it too, name it in the argument `also` of megalodon_jax.precision's audits"
    return [
        Finding(
            "dtypes",
            Severity.NOTE,
            name,
            "bytes_per_element",
            float(leaf.dtype.itemsize),
            math.nan,
            SOURCE,
            f"{role_of(name)}: {leaf.dtype.name}, {message}",
            fix,
        )
        for name, leaf in other_leaves(model).items()
    ]


def _values(model: Any) -> list[Finding]:
    rounded, rows = audit_rounded_values(model), []
    remedy = "reload from a checkpoint that never passed through bfloat16"
    for name, leaf in sensitive_leaves(model).items():
        if name in rounded:
            message = f"all {rounded[name]:,} values are exactly bfloat16 numbers: already rounded"
        elif np.all(np.asarray(leaf) == np.asarray(leaf).flat[0]):
            message = "all elements are equal, so it cannot be known whether they were rounded"
        else:
            message = "holds values that bfloat16 cannot represent: not rounded"
        bad, error = float(name in rounded), Severity.ERROR
        rows.append(
            judge(
                "values", name, "already_rounded", bad, 0.0, SOURCE, message, remedy, severity=error
            )
        )
    return rows


def _finite(model: Any) -> list[Finding]:
    # Integers and random keys are always finite.
    leaves = {n: x for n, x in named_leaves(model).items() if jnp.issubdtype(x.dtype, jnp.floating)}
    counts = {n: int(np.sum(~np.isfinite(np.asarray(x, np.float64)))) for n, x in leaves.items()}
    return [non_finite(n, count, leaves[n].size, SOURCE) for n, count in counts.items() if count]
