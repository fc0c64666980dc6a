"""The reference: megalodon-hf, run live. With `megalodon_jax.convert`, all of torch there is.

Install it with `make reference`, or by hand as `INSTALL` says. Without it the recordings stand in
(`parity.recordings`).
"""

from parity.reference.live import (
    COMMIT,
    INSTALL,
    LiveReference,
    ReferenceUnavailableError,
    why_unavailable,
)

__all__ = ["COMMIT", "INSTALL", "LiveReference", "ReferenceUnavailableError", "why_unavailable"]
