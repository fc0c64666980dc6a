"""The reference: megalodon-hf, run live. With `megalodon_jax.convert`, all of torch there is.

Install it with `make reference`, or by hand as `INSTALL` says. Without it the recordings stand in
(`parity.recordings`).
"""

from parity.reference.installed import (
    INSTALL,
    ReferenceUnavailableError,
    identity,
    why_unavailable,
)
from parity.reference.live import LiveReference

__all__ = ["INSTALL", "LiveReference", "ReferenceUnavailableError", "identity", "why_unavailable"]
