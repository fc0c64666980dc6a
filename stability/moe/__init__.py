"""Probes of the second architecture, MLA + MoE: router, latent attention, training.

MLA is multi-head latent attention, MoE a mixture of experts, as in DeepSeek-V3. The public names
are modules. Import each by itself: a page that shows results need not load the training code.
"""

# The type checker does not see modules that are not imported yet.
# pyright: reportUnsupportedDunderAll=false
__all__ = ["examine", "fit", "fixed_bugs", "policy", "results"]
