"""The nightly suite over meshes: every subject on every mesh, in a process with eight devices.

Virtual devices must be requested before JAX starts, and the nightly process has one device. So the
suite runs in a separate process unless there are enough devices. Run as a program, it prints its
measurements. Source: docs/sharding.md "Every night".
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import jax

from megalodon_jax.checks import traced_checks
from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.executors.interrupts import run_module
from parity.mesh.comparison import sizes_name
from parity.mesh.report import MeshResult
from parity.mesh.step import VIRTUAL, MeshComparison, prepare_devices
from parity.mesh.subjects import megalodon, mla_moe
from parity.mesh.subjects.megalodon import MESHES as OF_MEGALODON
from parity.mesh.subjects.mla_moe import MESHES as OF_MLA_MOE

SUITE = "mesh"
SUBJECTS = {"mesh megalodon": megalodon, "mesh mla-moe": mla_moe}
"""Subjects on all of their meshes, by the name used to request them."""
CASES = {
    f"{name} {sizes_name(sizes)}": (name, sizes)
    for name, meshes in (("mesh megalodon", OF_MEGALODON), ("mesh mla-moe", OF_MLA_MOE))
    for sizes in meshes
}
"""Subjects on one mesh, by case name; the page shows these names for repeating a case."""
WATCHED = ("float64",)
"""Precisions in which marks are compared too, to locate differences."""
ORDERS = 10
"""Orders of every sum from which the scatter of a level follows: as many as the seeds of the noise
floors (`parity.engine.measure.rounding_noise`). Four would make one healthy level in fifty look
lost."""
ALONE = 3600
"""Timeout of the suite's process in seconds: ten times its duration on two cores."""


class Measured(NamedTuple):
    """Rows and responses of the suite.

    Attributes:
        rows: every gate.
        responses: by case and quantity, the relative L2 response in float32 to every order of sums.
    """

    rows: list[Measurement]
    responses: dict[str, Mapping[str, Sequence[float]]]


def measure(names: Collection[str] = ()) -> Measured:
    """Return the gates of the requested subjects and cases, and their responses; default: all.

    Raises:
        ValueError: a name is unknown.
        RuntimeError: the process with the devices failed; the message is its last line.
    """
    chosen = tuple(names) or tuple(SUBJECTS)
    if unknown := sorted(set(chosen) - {*SUBJECTS, *CASES}):
        raise ValueError(
            f"unknown: {', '.join(unknown)}; expected {', '.join((*SUBJECTS, *CASES))}."
        )
    if jax.device_count() >= VIRTUAL:
        return measured(chosen)
    return _in_subprocess(chosen)


def measured(names: Collection[str]) -> Measured:
    """Return the gates of subjects and cases, compared in this process, and their responses.

    Marks are watched in float64, to locate differences; float32 is the unmodified program.
    """
    found = Measured([], {})
    for name, meshes in meshes_of(names).items():
        comparison: MeshComparison = SUBJECTS[name]().on(meshes)
        with traced_checks(False):
            report = comparison.run(
                name=name,
                watched=WATCHED,
                orders=ORDERS,
                suite=SUITE,
                device=jax.default_backend(),
            )
        for result in report.results:
            found.rows.extend(explained(result))
            found.responses[result.case] = result.responses
    return found


def explained(result: MeshResult) -> Iterator[Measurement]:
    """Yield the gates of a mesh; the row where a failure starts gets the whole explanation."""
    start = result.broken
    for m in result.measurements:
        if m is start:
            yield replace(m, note="; ".join(result.sentences()))
        elif m.verdict is not Verdict.INFO:
            yield m


def planned(names: Collection[str] = ()) -> int:
    """Return the number of meshes to compare the given subjects on; default: all subjects."""
    return sum(map(len, meshes_of(names or SUBJECTS).values()))


def meshes_of(names: Collection[str]) -> dict[str, list[Mapping[str, int]]]:
    """Return the requested meshes of each subject; names are subjects or cases."""
    chosen: dict[str, list[Mapping[str, int]]] = {}
    for case, (subject, sizes) in CASES.items():
        if subject in names or case in names:
            chosen.setdefault(subject, []).append(sizes)
    return chosen


def _in_subprocess(names: Collection[str]) -> Measured:
    own = os.environ | {"JAX_PLATFORMS": "cpu"}
    try:
        # `run_module` ends the process if the night is interrupted.
        done = run_module("parity.mesh.suite", tuple(names), own, ALONE)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the suite over meshes took longer than {ALONE} s.") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"the suite over meshes ended with {done.returncode}: {last}")
    document = json.loads(done.stdout.strip().splitlines()[-1])
    return Measured([row_of(fields) for fields in document["rows"]], document["responses"])


def row_of(fields: Mapping[str, Any]) -> Measurement:
    """Read a measurement from JSON fields; "nan" and "inf" are stored as text."""
    numbers = {name: float(fields[name]) for name in ("value", "tolerance")}
    kinds = {"kind": Kind(fields["kind"]), "verdict": Verdict(fields["verdict"])}
    return Measurement(**{**fields, **numbers, **kinds})


def _fields(m: Measurement) -> dict[str, Any]:
    # JSON has no NaN or infinity, so they are stored as text, which `float` can read.
    numbers = {name: getattr(m, name) for name in ("value", "tolerance")}
    texts = {n: v if math.isfinite(v) else str(v) for n, v in numbers.items()}
    return asdict(m) | texts


if __name__ == "__main__":
    prepare_devices(VIRTUAL)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    found = measured(sys.argv[1:])
    print(json.dumps({"rows": [_fields(m) for m in found.rows], "responses": found.responses}))
