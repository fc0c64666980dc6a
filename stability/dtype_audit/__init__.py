"""Audit of the dtypes in which a model computes: jaxpr, compiled program and torch reference.

`audit_step` and `audit_model` return a table of operations with their dtypes. `load_policy().check`
lists violations of the dtype policy. `pinned_findings` lists changes since the committed (pinned)
table.
"""

# Former names, kept for existing imports.
from stability.dtype_audit.golden import (  # noqa: F401
    golden_findings,
    read_golden,
    write_golden,
)
from stability.dtype_audit.pinned_rows import (
    PROGRAMS,
    changes_since,
    pinned_findings,
    read_pinned,
    write_pinned,
)
from stability.dtype_audit.policy import Policy, load_policy
from stability.dtype_audit.programs import (
    audit_config,
    audit_function,
    audit_model,
    audit_step,
    dtype_findings,
)
from stability.dtype_audit.rows import Line, Row, RowChange, diff, side_by_side
from stability.dtype_audit.scopes import announced, module_of

__all__ = [
    "PROGRAMS",
    "Line",
    "Policy",
    "Row",
    "RowChange",
    "announced",
    "audit_config",
    "audit_function",
    "audit_model",
    "audit_step",
    "changes_since",
    "diff",
    "dtype_findings",
    "load_policy",
    "module_of",
    "pinned_findings",
    "read_pinned",
    "side_by_side",
    "write_pinned",
]
