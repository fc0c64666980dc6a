"""Identity of the GPU that computes, and the libraries of its kernels."""

from __future__ import annotations

import os
import subprocess
from importlib import metadata
from typing import Any

from parity.executors.item import accelerators
from reports.provenance.host import GPU_FIELDS, UNKNOWN

_QUERY = ["nvidia-smi", "--query-gpu=memory.total,driver_version", "--format=csv,noheader"]
_LIBRARIES = ("jax-cuda", "nvidia-")
"""Prefixes of packages that contain kernels or choose them."""
DETERMINISTIC = "--xla_gpu_deterministic_ops"
"""XLA's flag for the choice of the same kernels in every process."""


def gpu(device: Any) -> dict[str, str]:
    """Return `GPU_FIELDS` of a JAX device; `UNKNOWN` for a field that cannot be read.

    Memory and driver are those that `nvidia-smi` lists, if all GPUs are alike: JAX only knows how
    much memory it may allocate.
    """
    memory, driver = _listed()
    # platform_version is "PJRT C API", a line end, "cuda 13000"; the number is CUDA's own.
    version = str(getattr(getattr(device, "client", None), "platform_version", ""))
    cuda = version.rpartition("cuda")[2].strip()
    values = (getattr(device, "compute_capability", ""), memory, driver, cuda)
    return {name: str(value) or UNKNOWN for name, value in zip(GPU_FIELDS, values, strict=True)}


def libraries() -> dict[str, str]:
    """Return the versions of installed packages that contain CUDA libraries, by name."""
    named = {d.name.lower(): d.version for d in metadata.distributions()}
    return {name: named[name] for name in sorted(named) if name.startswith(_LIBRARIES)}


def repeatable() -> None:
    """Make XLA take the same kernels each time on a GPU; call before JAX looks for its devices.

    Otherwise XLA times several kernels for each product and takes the quickest, which differs from
    one process to the next (measured: docs/many-machines.md "On a GPU"), and so do the last bits.
    If `XLA_FLAGS` already has the flag `DETERMINISTIC`, its value is kept. Without a GPU nothing is
    set, since flags are part of the fingerprint of a machine.
    """
    wanted = os.environ.get("JAX_PLATFORMS", "")
    usable = accelerators() and any(name.startswith("jax-cuda") for name in libraries())
    if usable and (not wanted or {"cuda", "gpu"} & {*wanted.split(",")}):
        os.environ["XLA_FLAGS"] = repeatable_flags()


def repeatable_flags() -> str:
    """Return the variable XLA_FLAGS with the flag `DETERMINISTIC` added, unless it has the flag."""
    flags = os.environ.get("XLA_FLAGS", "")
    return flags if DETERMINISTIC in flags else f"{flags} {DETERMINISTIC}=true".strip()


def _listed() -> tuple[str, str]:
    """Return memory and driver from `nvidia-smi`; "" for both if it fails or the GPUs differ."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "", ""
    lines = {line.strip() for line in done.stdout.splitlines() if line.strip()}
    memory, _, driver = lines.pop().partition(", ") if len(lines) == 1 else ("", "", "")
    return memory, driver
