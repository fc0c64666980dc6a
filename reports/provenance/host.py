"""Identity of the machine of a run: machines with equal fingerprints round alike.

A host is identified by vendor, family, model, stepping and instruction set
(`parity.executors.machine`), and on a GPU also by the GPU. A fingerprint adds everything else that
chooses kernels: threads, flags, versions, and the processor capability found by the reference's
library. See docs/verdicts.md "Another machine".
"""

from __future__ import annotations

import hashlib
import json

from parity.executors.machine import FIELDS, FLAGS, UNKNOWN, host, threads
from reports.store.manifest import Environment

__all__ = [
    "FIELDS", "FLAGS", "GPU_FIELDS", "UNKNOWN", "differences", "fingerprint", "host", "processor",
    "settings", "threads",
]  # fmt: skip
GPU_FIELDS = ("compute capability", "memory", "driver", "CUDA")
"""Fields of `Environment.host` that distinguish GPUs with the same name."""


def settings(environment: Environment) -> dict[str, str]:
    """Return everything that enters a fingerprint as text, by name; `UNKNOWN` if not known."""
    device, reference = environment.device, environment.reference
    parts: dict[str, object] = {"device": device.kind, "processor": device.name}
    parts |= {f"processor {n}": environment.host.get(n, UNKNOWN) for n in FIELDS}
    if device.kind == "cuda":
        parts |= {f"GPU {n}": environment.host.get(n, UNKNOWN) for n in GPU_FIELDS}
    parts |= {"threads": environment.threads}
    # An empty flag counts as unset: older runs do not store flags that were added since.
    parts |= {n: v for n, v in environment.flags.items() if v}
    parts |= environment.versions
    parts |= {f"reference {n}": getattr(reference, n) for n in ("kind", "commit", "capability")}
    return {name: UNKNOWN if value is None else str(value) for name, value in parts.items()}


def fingerprint(environment: Environment, *, versions: bool = True) -> str | None:
    """Return a hash of `settings`; None if a run does not know its processor or GPU.

    Without `versions` the hash does not change when a package or the reference is updated: it then
    identifies a machine and a kind of reference, but not how they round.
    """
    parts = settings(environment)
    needed = {
        "cpu": [f"processor {n}" for n in FIELDS],
        "cuda": [f"GPU {n}" for n in GPU_FIELDS],
    }
    if any(parts[name] == UNKNOWN for name in needed.get(parts["device"], ())):
        return None
    if not versions:
        updated = {*environment.versions, "reference commit", "reference capability"}
        parts = {name: value for name, value in parts.items() if name not in updated}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def differences(now: Environment, then: Environment) -> tuple[str, ...]:
    """Describe how the settings of a run differ from an earlier one's, such as "threads 2 → 1".

    Each line has the earlier value first; "none" stands for a setting that the run lacks. The
    processor comes first, in one line. References are not compared if one of the runs has none,
    such as a session of tests that measured nothing of Megalodon: no value that both runs have
    depends on a reference.
    """
    ours, theirs = settings(now), settings(then)
    names = [n for n in dict.fromkeys((*theirs, *ours)) if ours.get(n) != theirs.get(n)]
    if None in (now.reference.kind, then.reference.kind):
        names = [n for n in names if not n.startswith("reference ")]
    others = [n for n in names if not n.startswith("processor")]
    lines = [f"{n} {theirs.get(n, 'none')} → {ours.get(n, 'none')}" for n in others]
    if len(others) < len(names):
        lines.insert(0, f"processor {processor(then)} → {processor(now)}")
    return tuple(lines)


def processor(environment: Environment) -> str:
    """Name the processor of a run with family, model, stepping and instructions, or its GPU.

    A GPU is named with its `GPU_FIELDS`. Unknown fields are left out.
    """
    name, here = environment.device.name or UNKNOWN, environment.host
    fields = GPU_FIELDS if environment.device.kind == "cuda" else FIELDS[1:]
    parts = [f"{n} {here[n]}" for n in fields if here.get(n, UNKNOWN) != UNKNOWN]
    return f"{name} ({', '.join(parts)})" if parts else f"{name} (otherwise unknown)"
