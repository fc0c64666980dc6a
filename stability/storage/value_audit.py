"""Audit of stored parameters: the right dtype, values that were never rounded, all of them finite.

Source: docs/model.md "Precision", docs/audits.md "Stored parameters".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megalodon_jax.precision import (
    audit_rounded_values,
    audit_sensitive_param_dtypes,
    sensitive_leaves,
)
from megalodon_jax.weights import named_leaves, role_of
from stability.core.findings import Finding, Severity

NAN = float("nan")


def audit_parameters(model: Any) -> list[Finding]:
    """Return one finding per problem and question: probes `dtypes`, `values` and `finite`."""
    return [*_dtypes(model), *_values(model), *_finite(model)]


def _dtypes(model: Any) -> list[Finding]:
    wrong = audit_sensitive_param_dtypes(model)
    source = 'docs/model.md "Precision": sensitive parameters stay float32'
    rows = []
    for name, leaf in sensitive_leaves(model).items():
        bad = name in wrong
        rows.append(
            Finding(
                "dtypes",
                Severity.ERROR if bad else Severity.OK,
                name,
                "bytes_per_element",
                float(leaf.dtype.itemsize),
                4.0,
                source,
                f"{role_of(name)}: {leaf.dtype.name}" + (", expected float32" if bad else ""),
                "call megalodon_jax.precision.ensure_sensitive_param_dtype, and reload the "
                "checkpoint: a cast back does not restore digits"
                if bad
                else "",
            )
        )
    return rows


def _values(model: Any) -> list[Finding]:
    rounded = audit_rounded_values(model)
    source = 'docs/audits.md "Stored parameters"'
    rows = []
    for name, leaf in sensitive_leaves(model).items():
        bad = name in rounded
        repeated = bool(np.all(np.asarray(leaf) == np.asarray(leaf).flat[0]))
        clean = "one repeated value: proves nothing" if repeated else "holds values bfloat16 cannot"
        rows.append(
            Finding(
                "values",
                Severity.ERROR if bad else Severity.OK,
                name,
                "already_rounded",
                float(bad),
                0.0,
                source,
                f"all {rounded[name]:,} values are exactly bfloat16 numbers: already rounded"
                if bad
                else clean,
                "reload from a checkpoint that never passed through bfloat16" if bad else "",
            )
        )
    return rows


def _finite(model: Any) -> list[Finding]:
    rows = []
    for name, leaf in named_leaves(model).items():
        count = int(np.sum(~np.isfinite(np.asarray(leaf, np.float64))))
        if count:
            rows.append(
                Finding(
                    "finite",
                    Severity.ERROR,
                    name,
                    "non_finite",
                    float(count),
                    0.0,
                    'docs/audits.md "Stored parameters"',
                    f"{count:,} of {leaf.size:,} values are NaN or infinite",
                    "restore the last checkpoint without non-finite values",
                )
            )
    return rows
