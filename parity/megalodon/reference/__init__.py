"""The reference: megalodon-hf, run live. With `megalodon_jax.convert`, all of torch there is.

Install it with `make reference`, or by hand as `INSTALL` says. Without it the recordings stand in
(`parity.megalodon.recordings`).
"""

from parity.megalodon.reference.installed import INSTALL, identity, why_unavailable
from parity.megalodon.reference.live import LiveReference

__all__ = ["INSTALL", "LiveReference", "identity", "why_unavailable"]
