"""Every part of a machine's identity is told apart, each by itself."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from parity.engine.measure.compare import Comparison
from parity.executors.machine import FIELDS, FLAGS
from parity.megalodon.cases import by_name
from parity.megalodon.edges import MegalodonEdge
from parity.megalodon.known_differences import measure
from parity.megalodon.recordings import RecordedReference
from parity.tolerances import NoiseFloors
from reports.provenance import environment
from reports.provenance.host import differences, fingerprint
from reports.store.manifest import Device, Environment, ReferenceInfo
from reports.store.schema import RunKind

HERE = Environment(
    device=Device("cpu", "Some Processor"),
    host=dict.fromkeys(FIELDS, "known"),
    threads=2,
    flags={"XLA_FLAGS": "", "matmul_precision": "highest"},
    versions={"jax": "0.10.1", "numpy": "2.3.4"},
    reference=ReferenceInfo("live", "082db4b", {"torch": "2.13"}, "AVX512"),
)
CHOOSE_KERNELS = (
    "XLA_FLAGS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS",
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR",
    "OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES", "NVIDIA_TF32_OVERRIDE",
    "JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_DEFAULT_MATMUL_PRECISION",
)  # fmt: skip
"""Again, on purpose: a name that is dropped from the list would not be missed by its readers."""


def with_reference(**changes: Any) -> Environment:
    return replace(HERE, reference=replace(HERE.reference, **changes))


OTHERS = {
    "class of device": replace(HERE, device=Device("tpu", "Some Processor")),
    "name of device": replace(HERE, device=Device("cpu", "Some Other Processor")),
    "threads": replace(HERE, threads=1),
    "matmul precision": replace(HERE, flags=dict(HERE.flags) | {"matmul_precision": "default"}),
    "a version": replace(HERE, versions=dict(HERE.versions) | {"numpy": "2.4.0"}),
    "a package more": replace(HERE, versions=dict(HERE.versions) | {"scipy": "1.17"}),
    "reference": with_reference(kind="recorded"),
    "reference's commit": with_reference(commit="0000000"),
    "torch's capability": with_reference(capability="AVX2"),
    "torch's capability unknown": with_reference(capability=None),
} | {f"processor's {n}": replace(HERE, host=dict(HERE.host) | {n: "another"}) for n in FIELDS}
OTHERS |= {name: replace(HERE, flags=dict(HERE.flags) | {name: "1"}) for name in CHOOSE_KERNELS}


@pytest.mark.parametrize("what", OTHERS)
def test_each_part_makes_another_machine(what: str) -> None:
    other = OTHERS[what]
    assert fingerprint(HERE) is not None
    assert fingerprint(other) != fingerprint(HERE)
    assert differences(other, HERE) and differences(HERE, other)
    assert differences(other, other) == ()


def test_what_names_a_file_of_a_pin_is_the_machine_and_not_its_libraries() -> None:
    names = {what for what, other in OTHERS.items() if _file(other) == _file(HERE)}
    assert names == {
        *("a version", "a package more", "reference's commit"),
        *("torch's capability", "torch's capability unknown"),
    }


def _file(environment: Environment) -> str | None:
    return fingerprint(environment, versions=False)


def test_every_variable_that_chooses_kernels_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "git_state", lambda *_: ("0" * 40, False))
    assert set(FLAGS) == set(CHOOSE_KERNELS)
    for number, name in enumerate(FLAGS):
        monkeypatch.setenv(name, f"value {number}")
    made = environment.new_manifest(datetime.now(UTC), RunKind.NIGHTLY).environment
    assert {name: made.flags[name] for name in FLAGS} == {
        name: f"value {number}" for number, name in enumerate(FLAGS)
    }


@pytest.mark.parametrize("live", [True, False])
def test_the_capability_that_torch_found_is_recorded_where_torch_ran(live: bool) -> None:
    class Answering(RecordedReference):
        kind, omits = "live" if live else "recorded", "any"
        provenance = property(lambda self: {"commit": "", "versions": {}, "capability": "AVX512"})

    described = environment.describe(object.__new__(Answering))
    # Recorded numbers are the same whatever processor reads them.
    assert described.capability == ("AVX512" if live else None)


def test_the_identity_of_a_measurement_holds_the_class_of_device() -> None:
    """Values of a GPU are never a history of those of a processor."""
    work = by_name("length_c").work

    def identities(device: str) -> set[str]:
        edge, floors = MegalodonEdge.JAX64_ORACLE, NoiseFloors.load()
        rows = Comparison(work, edge, floors, "float64", device).run({}, {"loss": np.asarray(3.0)})
        return {m.identity for m in rows}

    assert identities("cpu") and identities("cpu").isdisjoint(identities("cuda"))
    assert identities("cpu") == identities("cpu")


def test_the_identity_of_a_known_difference_holds_the_class_of_device() -> None:
    class Nothing:
        def known_differences(self) -> dict[str, Any]:
            return {}

    here, there = (
        {m.identity for m in measure(Nothing(), device)}  # pyright: ignore[reportArgumentType]
        for device in ("cpu", "cuda")
    )
    assert here and here.isdisjoint(there)


@pytest.mark.parametrize("kind", [None, "recorded"])
def test_the_reference_of_one_run_explains_nothing_if_the_other_has_none(kind: str | None) -> None:
    """A session of tests without Megalodon and one with it: a change of a user's value is one."""
    other = replace(HERE, reference=ReferenceInfo(kind), threads=1)
    for found in (differences(HERE, other), differences(other, HERE)):
        assert any(line.startswith("threads") for line in found)
        assert any(line.startswith("reference") for line in found) is (kind is not None)
