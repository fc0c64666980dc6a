"""Environment of a run: time, code, versions, device, and the reference it compared with."""

from __future__ import annotations

import os
import platform
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from parity.device import device_kind
from parity.executors import identity as program
from reports.provenance.code import Start, git_state
from reports.provenance.gpu import gpu, libraries
from reports.provenance.host import FIELDS, FLAGS, host, threads
from reports.store.manifest import Device, Environment, Manifest, ReferenceInfo
from reports.store.schema import RunKind

HERE = Path(__file__).parent
PACKAGES = ("jax", "jaxlib", "equinox", "numpy", "scipy", "optax", "autograd")
ABSENT = "not installed"


@runtime_checkable
class Reference(Protocol):
    """The reference of a night, of which run.json holds commit and versions."""

    kind: str
    """"live" or "recorded"."""
    omits: str
    """Quantities that this reference does not have, in words."""

    @property
    def provenance(self) -> dict[str, Any]:
        """Commit of the reference, versions of packages, threads, CPU capability and device."""
        ...


def version_of(package: str) -> str:
    """Return the version of an installed package, or `ABSENT`."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ABSENT


def new_manifest(
    started: datetime,
    kind: RunKind,
    code: Path = HERE,
    aside: Path | None = None,
    start: Start | None = None,
) -> Manifest:
    """Return a manifest with kind, time, code and machine of a run.

    Args:
        started: Start of the measurement, UTC.
        kind: Kind of the run.
        code: A folder in the git checkout of the measured code; by default this project's, for a
            port the user's.
        aside: Folder of runs, whose files do not count as changes of the code.
        start: State when the measurement began, which replaces `code` and `aside`; None for the
            current state.
    """
    commit, dirty = (start.commit, start.dirty) if start else git_state(code, aside)
    kind_of_device, device = device_kind(), jax.devices()[0]
    here, versions = host(), {package: version_of(package) for package in PACKAGES}
    name, identity = here["name"], {field: here[field] for field in FIELDS}
    if kind_of_device == "cuda":
        name, identity = device.device_kind, identity | gpu(device)
        versions |= libraries()
    version = commit[:7] if commit else "unversioned"
    suffix = "" if kind is RunKind.NIGHTLY else f"-{kind}"
    return Manifest(
        id=f"{started:%Y-%m-%dT%H-%M-%SZ}-{version}{suffix}",
        created=started.isoformat(),
        kind=kind,
        commit=commit,
        dirty=dirty,
        code=start.code if start else program.code(),
        environment=Environment(
            device=Device(kind_of_device, name),
            host=identity,
            threads=threads(),
            flags={name: os.environ.get(name, "") for name in FLAGS}
            | {"matmul_precision": "highest"},
            versions={"python": platform.python_version()} | versions,
        ),
    )


def describe(reference: Reference) -> ReferenceInfo:
    """Return the fields of the manifest about the reference."""
    provenance = reference.provenance
    live = reference.kind != "recorded"
    origin = "run in this job" if live else "recordings made with the live reference"
    return ReferenceInfo(
        kind=reference.kind,
        commit=provenance["commit"],
        versions=provenance["versions"],
        # Recorded numbers do not depend on the processor that reads them.
        capability=provenance.get("capability") if live else None,
        detail=f"{origin}; not compared: {reference.omits}",
    )
