"""Probes of the second architecture: router, latent attention, defects, a training drill.

The public names are modules, imported on first use: a page does not need what training loads.
"""

# The type checker does not see modules that are not imported yet.
# pyright: reportUnsupportedDunderAll=false
__all__ = ["defects", "examine", "fixed_bugs", "policy", "results", "training"]
