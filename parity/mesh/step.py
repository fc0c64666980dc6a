"""Step files: a user's function and the meshes on which to compare it with one device.

A step file is a Python file with a function `step()` that returns a `MeshComparison`. It gives only
axis sizes; the meshes are made later, when the devices exist. Source: docs/sharding.md "A step
file".
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

from parity.engine.programs.exits import exits_named
from parity.mesh.comparison import compare_meshes, layouts
from parity.mesh.report import MeshReport

ENTRY = "step"
"""Name of the function that a step file must define."""
VIRTUAL = 8
"""Default number of virtual CPU devices: enough for three axes of size two."""


@dataclass(frozen=True)
class MeshComparison:
    """A function to compare over meshes, with its arguments, their shardings and the meshes."""

    function: Callable[..., Any]
    """Function of the arguments; returns any pytree. The function is traced with the mesh as JAX's
    current one."""
    arguments: tuple[Any, ...]
    """Pytrees of NumPy or JAX arrays; other leaves are static."""
    specs: Any
    """Tree of `PartitionSpec`s that is a prefix of the arguments, or a function that returns a
    `PartitionSpec`, given a leaf's path, the leaf and the mesh; see `layouts`."""
    meshes: Sequence[Mapping[str, int]]
    """Axis sizes, such as `{"data": 2, "tensor": 4}`; all meshes have the same axes in order."""
    name: str = "step"
    """First part of the case name in measurements."""
    marks: Mapping[str, PartitionSpec] = field(default_factory=dict)
    """Shardings of marks (intermediates named with `checkpoint_name`) inside `shard_map`; needed if
    shapes alone do not determine them."""
    precisions: Sequence[str] = ("float64", "float32")
    """Precisions to compare in; "float32" is the unmodified function."""
    masked_outputs: bool = False
    """Whether results hold intended infinities; see `compare_meshes`."""
    zeros: Collection[str] = ()
    """Names of results that are 0 by construction, such as the gradient of a buffer. These results
    need no gate, since comparing zeros would prove nothing."""
    explicit: bool = False
    """Whether mesh axes have JAX's type Explicit; False: Auto, and XLA infers shardings."""

    def on(self, meshes: Sequence[Mapping[str, int]]) -> MeshComparison:
        """Return the same comparison on other meshes."""
        return replace(self, meshes=tuple(meshes))

    def run(self, **options: Any) -> MeshReport:
        """Compare the function on every mesh with one device.

        Args:
            options: keyword arguments of `compare_meshes`; they override this object's fields.

        Raises:
            ValueError: a mesh needs more devices than there are, or as in `compare_meshes`.
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
    """Return a mesh with these axis sizes, made of the first available devices.

    Args:
        sizes: sizes by axis name.
        explicit: give the axes JAX's type Explicit instead of Auto.

    Raises:
        ValueError: no axis is given, a size is below 1, or there are too few devices.
    """
    if not sizes or min(sizes.values()) < 1:
        raise ValueError(f"mesh_of: expected axes with sizes of at least 1, got {dict(sizes)}.")
    needed, devices = math.prod(sizes.values()), jax.devices()
    if needed > len(devices):
        raise ValueError(
            f"mesh {dict(sizes)} needs {needed} devices, but there are {len(devices)}. On "
            f"a CPU, create virtual ones before JAX starts: --devices {needed} on the command "
            f"line, or jax.config.update('jax_num_cpu_devices', {needed}) at program start."
        )
    kind = AxisType.Explicit if explicit else AxisType.Auto
    grid = np.asarray(devices[:needed]).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(kind,) * len(sizes))


def parse_mesh(text: str) -> dict[str, int]:
    """Parse axis sizes such as `data=2,tensor=4` into a dictionary.

    Raises:
        ValueError: the text has another form, or names an axis twice.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = part.strip().partition("=")
        if not (axis.isidentifier() and equals and size.isdecimal()) or axis in sizes:
            raise ValueError(
                f"expected a mesh such as data=2,tensor=4 with each axis once, received {text!r}."
            )
        sizes[axis] = int(size)
    return sizes


def read_step(path: Path) -> MeshComparison:
    """Run a step file and return the `MeshComparison` that its function `step()` returns.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has no function `step`, the function returns another type, or the file
            ends the program.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no step file {path}.")
    with exits_named(str(path)):
        entry = runpy.run_path(str(path)).get(ENTRY)
    if not callable(entry):
        raise ValueError(
            f"{path} defines no function {ENTRY}(); define one that returns a "
            "parity.mesh.MeshComparison."
        )
    with exits_named(f"{ENTRY}() of {path}"):
        step = entry()
    if not isinstance(step, MeshComparison):
        raise ValueError(
            f"{path}: expected {ENTRY}() to return a parity.mesh.MeshComparison, got "
            f"{type(step).__name__}."
        )
    return step


def prepare_devices(count: int) -> None:
    """Make JAX split the CPU into `count` virtual devices.

    Nothing changes if JAX has already started, or if its flags set another number.
    """
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        # JAX has started, or its flags set another number. `mesh_of` checks that there are enough.
        return
