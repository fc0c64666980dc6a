"""Description of the host: processor type, and environment variables that select kernels.

Results depend on the vector unit, because it determines the order of sums, and "AMD EPYC" names a
dozen processors with different ones. This module imports neither JAX nor NumPy, because workers use
this module before they import those. See docs/verdicts.md "Another machine".
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from pathlib import Path

UNKNOWN = "unknown"
"""Value of fields that cannot be read. A host with such a field never counts as the same machine,
not even as itself."""
FIELDS = ("vendor", "family", "model", "stepping", "instructions")
"""Fields that identify a processor type; "instructions" is a hash of its vector instructions."""
FLAGS = (
    "XLA_FLAGS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS",
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR",
    "OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES", "NVIDIA_TF32_OVERRIDE",
    "JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_DEFAULT_MATMUL_PRECISION",
)  # fmt: skip
"""Environment variables that select kernels, and thereby the order of summation."""
_CPUINFO = Path("/proc/cpuinfo")
# Prefixes of flags for arithmetic and vector instructions. Other flags, such as those about
# mitigations, come and go with versions of the Linux kernel.
_ARITHMETIC = (
    "sse", "ssse", "pni", "avx", "fma", "f16c", "amx", "bmi", "abm", "popcnt", "gfni", "fp",
    "asimd", "neon", "sve", "sme", "bf16", "i8mm",
)  # fmt: skip
_X86 = {"vendor": "vendor_id", "family": "cpu family", "model": "model", "stepping": "stepping"}
_ARM = {
    "vendor": "CPU implementer",
    "family": "CPU architecture",
    "model": "CPU part",
    "stepping": "CPU revision",
}
_SYSCTL = "machdep.cpu."


def host() -> dict[str, str]:
    """Return the values of the processor's `FIELDS` and its `name`, by name; a value that cannot be
    read is `UNKNOWN`."""
    entries = _linux() if _CPUINFO.is_file() else _macos()
    identity = {field: entries.get(field) or UNKNOWN for field in FIELDS}
    return identity | {"name": entries.get("name") or platform.machine() or UNKNOWN}


def threads() -> int:
    """Return the number of processors that this process may use."""
    # macOS has no affinity.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _linux() -> dict[str, str]:
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    entries: dict[str, str] = {}
    for line in text.split("\n\n", 1)[0].splitlines():
        name, _, value = line.partition(":")
        entries[name.strip()] = value.strip()
    names = _X86 if "vendor_id" in entries else _ARM
    identity = {field: entries.get(name, "") for field, name in names.items()}
    instructions = entries.get("flags") or entries.get("Features") or ""
    return identity | {"instructions": _hash(instructions), "name": entries.get("model name", "")}


def _macos() -> dict[str, str]:
    try:
        command = ["sysctl", "machdep.cpu", "hw.optional"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    entries = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    cpu = {n.removeprefix(_SYSCTL): v for n, v in entries.items() if n.startswith(_SYSCTL)}
    name = cpu.get("brand_string", "")
    features = f"{cpu.get('features', '')} {cpu.get('leaf7_features', '')}".lower()
    # Apple's own processors have no family; use the name and the optional instructions instead.
    arm = " ".join(n for n, v in entries.items() if n.startswith("hw.optional.arm.") and v != "0")
    instructions = _hash(features) or (hashlib.sha256(arm.encode()).hexdigest()[:8] if arm else "")
    return {
        "vendor": cpu.get("vendor") or ("Apple" if name.startswith("Apple") else ""),
        "family": cpu.get("family") or name,
        "model": cpu.get("model") or name,
        "stepping": cpu.get("stepping") or name,
        "instructions": instructions,
        "name": name,
    }


def _hash(flags: str) -> str:
    """Return a hash of the arithmetic instructions among a processor's flags; "" if none."""
    arithmetic = sorted({flag for flag in flags.split() if flag.startswith(_ARITHMETIC)})
    return hashlib.sha256(" ".join(arithmetic).encode()).hexdigest()[:8] if arithmetic else ""
