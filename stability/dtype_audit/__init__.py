"""In which dtypes a model computes: the jaxpr, the compiled program, torch, and a policy for all.

`audit_step` and `audit_model` make a table, `load_policy().check` says what it breaks, and
`pinned_findings` what changed since the committed one.
"""

# Their former names, which programs may still import.
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
from stability.dtype_audit.rows import Change, Line, Row, diff, side_by_side
from stability.dtype_audit.scopes import announced, module_of

__all__ = [
    "PROGRAMS",
    "Change",
    "Line",
    "Policy",
    "Row",
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
