"""Facts for the command `doctor`: versions, devices, reference, and flags that change numbers.

Source: docs/reports.md "Command line".
"""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib import util
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megalodon_jax.extras import install
from megalodon_jax.quantization.products import path_of
from parity.device import device_kind
from parity.megalodon.recordings import FOLDER, RENEW
from parity.megalodon.reference import identity, why_unavailable
from parity.recordings import RecordingError, read_provenance
from reports.provenance import host as hosts
from reports.provenance.environment import ABSENT, PACKAGES, new_manifest, version_of
from reports.provenance.gpu import repeatable
from reports.store.manifest import Environment
from reports.store.runs import list_lines
from reports.store.schema import RunKind, StoreError
from reports.text import count
from reports.verdict import pins
from stability.core.recommendation import NEVER, recommend

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
OPTIONAL = {
    "torch": f"torch modules cannot be compared: `{install('torch')}`",
    "transformers": "",
    "megalodon-hf": "",
    "playwright": "",
}
"""Optional packages, each with the advice if it is missing; "" if another line has the advice."""


@dataclass(frozen=True, slots=True)
class Line:
    """One fact about this machine, with advice if it should be changed."""

    topic: str
    value: str
    advice: str = ""
    """Instruction about the fact; "" if nothing has to be done."""
    optional: bool = False
    """Whether results are correct even if the advice is not followed."""


UNREAD = {"cpu": "no readable /proc/cpuinfo", "cuda": "no nvidia-smi for memory and driver"}
"""Reason why the fingerprint (hash of all that decides how a device rounds) is missing, by device
class."""


def examine(out: Path) -> list[Line]:
    """Return all facts about this machine and about `out`, the folder of runs.

    Writes no file. On a GPU it sets XLA_FLAGS as a nightly run does.
    """
    # Sets the flags that a nightly run sets, so that the facts are those that it would store.
    repeatable()
    return [*_versions(), *_devices(), *_numerics(), *_reference(), *_runs(out), *_tools()]


def _versions() -> list[Line]:
    lines = [Line("python", platform.python_version())]
    lines += [_version(name, f"`{install('nightly')}` brings it") for name in PACKAGES]
    lines += [_version(name, advice, optional=True) for name, advice in OPTIONAL.items()]
    return lines


def _version(name: str, advice: str, optional: bool = False) -> Line:
    version = version_of(name)
    return Line(name, version, advice if version == ABSENT else "", optional)


def _devices() -> list[Line]:
    kind, here = device_kind(), _environment()
    device = f"{kind}: {hosts.processor(here)}, {len(jax.devices())}"
    settings = {name: os.environ[name] for name in THREADS if name in os.environ}
    text = ", ".join(f"{name}={value}" for name, value in settings.items())
    # JAX uses one kind of device at a time, so the first represents all.
    advice = recommend(jax.devices()[0])
    return [
        Line("device", device),
        Line("threads", f"{hosts.threads()}{f' ({text})' if text else ''}"),
        Line("fingerprint", hosts.fingerprint(here) or f"unknown: {UNREAD[kind]}"),
        Line(
            "precision to train in",
            f"{advice.precision}: {advice.reason}; {NEVER} ({advice.source})",
        ),
    ]


def _numerics() -> list[Line]:
    config: Any = jax.config
    precision = config.jax_default_matmul_precision or "default"
    x64, tf32 = config.jax_enable_x64, os.environ.get("NVIDIA_TF32_OVERRIDE")
    flags = os.environ.get("XLA_FLAGS", "")
    fast = [f for f in flags.split() if "fast_math" in f and not f.endswith("=false")]
    return [
        Line("matmul precision", f"{precision}; comparisons use highest"),
        Line("low-precision products", path_of()),
        Line(
            "x64",
            "on" if x64 else "off",
            "float32 runs need it off: unset JAX_ENABLE_X64" if x64 else "",
        ),
        Line(
            "TF32",
            "forced on" if tf32 == "1" else "not forced",
            "products would lose 13 mantissa bits: unset NVIDIA_TF32_OVERRIDE"
            if tf32 == "1"
            else "",
        ),
        Line(
            "XLA_FLAGS",
            flags or "none",
            f"XLA may then deviate from IEEE rounding: remove {', '.join(fast)}" if fast else "",
        ),
        _optimisations(),
        _denormals(),
    ]


def _denormals() -> Line:
    """Return a line that says whether NumPy and XLA keep denormals.

    To find out, the smallest normal float32 is halved.
    """
    smallest = np.finfo(np.float32).tiny
    with np.errstate(all="ignore"):
        here = bool(smallest * np.float32(0.5) > 0)
    compiled = bool(jax.jit(lambda x: x * np.float32(0.5))(smallest) > 0)
    words = {True: "keeps them", False: "flushes them to zero"}
    # The oracle is NumPy: a library that sets flush-to-zero process-wide would falsify it.
    advice = "" if here else "some library set flush-to-zero: the oracle would lose small numbers"
    return Line("denormals", f"NumPy {words[here]}, XLA {words[compiled]}", advice)


def _optimisations() -> Line:
    """Return a line that says whether LLVM's optimisations are on, as nightly runs need them."""
    name = "JAX_DISABLE_MOST_OPTIMIZATIONS"
    off = os.environ.get(name, "").lower() in ("1", "true", "yes", "on")
    advice = f"sums round differently than in other nights: unset {name}" if off else ""
    return Line("LLVM's optimisations", "mostly off" if off else "on", advice)


def _reference() -> list[Line]:
    reason = why_unavailable()
    live = "can run" if reason is None else f"cannot run: {reason}"
    kind = "live" if reason is None else "recorded"
    install = "" if reason is None else "`make reference` installs it: comparisons are live then"
    lines = [
        Line("reference", f"`--reference auto` compares with megalodon-hf {kind}", install, True),
        Line("megalodon-hf, live", f"{live}, {identity()}" if reason is None else live),
    ]
    try:
        provenance = read_provenance(FOLDER / "plain.safetensors", RENEW)
        lines.append(Line("megalodon-hf, recorded", f"commit {provenance['commit']}"))
    except RecordingError as error:
        lines.append(Line("megalodon-hf, recorded", "unreadable", str(error)))
    return lines


def _runs(out: Path) -> list[Line]:
    try:
        _check_access(out)
        stored, unreadable = list_lines(out, keep=False)
        advice = f"unreadable: {', '.join(folder.name for folder, _ in unreadable)}"
        summary = f"{out}: {count(len(stored), 'run')}"
        folder = Line("folder of runs", summary, advice if unreadable else "")
    except StoreError as error:
        folder = Line("folder of runs", str(out), str(error))
    return [folder, *_pinned()]


def _check_access(out: Path) -> None:
    """Raise StoreError if runs cannot be written to `out`; does not create the folder."""
    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise StoreError(f"expected a folder at {there}, but it is a file; give another --out")
    if not os.access(there, os.W_OK | os.X_OK):
        raise StoreError(f"{there} cannot be written; give another --out")


def _pinned() -> list[Line]:
    """Return a line per pinned run: why it was pinned, and how this machine differs from its own.

    A line for each unusable pin follows. Without any of these lines, one line says that there is no
    pinned run.
    """
    pinned, here = pins.load(device_kind()), _environment()
    lines = []
    for pin in pinned.pins:
        # The kind of reference is chosen when a night runs, so it is not compared here.
        there = replace(pin.environment, reference=here.reference)
        differs = "; ".join(hosts.differences(here, there)) or "nothing: this is that machine"
        lines.append(Line("pinned run", f"{pin.run}: {pin.reason} Differences here: {differs}"))
    lines += [Line("pinned run", "not used", why) for why in pinned.unusable]
    return lines or [Line("pinned run", "none: `megalodon-numerics pin` pins one")]


@cache
def _environment() -> Environment:
    """Return the environment that a run made now would store."""
    return new_manifest(datetime.now(UTC), RunKind.NIGHTLY).environment


def _installed(package: str) -> bool:
    return util.find_spec(package.replace("-", "_")) is not None


def _tools() -> list[Line]:
    absent = [] if shutil.which("chromium") or shutil.which("chromium-browser") else ["Chromium"]
    absent += [name for name in ("playwright", "axe-playwright-python") if not _installed(name)]
    ready = f"no {' and no '.join(absent)}" if absent else "Chromium and playwright found"
    names = {"Chromium": "`apt-get install chromium`"}
    ways = " and ".join(names.get(name, f"`pip install {name}`") for name in absent)
    install = f"tests of the page are skipped: {ways}" if absent else ""
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    return [
        Line("browser tests", ready, install, True),
        Line(
            "compilation cache",
            cache or "none: every run compiles again",
            "" if cache else "commands start faster: set JAX_COMPILATION_CACHE_DIR=.cache/jax",
            True,
        ),
    ]
