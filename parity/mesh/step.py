"""A user's step and the meshes it is to be compared on: what a step file returns.

A step file is Python with a function `step()` that returns a `MeshComparison`; it asks for no
devices, so that meshes are made where there are some. Source: docs/meshes.md "A step file".
"""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from parity.engine.exits import exits_named
from parity.mesh.comparison import compare_meshes, layouts
from parity.mesh.report import MeshReport

ENTRY = "step"
"""What a step file calls its function."""
VIRTUAL = 8
"""Devices a CPU is split into where nobody says: enough for three axes of two."""


@dataclass(frozen=True)
class MeshComparison:
    """A function, what it is called with, how that is split, and the meshes."""

    function: Callable[..., Any]
    """Of the arguments; anything out of it. Under a mesh it is traced with that as the current."""
    arguments: tuple[Any, ...]
    """Pytrees: arrays of NumPy or JAX, and whatever else they hold."""
    specs: Any
    """`PartitionSpec`s as a prefix of the arguments, or a function of path, leaf and mesh."""
    meshes: Sequence[Mapping[str, int]]
    """Sizes by axis, such as `{"data": 2, "tensor": 4}`; all with the same axes in one order."""
    name: str = "step"
    marks: Mapping[str, PartitionSpec] = field(default_factory=dict)
    """Where the blocks of marks inside of `shard_map` lie, if shapes alone could be misread."""
    precisions: Sequence[str] = ("float64", "float32")
    masked_outputs: bool = False
    """Whether results hold infinities on purpose; see `compare_meshes`."""
    zeros: Collection[str] = ()
    """Results that are 0 by construction on every side, such as the gradient of a buffer: comparing
    them would say nothing, so they are no gates."""
    explicit: bool = False
    """Whether axes are Explicit, in the types of arrays; otherwise XLA splits what nobody did."""

    def on(self, meshes: Sequence[Mapping[str, int]]) -> MeshComparison:
        """Return the same on other meshes."""
        return replace(self, meshes=tuple(meshes))

    def run(self, **options: Any) -> MeshReport:
        """Compare; options as of `compare_meshes`.

        Raises:
            ValueError: a mesh has more devices than there are, or meshes have other axes.
        """
        meshes = [mesh_of(sizes, explicit=self.explicit) for sizes in self.meshes]
        return compare_meshes(
            self.function,
            self.arguments,
            layouts(self.arguments, self.specs, meshes),
            **(
                {
                    "name": self.name,
                    "marks": self.marks,
                    "precisions": self.precisions,
                    "masked_outputs": self.masked_outputs,
                }
                | options
            ),
        )


def mesh_of(sizes: Mapping[str, int], *, explicit: bool = False) -> Mesh:
    """Return a mesh of the first devices there are.

    Raises:
        ValueError: a size is below 1, or there are fewer devices than it needs.
    """
    if not sizes or min(sizes.values()) < 1:
        raise ValueError(f"mesh_of: expected axes with sizes of at least 1, got {dict(sizes)}.")
    needed, devices = math.prod(sizes.values()), jax.devices()
    if needed > len(devices):
        raise ValueError(
            f"mesh {dict(sizes)} needs {needed} devices and there are {len(devices)}; on a CPU "
            f"virtual ones are made before JAX starts: --devices {needed} on the command line, or "
            f"jax.config.update('jax_num_cpu_devices', {needed}) at the start of a program."
        )
    kind = AxisType.Explicit if explicit else AxisType.Auto
    grid = np.asarray(devices[:needed]).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(kind,) * len(sizes))


def parse_mesh(text: str) -> dict[str, int]:
    """Read sizes by axis out of `data=2,tensor=4`.

    Raises:
        ValueError: the text is no such list.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = part.strip().partition("=")
        if not (axis.isidentifier() and equals and size.isdecimal()) or axis in sizes:
            raise ValueError(f"expected a mesh such as data=2,tensor=4, received {text!r}.")
        sizes[axis] = int(size)
    return sizes


def read_step(path: Path) -> MeshComparison:
    """Run a step file and return what its `step()` does.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it has no function `step`, that returns something else, or the file ends the
            program.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no step file {path}.")
    with exits_named(str(path)):
        entry = runpy.run_path(str(path)).get(ENTRY)
    if not callable(entry):
        raise ValueError(f"{path}: expected a function {ENTRY}(), and there is none; write one.")
    with exits_named(f"{ENTRY}() of {path}"):
        step = entry()
    if not isinstance(step, MeshComparison):
        raise ValueError(
            f"{path}: expected {ENTRY}() to return a parity.mesh.MeshComparison, got "
            f"{type(step).__name__}."
        )
    return step


def prepare_devices(count: int) -> None:
    """Split the CPU into virtual devices, if JAX has not started yet and nobody said how many."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        # JAX runs already, or its flags say another number: `mesh_of` refuses what does not fit.
        return
