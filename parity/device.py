"""Class of the device that computes. Imports almost nothing, so memory can be measured with it."""

from __future__ import annotations

import jax


def device_kind() -> str:
    """Return the class of JAX's device: "cpu" or "cuda"."""
    return "cpu" if jax.devices()[0].platform == "cpu" else "cuda"
