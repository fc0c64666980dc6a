"""Number formats that a device's matrix units support, looked up by its capability.

A capability is CUDA's compute capability, AMD's gfx target or Google's TPU generation. A device
name is first mapped to a capability, whose formats are from the vendors' tables: CUDA C++
Programming Guide, "Compute Capabilities"; ROCm, "Data types and precision support"; Google Cloud
TPU, "TPU versions". Used for docs/mla-moe.md "Precision".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

CUDA, ROCM, TPU = (
    "CUDA C++ Programming Guide, compute capabilities",
    "ROCm, data types and precision support",
    "Google Cloud TPU, versions",
)
"""Vendors' tables from which the formats are taken."""
MEASURED = 'docs/speed.md "bfloat16"'
"""Source for CPUs, for which there is no vendor's table: a measurement of this project."""


@dataclass(frozen=True, slots=True)
class Capability:
    """Number formats that a device's matrix units multiply, and the size of the device's memory.

    Attributes:
        name: such as "compute capability 9.0", "gfx942", "TPU v5e" or "CPU".
        source: origin of the formats, as text: the vendor's table; for a CPU, a measurement.
        bf16: matrix units support bfloat16.
        tf32: matrix units support float32 rounded to 10 mantissa bits (XF32 on AMD).
        fp8: matrix units support e4m3 and e5m2 as defined by OCP, the formats of this project.
        fp8_fnuz: matrix units support AMD's older encoding, whose e4m3 ends at 240 instead of 448.
        blocks: block formats whose scales the hardware applies, out of "mxfp8" and "nvfp4".
        memory: size of the memory in bytes; None if the device does not report it.
    """

    name: str
    source: str
    bf16: bool = False
    tf32: bool = False
    fp8: bool = False
    fp8_fnuz: bool = False
    blocks: tuple[str, ...] = ()
    memory: int | None = None


def cuda(major: int, minor: int) -> Capability:
    """Return the `Capability` of GPUs with CUDA compute capability `major.minor`.

    A later capability has all formats of the earlier ones.
    """
    at = (major, minor)
    return Capability(
        f"compute capability {major}.{minor}",
        CUDA,
        bf16=at >= (8, 0),
        tf32=at >= (8, 0),
        fp8=at >= (8, 9),
        blocks=("mxfp8", "nvfp4") if at >= (10, 0) else (),
    )


def tpu(generation: int, variant: str = "") -> Capability:
    """Return the `Capability` of a TPU generation: bfloat16, and from v7 on float8 too.

    `variant`, such as "e" in v5e, appears in the name only; it changes no format.
    """
    return Capability(f"TPU v{generation}{variant}", TPU, bf16=True, fp8=generation >= 7)


_GFX = {
    "gfx906": {},
    "gfx908": {"bf16": True},
    "gfx90a": {"bf16": True},
    "gfx942": {"bf16": True, "tf32": True, "fp8_fnuz": True},
    "gfx950": {"bf16": True, "fp8": True, "blocks": ("mxfp8",)},
    "gfx1030": {},
    "gfx1100": {"bf16": True},
    "gfx1101": {"bf16": True},
    "gfx1102": {"bf16": True},
    "gfx1200": {"bf16": True, "fp8": True},
    "gfx1201": {"bf16": True, "fp8": True},
}
_NVIDIA_FAMILIES = (
    # The order matters, as the first match counts: "RTX PRO 6000" comes before "RTX 6000 Ada", and
    # that before Turing's "RTX 6000".
    (r"\b(GB|B)300\b", (10, 3)),
    (r"\b(GB|B)[12]00\b", (10, 0)),
    (r"\bGB10\b", (12, 1)),
    (r"\bThor\b", (11, 0)),
    (r"\bRTX PRO \d{4}\b|\bRTX 50[5-9]0\b", (12, 0)),
    (r"\b(G?H[12]00|H800|H20)\b", (9, 0)),
    (r"\bRTX \d{4}( SFF)? Ada\b|\bRTX 40[5-9]0\b|\bL(2|4|20|40|40S)\b", (8, 9)),
    (r"\bOrin\b", (8, 7)),
    (r"\bA(100|100X|30|30X|800)\b", (8, 0)),
    (r"\bRTX A\d{4}\b|\bRTX 30[5-9]0\b|\bA(2|10|10G|10M|16|40)\b", (8, 6)),
    (r"\bT4G?\b|\bRTX 20[5-8]0\b|\bGTX 16[5-6]0\b|\bQuadro RTX \d000\b|\bTITAN RTX\b", (7, 5)),
    (r"\bV100S?\b|\bTITAN V\b|\bGV100\b", (7, 0)),
    (r"\bP40?\b|\bGTX 10[5-8]0\b|\bTITAN Xp?\b", (6, 1)),
    (r"\bP100\b", (6, 0)),
    (r"\bM60\b", (5, 2)),
    (r"\bK80\b", (3, 7)),
)
_AMD_FAMILIES = (
    (r"\bMI35[05]X\b", "gfx950"),
    (r"\bMI(300[ACX]|308X|325X)\b", "gfx942"),
    (r"\bMI2[0-9]0X?\b", "gfx90a"),
    (r"\bMI100\b", "gfx908"),
    (r"\bMI[56]0\b|\bRadeon VII\b", "gfx906"),
    (r"\bRX 90[67]0\b|\bR9[67]00\b", "gfx1201"),
    (r"\bRX 7[6-9]00\b|\bW7[5-9]00\b", "gfx1100"),
    (r"\bRX 6[4-9][05]0\b|\bW6[4-9]00\b", "gfx1030"),
)
_TPU_NAMES = (
    (r"\bTPU ?v?(\d+) ?(lite|[a-z])?\b", None),
    (r"\bv(\d)(litepod|p|e)?-\d+\b", None),  # accelerator types of Google Cloud
    (r"\bTrillium\b", (6, "e")),
    (r"\bIronwood\b", (7, "x")),
)


def capability_of(device: Any) -> Capability | None:
    """Return the `Capability` of a device (formats and memory), or None for an unknown device.

    Args:
        device: a device of `jax.devices()`, looked up by its `compute_capability` or, if that is
            missing or unknown, by its `device_kind`; or a name, as `device_kind` or
            `torch.cuda.get_device_name` gives it.
    """
    if isinstance(device, str):
        return _by_name(device)
    told = str(getattr(device, "compute_capability", None) or "")
    kind = str(getattr(device, "device_kind", ""))
    found = _by_capability(told) or _by_name(kind)
    if found is None and getattr(device, "platform", None) == "cpu":
        found = _by_name("cpu")
    return found and replace(found, memory=_memory(device))


def _by_capability(told: str) -> Capability | None:
    if match := re.fullmatch(r"(\d+)\.(\d+)", told):
        return cuda(int(match[1]), int(match[2]))
    # ROCm adds features to the target: gfx942:sramecc+:xnack-
    return _gfx(told.partition(":")[0])


def _gfx(target: str) -> Capability | None:
    return Capability(target, ROCM, **_GFX[target]) if target in _GFX else None


def _by_name(name: str) -> Capability | None:
    if name.strip().lower() == "cpu":
        return Capability("CPU", MEASURED)
    if match := re.search(r"\bgfx[0-9a-f]+\b", name):
        return _gfx(match[0])
    for pattern, fixed in _TPU_NAMES:
        if match := re.search(pattern, name, re.IGNORECASE):
            return tpu(*(fixed or _generation(*match.groups())))
    # AMD names are looked up before NVIDIA's, whose short patterns would match some of them.
    if re.search(r"\bAMD\b|\bRadeon\b|\bMI\d{2,3}[ACX]?\b", name, re.IGNORECASE):
        target = _first(_AMD_FAMILIES, name)
        return _gfx(target) if target else None
    # Names of other vendors would match NVIDIA's patterns too.
    if re.search(r"\bIntel\b|\bApple\b|\bXeon\b|\bGaudi\b", name, re.IGNORECASE):
        return None
    at = _first(_NVIDIA_FAMILIES, name)
    return cuda(*at) if at else None


def _generation(number: str, variant: str | None) -> tuple[int, str]:
    light = (variant or "").lower() in ("lite", "litepod")
    # The first "lite" generation is v4i, later ones are v5e and v6e.
    return int(number), ("e" if int(number) > 4 else "i") if light else (variant or "").lower()


def _first(families: tuple[tuple[str, Any], ...], name: str) -> Any:
    found = (value for pattern, value in families if re.search(pattern, name, re.IGNORECASE))
    return next(found, None)


def _memory(device: Any) -> int | None:
    stats = getattr(device, "memory_stats", None)
    # A CPU reports no memory, and older TPU runtimes raise an error.
    try:
        told = stats() if stats else None
    except (RuntimeError, NotImplementedError):
        return None
    return (told or {}).get("bytes_limit")
