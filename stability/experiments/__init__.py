"""Training runs whose results are in the documents: byte-level model, drills, founding case.

The public names are modules, imported on first use, since each has its own `train`.
"""

# The type checker does not see modules that are not imported yet.
# pyright: reportUnsupportedDunderAll=false
__all__ = ["document", "drill", "drill_report", "founding", "gemm_drill", "train"]
