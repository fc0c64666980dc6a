"""The live reference: runs megalodon-hf, the PyTorch implementation that JAX is compared with.

Install megalodon-hf with `make reference`, or with pip as `INSTALL` says. Where it is missing,
recordings of its results are used (`parity.megalodon.recordings`).
"""

from parity.megalodon.reference.installed import INSTALL, identity, why_unavailable
from parity.megalodon.reference.live import LiveReference

__all__ = ["INSTALL", "LiveReference", "identity", "why_unavailable"]
