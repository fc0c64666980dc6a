"""What computations run on. Imports nothing that a measurement of memory would notice."""

from __future__ import annotations

import jax


def device_kind() -> str:
    """Return the class of device computations run on: "cpu" or "cuda"."""
    return "cpu" if jax.devices()[0].platform == "cpu" else "cuda"
