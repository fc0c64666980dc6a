"""Former module name of `stability.dtype_audit.pinned_rows`, kept for existing imports."""

from stability.dtype_audit.pinned_rows import *  # noqa: F403
from stability.dtype_audit.pinned_rows import PinnedRows as Golden
from stability.dtype_audit.pinned_rows import pinned_findings as golden_findings
from stability.dtype_audit.pinned_rows import read_pinned as read_golden
from stability.dtype_audit.pinned_rows import write_pinned as write_golden

__all__ = ["Golden", "golden_findings", "read_golden", "write_golden"]
