"""The harness finds planted bugs, names where they are, and is silent without one."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megalodon_jax.layers.norms import RMSNorm
from parity.engine.measure.measurement import Kind
from parity.faults import FAULTS, Family, Fault, Patch, absent, by_name, detection, select
from parity.faults.catalogue import faults_of
from parity.faults.detection import Detection, Laboratory
from parity.faults.healthy_cases import VARIATIONS, alarms, healthy
from parity.megalodon.cases import by_name as case_by_name
from parity.megalodon.edges import MegalodonEdge
from tests.helpers import cli

PLANTED = (
    "square_linear_transposed",
    "key_missing",
    "timenorm_unbiased_variance",
    "rmsnorm_wrong_eps",
    "value_quick_gelu",
    "ffn_residual_from_middle",
    "rope_keys_one_late",
    "attention_softmax_bfloat16",
    "cema_gamma_conjugated",
    "loss_counts_ignored",
    "cema_backward_not_conjugated",
    "products_in_tf32",
)
IDENTITY = Fault(
    Family.NORMS,
    "identity",
    "a patch that changes nothing",
    "layers.0.rmsnorm",
    Patch(RMSNorm, "__call__", lambda call: lambda self, x: call(self, x)),
)


def test_the_catalogue_covers_every_family():
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 60
    assert {fault.family for fault in FAULTS} == set(Family)


def test_an_installed_wheel_has_the_demonstration_and_says_where_the_others_are(
    tmp_path, monkeypatch
):
    installed = faults_of(tmp_path)
    assert [fault.name for fault in installed] == ["rope_keys_one_late"]
    names = [fault.name for fault in FAULTS]
    assert "rope_keys_one_late" in names and names == [fault.name for fault in faults_of()]
    monkeypatch.setattr("parity.faults.FAULTS", installed)
    with pytest.raises(ValueError, match=r"choose one of rope_keys_one_late\. .*tools/faults of a"):
        select(["rope_sign"])
    refused = cli("parity", "faults", "--fault", "no_such_bug")
    assert refused.exit_code == 2 and "tools/faults of a checkout" in refused.output.replace(
        "\n", " "
    )
    assert "tools/faults of a checkout" in cli("parity", "faults", "--list").output


def test_a_checkout_lacks_no_fault():
    assert absent() == ""
    assert "checkout" not in cli("parity", "faults", "--fault", "no_such_bug").output


def test_a_catalogue_in_which_two_faults_have_one_name_is_refused(tmp_path):
    folder = tmp_path / "tools" / "faults"
    folder.mkdir(parents=True)
    again = "from parity.faults.demonstration import DEMONSTRATION\nFAULTS = (DEMONSTRATION,)\n"
    for name in ("a.py", "b.py"):
        (folder / name).write_text(again, encoding="utf-8")
    # Files that begin with _ hold no faults.
    (folder / "_helpers.py").write_text("raise AssertionError", encoding="utf-8")
    with pytest.raises(ValueError, match="the same name: rope_keys_one_late"):
        faults_of(tmp_path)


def test_a_fault_names_a_stage_of_its_witness():
    for fault in FAULTS:
        case = case_by_name(fault.witness)
        gradients = {f"grad/{name}" for name in case.weights}
        assert fault.stage in {detection.REFUSED, *case.order, *gradients}, fault.name


@pytest.mark.parametrize(
    "names",
    [PLANTED[::6], *(pytest.param(PLANTED[i::6], marks=pytest.mark.sweep) for i in range(1, 6))],
)
def test_planted_faults_are_found_where_they_are(names):
    # Several in a test, so that one process compiles the single operations all of them share.
    laboratory = Laboratory(edges=(MegalodonEdge.JAX64_ORACLE,))
    faults = [by_name(name) for name in names]
    detections = [laboratory.detect(fault, case_by_name(fault.witness)) for fault in faults]
    assert {k.fault.name: k.found for k in detections} == {f.name: f.stage for f in faults}
    assert all(detection.signal > 1 for detection in detections)
    control = laboratory.detect(IDENTITY, case_by_name(IDENTITY.witness))
    assert not control.detected
    assert not control.localised


def test_a_cache_fault_is_found_where_it_is():
    laboratory = Laboratory(edges=(MegalodonEdge.JAX64_ORACLE,), compiled=True)
    fault = by_name("cache_step_without_omega")
    assert laboratory.detect(fault, case_by_name(fault.witness)).localised


def test_a_witness_that_fails_without_a_fault_proves_nothing(monkeypatch):
    from parity.megalodon.runner import JaxSubject

    monkeypatch.setattr(JaxSubject, "run", lambda self, case: {})
    with pytest.raises(RuntimeError, match="case length_c fails without a fault"):
        Laboratory().detect(IDENTITY, case_by_name("length_c"))


def test_an_error_of_a_patch_is_not_a_detection(monkeypatch):
    def broken(call):
        def faulty(self, x):
            raise ValueError("a mistake of the patch")

        return faulty

    monkeypatch.setattr(Laboratory, "_control", lambda self, case, edge: None)
    fault = replace(IDENTITY, patch=Patch(RMSNorm, "__call__", broken))
    with pytest.raises(ValueError, match="a mistake of the patch"):
        Laboratory().detect(fault, case_by_name("length_c"))


def test_planting_leaves_nothing_behind():
    for fault in FAULTS:
        before = vars(fault.patch.owner)[fault.patch.attribute]
        with fault.planted(compiled=False):
            assert vars(fault.patch.owner)[fault.patch.attribute] is not before
        assert vars(fault.patch.owner)[fault.patch.attribute] is before


def test_selection_by_name_and_family():
    assert select() == FAULTS
    assert [fault.name for fault in select(["rope_sign"])] == ["rope_sign"]
    assert {fault.family for fault in select(family="cema")} == {Family.CEMA}
    with pytest.raises(
        ValueError, match=r"no fault 'rope'; choose one of square_linear_transposed, "
    ):
        select(["rope"])
    with pytest.raises(ValueError, match=r"no family 'sea' of faults; choose one of conversion, "):
        select(family="sea")
    with pytest.raises(ValueError, match="none of rope_sign is of the family 'CEMA'"):
        select(["rope_sign"], "CEMA")


def table(monkeypatch, *detections, options=()):
    found = detection.DetectionTable(
        list(detections), {(MegalodonEdge.JAX64_ORACLE, Kind.BLOCK): 0.002}
    )
    monkeypatch.setattr(detection, "run", lambda faults, report, executor, each: found)
    return cli("parity", "faults", "--quiet", *options)


FOUND = Detection(IDENTITY, "length_c", "jax64:oracle", IDENTITY.stage, 1e9)
ELSEWHERE = replace(FOUND, fault=replace(IDENTITY, name="other"), found="logits")
MISSED = Detection(replace(IDENTITY, name="other"), "length_c")


def test_the_command_passes_when_everything_is_found(monkeypatch):
    result = table(monkeypatch, FOUND)
    assert result.exit_code == 0
    assert "1 faults: 1 detected, 1 localised" in result.output


@pytest.mark.parametrize(
    ("detection", "said"),
    [
        (MISSED, "other: not detected, expected layers.0.rmsnorm in length_c"),
        (ELSEWHERE, "other: reported at logits, expected layers.0.rmsnorm in length_c"),
    ],
    ids=["missed", "elsewhere"],
)
def test_the_command_fails_when_a_fault_is_missed(monkeypatch, detection, said):
    result = table(monkeypatch, FOUND, detection)
    assert result.exit_code == 1
    assert said in result.output


def test_the_command_prints_json(monkeypatch):
    rows = json.loads(table(monkeypatch, FOUND, MISSED, options=["--json"]).stdout)
    assert [row["detected"] for row in rows] == [True, False]
    assert rows[0]["signal"] == 1e9


def test_the_command_writes_the_document(monkeypatch):
    narrow = replace(FOUND, edge="jax32:oracle", signal=40.0)
    other = replace(MISSED, case="plain")
    detections = (FOUND, narrow, ELSEWHERE, other)
    result = table(monkeypatch, *detections, options=["--markdown"])
    text = result.stdout
    assert "| JAX float64 vs oracle | 2 | 2 | 1 |" in text
    assert "| JAX float32 vs oracle | 2 | 1 | 1 |" in text
    assert "| JAX float64 vs oracle | block | 0.002 | 1e+09 | `identity` |" in text
    found = "| `identity` | a patch that changes nothing | length_c | `layers.0.rmsnorm` | 1e+09 |"
    assert f"{found} 4e+01 |" in text
    assert "| `logits` | 1e+09 | – |" in text
    assert result.exit_code == 1, "the other fault is nowhere at its stage"


def test_every_edge_is_asked_when_each_is_wanted(monkeypatch):
    asked = []
    monkeypatch.setattr(
        Laboratory,
        "detect",
        lambda self, fault, case, edges: asked.append(edges) or Detection(fault, case.name),
    )
    faults = [by_name("rope_sign")]
    detection.run(faults)
    detection.run(faults, each=True)
    assert asked == [(), ("jax64:oracle",), ("jax32:oracle",)]


def test_workers_say_of_a_fault_what_this_process_says(monkeypatch):
    """A worker gets names and gives JSON: an infinite signal survives it."""
    said = Detection(by_name("rope_sign"), "length_c", "jax64:oracle", "load", math.inf, "refused")
    used = {(MegalodonEdge.JAX64_ORACLE, Kind.BLOCK): 0.25}
    monkeypatch.setattr(
        detection, "_inline", lambda batch, each: detection.DetectionTable([said], used)
    )
    value = json.loads(json.dumps(detection.run_batch(["rope_sign"], each=False)))
    assert detection._table(value) == detection.DetectionTable([said], used)


def test_an_unknown_fault_is_a_usage_error():
    result = cli("parity", "faults", "--fault", "nonsense")
    assert result.exit_code == 2
    assert "no fault 'nonsense'" in result.output


def test_healthy_cases_are_distinct_and_reproducible():
    cases = [healthy(index) for index in range(3 * VARIATIONS)]
    assert len({case.hash for case in cases}) == len(cases)
    assert healthy(5).hash == cases[5].hash
    assert len({case.config for case in cases}) == 3


@pytest.mark.parametrize("first", [0, pytest.param(16, marks=pytest.mark.sweep)])
def test_healthy_cases_raise_no_alarm(first):
    assert not list(alarms(range(first, first + 5)))


ROOT = Path(__file__).parents[3]
COUNTED = re.compile(r"(\d+)(?: porting)? bugs")


def test_the_table_in_the_documents_has_every_fault_and_the_texts_its_number():
    rows = (ROOT / "docs" / "tables" / "detection.md").read_text(encoding="utf-8").splitlines()
    named = [found[1] for row in rows if (found := re.match(r"\| `(\w+)` \| ", row))]
    assert sorted(named) == sorted(fault.name for fault in FAULTS)
    for name in ("parity.md", "verdicts.md"):
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        counts = {int(n) for n in COUNTED.findall(text) if int(n) > 100}
        assert counts == {len(FAULTS)}, name
