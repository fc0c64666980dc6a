"""The reference: megalodon-hf, run live. torch is used only here and in `megalodon_jax.convert`.

Install it with `make reference`, or manually as `INSTALL` says. Without it, recordings are used
(`parity.megalodon.recordings`).
"""

from parity.megalodon.reference.installed import INSTALL, identity, why_unavailable
from parity.megalodon.reference.live import LiveReference

__all__ = ["INSTALL", "LiveReference", "identity", "why_unavailable"]
