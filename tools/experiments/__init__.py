"""Training runs whose results are shown in docs and pages: byte-level model, drills, founding case.

A drill is a set of short training runs that differ in one property. The public names are modules,
since several have a function `train`; import them one by one.
"""

# The type checker does not see modules that are not imported yet.
# pyright: reportUnsupportedDunderAll=false
__all__ = ["document", "drill", "drill_report", "founding", "gemm_drill", "train"]
