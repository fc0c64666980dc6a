"""Megalodon and MLA-MoE over meshes, random healthy triples, and the suite of a night."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import pytest

from megalodon_jax import traced_checks
from parity.engine.measure.measurement import Verdict
from parity.mesh import suite
from parity.mesh.report import MeshResult
from parity.mesh.step import MeshComparison
from parity.mesh.subjects import healthy, megalodon, mla_moe
from parity.mesh.subjects.megalodon import MESHES
from parity.mesh.subjects.mla_moe import MESHES as EXPERTS

WALK = pytest.mark.sweep
ODD_VOCABULARY = 72
"""A healthy group with 23 tokens in its vocabulary, which 4 parts of `tensor` fill up."""


@pytest.fixture(autouse=True)
def without_checks():
    with traced_checks(False):
        yield


def compared(comparison, **options):
    report = comparison.run(precisions=("float64",), forced=False, **options)
    assert report.holds, report.table()
    return {m.quantity for m in report.measurements}


def test_megalodon_on_a_mesh_of_three_axes_is_the_same_mathematics():
    found = compared(megalodon(steps=0, gradients=False, meshes=(MESHES[3],)))
    assert {"embed", "cema", "logits", "loss"} <= found


@WALK
def test_megalodon_on_explicit_axes_is_the_same_mathematics():
    found = compared(megalodon(steps=0, explicit=True, meshes=(MESHES[3],)))
    assert {"logits", "loss", "grad/model.embed.weight"} <= found


@WALK
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_megalodon_trains_alike_on_every_mesh(mesh):
    found = compared(megalodon(meshes=(mesh,)))
    assert {"losses", "gradient_norm", "step3/nu/model.norm.weight"} <= found


@WALK
@pytest.mark.parametrize("mesh", EXPERTS, ids=str)
def test_experts_on_an_axis_train_alike(mesh):
    assert "losses" in compared(mla_moe(meshes=(mesh,)))


@WALK
def test_megalodon_in_float32_stays_within_reordered_sums():
    report = megalodon(meshes=MESHES[3:4]).run(precisions=("float32",), watched=())
    assert report.holds, report.table()


@WALK
@pytest.mark.optimised
def test_healthy_triples_raise_no_alarm():
    told: list[str] = []
    wide = healthy.alarms([ODD_VOCABULARY], told.append, lambda sizes: sizes["tensor"] == 4)
    assert list(wide) == [] and "2 cases" in told[0]


def test_a_healthy_configuration_depends_on_its_number_alone():
    # Neighbours share a configuration and its meshes.
    one, same, other = (healthy.healthy(i) for i in (3, 3, 3 + healthy.NEIGHBOURS))
    assert one.meshes == same.meshes
    assert one.meshes != other.meshes
    left, right = (jax.tree.leaves(c.arguments) for c in (one, same))
    assert all((a == b).all() for a, b in zip(left, right, strict=True))
    assert len(one.meshes) == healthy.VARIATIONS


ROW = {
    "case": "mesh megalodon data=8", "edge": "mesh64:one64", "quantity": "loss", "kind": "loss",
    "stage": -1, "metric": "rel_l2", "value": "inf", "tolerance": 1e-12, "verdict": "fail",
    "dtype": "float64", "device": "cpu", "identity": "0", "note": "", "deterministic": None,
    "suite": "mesh",
}  # fmt: skip


def test_the_suite_runs_where_there_are_devices(monkeypatch):
    asked = []

    responses = {ROW["case"]: {"loss": [1e-7, 2e-7]}}

    def run(module, arguments, environment, timeout):
        asked.append((module, arguments, environment["JAX_PLATFORMS"]))
        document = {"rows": [ROW], "responses": responses}
        return SimpleNamespace(returncode=0, stdout=f"a line\n{json.dumps(document)}\n", stderr="")

    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(suite, "run_module", run)
    (row,), found = suite.measure(["mesh megalodon"])
    assert found == responses
    assert asked == [("parity.mesh.suite", ("mesh megalodon",), "cpu")]
    assert (row.verdict, row.value) == (Verdict.FAIL, float("inf"))
    assert suite.row_of(suite._fields(row)) == row


def test_the_gate_where_a_break_starts_carries_what_is_known_of_it():
    rows = [ROW | {"quantity": name, "verdict": verdict} for name, verdict in
            (("logits", "pass"), ("norm", "info"), ("q", "fail"), ("loss", "fail"))]  # fmt: skip
    result = MeshResult("a case", tuple(map(suite.row_of, rows)), start="q", before="logits")
    found = {m.quantity: m.note for m in suite.explained(result)}
    assert list(found) == ["logits", "q", "loss"]
    assert "last correct stage: logits" in found["q"]
    assert found["logits"] == found["loss"] == ""
    # Where nothing breaks, nothing is said.
    whole = MeshResult("a case", result.measurements[:2])
    assert [m.note for m in suite.explained(whole)] == [""]


def test_a_process_that_fails_is_named(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    dead = SimpleNamespace(returncode=-9, stdout="", stderr="noise\nkilled\n")
    monkeypatch.setattr(suite, "run_module", lambda *_: dead)
    with pytest.raises(RuntimeError, match=r"exit code -9; .*: killed"):
        suite.measure()
    with pytest.raises(
        ValueError, match=r"no subject or case mesh of all .*; choose from mesh megalodon, mesh"
    ):
        suite.measure(["mesh of all"])
    assert suite.planned() == len(MESHES) + len(EXPERTS)


def test_a_mesh_that_failed_can_be_measured_alone_by_the_name_on_the_page(monkeypatch):
    measured = []

    def run(self, name, **options):
        measured.append((name, list(self.meshes)))
        return SimpleNamespace(results=())

    monkeypatch.setattr(MeshComparison, "run", run)
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    one = "mesh mla-moe data=2 expert=4"
    assert suite.planned([one]) == 1
    suite.measure([one])
    assert measured == [("mesh mla-moe", [{"data": 2, "expert": 4}])]
    # With its subject it is no second time.
    both = [one, "mesh mla-moe", "mesh megalodon data=1 fsdp=1 tensor=1 sequence=8"]
    assert suite.planned(both) == len(EXPERTS) + 1
