"""The second architecture under the probes: router, latent attention, defects, a training drill.

The public names are modules, imported when they are asked for: training loads what a page does not.
"""

# A type checker does not look for modules that are not imported yet.
# pyright: reportUnsupportedDunderAll=false
__all__ = ["defects", "examine", "fixed_bugs", "policy", "results", "training"]
