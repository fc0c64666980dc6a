"""Training runs whose tables are in the documents: the byte-level model, drills, founding case.

The public names are modules, imported when they are asked for: each has a `train` of its own.
"""

# A type checker does not look for modules that are not imported yet.
# pyright: reportUnsupportedDunderAll=false
__all__ = ["document", "drill", "drill_report", "founding", "gemm_drill", "train"]
