"""Captures a side: writes the results of its runs to a folder, for a comparison elsewhere.

The comparison may run on another machine, or in an environment without the side's libraries.

Source: docs/your-own-port.md.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from megalodon_jax.files import folder_written_aside
from parity.sides.capture_files import MANIFEST, Row, read_manifest, write_arrays, write_manifest
from parity.sides.projection import Valid, direction
from parity.sides.side import AS_IS, Precision, Rounding, Run, Side, SideError, Trace

SEEDS = 4
"""Number of perturbed runs per kind of `Rounding`, as many as a comparison uses at first."""
_PACKAGES = ("numpy", "torch", "jax", "jaxlib", "flax", "equinox", "transformers", "ml_dtypes")


def capture(
    side: Side,
    folder: str | os.PathLike[str],
    *,
    runs: Sequence[Run] | None = None,
    parameters: bool = True,
    overwrite: bool = False,
) -> Path:
    """Write a side's parameters, inputs and results to a folder, atomically; return the folder.

    If the side refuses a run, the reason is stored; `CapturedSide` raises an error with this reason
    when the run is requested. A run that is refused with derivatives is tried again without them.

    Args:
        side: the side to capture.
        folder: destination; missing parents are created.
        runs: the runs to capture; default `comparison_runs(side)`. A perturbed run that comes after
            the float64 run is stored as the difference from that run, in bfloat16, which is
            accurate enough for noise.
        parameters: whether to store the parameters; otherwise only their hashes are stored.
        overwrite: whether to replace an existing capture.

    Raises:
        SideError: the folder holds other files, or holds a capture and `overwrite` is False; the
            side refuses every run; the first run that the side does not refuse is in float32, and a
            repetition of it gives other results; or a run has replaced stages (`Run.forced`).
    """
    target = Path(os.path.realpath(folder))
    _check_free(target, overwrite)
    content: dict[str, Any] = {"side": side.kind}
    with folder_written_aside(target) as aside:
        values = side.parameters()
        rows = (
            write_arrays(aside, "parameters", values)
            if parameters
            else [Row.of(name, array) for name, array in values.items()]
        )
        content["parameters"] = [row.to_json() for row in rows]
        content["inputs"] = [r.to_json() for r in write_arrays(aside, "inputs", side.inputs())]
        writer = _Writer(side, aside)
        for how in comparison_runs(side) if runs is None else runs:
            writer.run(how)
        if not writer.runs:
            raise SideError(
                f"the {side.kind} side refused every requested run, so there is nothing to "
                f"capture: {'; '.join(entry['why'] for entry in writer.refused)}"
            )
        content |= {"runs": writer.runs, "refused": writer.refused}
        write_manifest(aside, {**content, **_environment(side.kind)})
    return target


def comparison_runs(
    side: Side,
    *,
    outputs: Sequence[str] | None = None,
    valid: Valid = None,
    loss: str | None = None,
    gradients: bool = True,
    bfloat16: bool = True,
    seeds: int = SEEDS,
) -> tuple[Run, ...]:
    """Return the runs of one side that a comparison needs.

    Runs with replaced stages are left out: their values are not known in advance.

    Args:
        side: the side; it is run once.
        outputs: names of the outputs that the other side has too; None: all.
        valid: mask of valid positions, bool (B, L), as passed to the comparison.
        loss: name of the one output to differentiate; None: all of `outputs` are differentiated,
            with fixed random cotangents.
        gradients: whether to include derivatives. Each run's gradients need as much storage as the
            parameters in the run's dtype; the gradients of perturbed runs are stored in bfloat16.
        bfloat16: whether to include bfloat16 runs.
        seeds: number of perturbed runs per kind of `Rounding`.

    Raises:
        SideError: an output does not exist, or the side cannot run.
    """
    trace = side.run(AS_IS)
    names = trace.outputs if outputs is None else outputs
    if loss is not None:
        names = (loss,)
    if lost := sorted(set(names) - set(trace.outputs)):
        raise SideError(f"no output {', '.join(lost)}; there are {', '.join(trace.outputs)}")
    cotangents = None
    if gradients and loss is not None:
        cotangents = {loss: np.ones_like(trace.stages[loss], np.float32)}
    elif gradients:
        cotangents = direction({name: trace.stages[name] for name in names}, valid)
    wide = Run(Precision.FLOAT64, cotangents=cotangents)
    moved = [replace(wide, rounding=kind, seed=n) for kind in Rounding for n in range(seeds)]
    runs = [Run(cotangents=cotangents), wide, *moved]
    if bfloat16:
        narrow = Run(Precision.BFLOAT16)
        rounded = [replace(narrow, rounding=Rounding.OPERATIONS, seed=n) for n in range(seeds)]
        runs += [narrow, *rounded]
    return tuple(runs)


class _Writer:
    """Runs a side and writes the results to a capture folder.

    `place_of_wide` is the index in `runs` of the unperturbed float64 run `wide`.
    """

    def __init__(self, side: Side, folder: Path) -> None:
        self.side, self.folder = side, folder
        self.runs: list[dict[str, Any]] = []
        self.refused: list[dict[str, Any]] = []
        self.wide: Trace | None = None
        self.place_of_wide: int | None = None

    def run(self, how: Run) -> None:
        """Run the side and write the results; retry without derivatives if the side refuses."""
        if how.forced:
            raise SideError("a capture has no runs with replaced stages: leave `Run.forced` empty")
        try:
            trace = self.side.run(how)
        except SideError as error:
            self.refused.append(entry_of(how) | {"why": str(error)})
            if how.cotangents is not None:
                self.run(replace(how, cotangents=None))
            return
        if how.precision is Precision.FLOAT32 and not self.runs:
            self._check_repeatable(how, trace)
        if how.precision is Precision.FLOAT64 and how.rounding is None:
            self.wide, self.place_of_wide = trace, len(self.runs)
        self._write(how, trace)

    def _check_repeatable(self, how: Run, trace: Trace) -> None:
        """Raise a SideError if a second run gives other results.

        Otherwise a nondeterministic side would look deterministic once captured.
        """
        second = self.side.run(how)
        again = second.stages | second.exact
        for name, value in (trace.stages | trace.exact).items():
            if name not in again or not np.array_equal(value, again[name], equal_nan=True):
                raise SideError(
                    f"the {self.side.kind} side is not deterministic: two runs of the same inputs "
                    f"first differ at {name}. Put it in evaluation mode, and pass its random key"
                )

    def _write(self, how: Run, trace: Trace) -> None:
        name = f"run-{len(self.runs):02}"
        base = self.wide if how.rounding is not None else None
        groups = {
            "stages": (trace.stages, {} if base is None else base.stages),
            "gradients": (trace.gradients, {} if base is None else base.gradients),
            "exact": (trace.exact, {}),
        }
        entry = entry_of(how) | {
            "outputs": list(trace.outputs),
            "notices": list(trace.notices),
            "unread": trace.unread,
            "frozen": list(trace.frozen),
            "updated": list(trace.updated),
            "base": self.place_of_wide,
        }
        # All groups are in one set of files; the prefix keeps apart a gradient and a stage of the
        # same name.
        arrays: dict[str, np.ndarray] = {}
        for group, (values, exact) in groups.items():
            for key, value in values.items():
                difference = _difference(value, exact.get(key))
                arrays[f"{group}/{key}"] = value if difference is None else difference
        rows = write_arrays(self.folder, name, arrays)
        for group, (values, _) in groups.items():
            entry[group] = [
                row.to_json() | {"name": key, "differs": arrays[row.name] is not values[key]}
                for row in rows
                if row.name.startswith(f"{group}/")
                for key in [row.name.removeprefix(f"{group}/")]
            ]
        if how.cotangents is not None:
            rows = write_arrays(self.folder, f"{name}-cotangents", how.cotangents)
            entry["cotangents"] = [row.to_json() for row in rows]
        self.runs.append(entry)


def entry_of(how: Run) -> dict[str, Any]:
    """Return the fields of a capture's manifest that identify the run with these settings."""
    return {
        "precision": str(how.precision),
        "rounding": None if how.rounding is None else str(how.rounding),
        "seed": how.seed,
        "shared": sorted(how.shared or ()),
        "derivatives": how.cotangents is not None,
    }


def text_of(entry: Mapping[str, Any]) -> str:
    """Describe a run of the manifest, such as "float64 perturbed by operations, seed 0"."""
    parts = [entry["precision"]]
    if entry["rounding"] is not None:
        parts.append(f"perturbed by {entry['rounding']}, seed {entry['seed']}")
    if entry["derivatives"]:
        parts.append("with derivatives")
    return " ".join(parts)


def _difference(value: np.ndarray, exact: np.ndarray | None) -> np.ndarray | None:
    """Return `value` minus `exact` in bfloat16.

    None unless both are float64 arrays of the same shape and their difference is finite.
    """
    if exact is None or exact.shape != value.shape:
        return None
    if not value.dtype == exact.dtype == np.float64:
        return None
    with np.errstate(invalid="ignore"):
        # inf - inf is NaN. NumPy returns a scalar, not an array, for 0-d operands.
        apart = np.asarray(value - exact)
    return apart.astype(ml_dtypes.bfloat16) if np.isfinite(apart).all() else None


def _check_free(target: Path, overwrite: bool) -> None:
    if not target.exists():
        return
    is_capture = target.is_dir() and (target / MANIFEST).is_file()
    if not is_capture and (not target.is_dir() or any(target.iterdir())):
        raise SideError(f"{target} exists and is not a capture: choose another folder.")
    if is_capture and not overwrite:
        raise SideError(f"{target} holds a capture: pass overwrite=True, or choose another folder.")
    if is_capture:
        # Another program's folder may have a manifest.json too; it must not be overwritten.
        read_manifest(target)


def _environment(kind: str) -> dict[str, Any]:
    """Return the versions of the loaded packages, without importing any, and the name of the device
    on which a side of this kind (`Side.kind`) computes: torch's for `torch`, else JAX's."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        if package in sys.modules:
            try:
                versions[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                versions[package] = str(getattr(sys.modules[package], "__version__", "unknown"))
    device = "unknown"
    # Query only the library that ran: querying JAX would reserve most of the GPU's memory.
    if kind == "torch" and (torch := sys.modules.get("torch")) is not None:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    elif kind != "torch" and (jax := sys.modules.get("jax")) is not None:
        device = jax.devices()[0].device_kind
    return {"versions": versions, "device": device}
