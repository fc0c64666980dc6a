"""The nightly suite over meshes: compares every subject on every mesh with one device.

The suite needs eight devices. Virtual devices must be requested before JAX starts, and the nightly
process has only one device, so the suite then runs in a subprocess. Run as a program, this module
prints its measurements as JSON. Source: docs/sharding.md "Every night".
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
from parity.engine.programs.yardstick import RUN_ONCE
from parity.executors.interrupts import run_module
from parity.mesh.comparison import sizes_name
from parity.mesh.report import MeshResult
from parity.mesh.step import VIRTUAL, MeshComparison, prepare_devices
from parity.mesh.subjects import megalodon, mla_moe
from parity.mesh.subjects.megalodon import MESHES as OF_MEGALODON
from parity.mesh.subjects.mla_moe import MESHES as OF_MLA_MOE

SUITE = "mesh"
SUBJECTS = {"mesh megalodon": megalodon, "mesh mla-moe": mla_moe}
"""Function that returns the `MeshComparison` of a subject, by the name of the subject, which on the
command line requests all its meshes."""
CASES = {
    f"{name} {sizes_name(sizes)}": (name, sizes)
    for name, meshes in (("mesh megalodon", OF_MEGALODON), ("mesh mla-moe", OF_MLA_MOE))
    for sizes in meshes
}
"""Subject and axis sizes by case name, one case per mesh. The page of a run shows these names as
arguments of the command that repeats a case."""
WATCHED = ("float64",)
"""Precisions in which marked intermediates are compared too, to locate differences."""
ORDERS = 10
"""Number of runs with reordered sums on one device. Their scatter predicts how much an error level
(geometric mean of a group of errors) varies between machines. Other noise floors have as many seeds
(`parity.engine.measure.rounding_noise`). With four runs, one healthy level in fifty would look
wrong."""
ALONE = 3600
"""Timeout of the suite's subprocess in seconds: ten times its duration on two cores."""


class Measured(NamedTuple):
    """Results of the suite.

    Attributes:
        rows: measurements of all gates of all meshes.
        responses: relative L2 changes of one device's float32 results under reordered sums, one per
            run with another order, by case and quantity.
    """

    rows: list[Measurement]
    responses: dict[str, Mapping[str, Sequence[float]]]


def measure(names: Collection[str] = ()) -> Measured:
    """Run the suite on subjects and cases, in a subprocess if this process has too few devices.

    Args:
        names: names in `SUBJECTS` or `CASES`; empty: all subjects.

    Raises:
        ValueError: a name is unknown.
        RuntimeError: the subprocess failed or timed out; the message has its last line of stderr.
    """
    chosen = tuple(names) or tuple(SUBJECTS)
    if unknown := sorted(set(chosen) - {*SUBJECTS, *CASES}):
        raise ValueError(
            f"there is no subject or case {', '.join(unknown)} of the suite over meshes; choose "
            f"from {', '.join((*SUBJECTS, *CASES))}."
        )
    if jax.device_count() >= VIRTUAL:
        return measured(chosen)
    return _in_subprocess(chosen)


def measured(names: Collection[str]) -> Measured:
    """Run the suite on the named subjects and cases in this process.

    The process needs as many devices as the largest mesh.

    Marked intermediates are compared in float64 only, to locate differences; float32 is the
    unmodified program. Programs are compiled without LLVM's optimisations, so that compilation
    takes a quarter of its usual time. That is valid because XLA partitions a program the same way
    with and without them.
    """
    found = Measured([], {})
    for name, meshes in meshes_of(names).items():
        comparison: MeshComparison = SUBJECTS[name]().on(meshes)
        with traced_checks(False):
            report = comparison.run(
                name=name,
                watched=WATCHED,
                orders=ORDERS,
                compiler_options=RUN_ONCE,
                suite=SUITE,
                device=jax.default_backend(),
            )
        for result in report.results:
            found.rows.extend(explained(result))
            found.responses[result.case] = result.responses
    return found


def explained(result: MeshResult) -> Iterator[Measurement]:
    """Yield the gates of a mesh; the failing one, `result.broken`, gets an explanation as note."""
    start = result.broken
    for m in result.measurements:
        if m is start:
            yield replace(m, note="; ".join(result.sentences()))
        elif m.verdict is not Verdict.INFO:
            yield m


def planned(names: Collection[str] = ()) -> int:
    """Return the number of cases of the named subjects and cases; without names, of all."""
    return sum(map(len, meshes_of(names or SUBJECTS).values()))


def meshes_of(names: Collection[str]) -> dict[str, list[Mapping[str, int]]]:
    """Return the axis sizes of the requested meshes, by subject.

    `names` are keys of `SUBJECTS` (all its meshes) or of `CASES` (one mesh).
    """
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
        raise RuntimeError(
            f"the subprocess of the suite over meshes took longer than {ALONE} s and was ended; "
            "run the suite again on a machine with less load."
        ) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it wrote nothing to stderr"])[-1]
        raise RuntimeError(
            f"the subprocess of the suite over meshes ended with exit code {done.returncode}; the "
            f"last line of its stderr: {last}"
        )
    document = json.loads(done.stdout.strip().splitlines()[-1])
    return Measured([row_of(fields) for fields in document["rows"]], document["responses"])


def row_of(fields: Mapping[str, Any]) -> Measurement:
    """Return a measurement from its JSON fields, in which NaN and infinity are texts."""
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
