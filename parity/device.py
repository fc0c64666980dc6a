"""Class of the device that JAX uses by default.

The module imports little, so that programs whose memory is measured can use it.
"""

from __future__ import annotations

import jax


def device_kind() -> str:
    """Return the class of JAX's default device: "cpu", or "cuda" for any other platform."""
    return "cpu" if jax.devices()[0].platform == "cpu" else "cuda"
