"""The main job: green on the healthy model (red is in `test_demonstration`), and bad input."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megalodon_jax.quantization.products import BACKENDS
from parity.deepseek_v3 import comparison as mla_moe
from parity.engine.measure.contract import Gate
from parity.engine.measure.measurement import Verdict
from parity.megalodon.cases import BYTE_LM
from parity.megalodon.known_differences import KNOWN_DIFFERENCES, _judged
from parity.megalodon.recordings import RecordedReference
from parity.megalodon.reference.installed import why_unavailable
from parity.megalodon.reference.live import LiveReference
from parity.port import Report
from parity.recordings import RecordingError
from parity.tolerances import KNOWN_DIFFERENCE_BOUNDS, PRODUCTS
from reports.nightly import run as nightly_module
from reports.nightly.document import known_differences
from reports.nightly.run import Options, nightly
from reports.nightly.shards import Shard
from reports.registry.lookup import judge_stored
from reports.store.runs import read_run
from reports.store.schema import PAGE
from reports.subjects.megalodon import suites as megalodon_suites
from reports.subjects.mla_moe.suites import run_mla_moe
from reports.subjects.port.suites import run_port
from reports.suite_run import SuiteRun, mark_repeats
from reports.verdict.decide import Word
from stability import suite as stability_suite
from stability.moe.fixed_bugs import LIVE_BUG
from stability.suite import PROBES
from tests.helpers import cli, double
from tests.reports.nights import measurement, stored_below


def quiet(line):
    pass


def measured_suite(*rows):
    """A suite of the triangle that measured what it planned."""
    planned = [Gate.of(row) for row in rows]
    return SuiteRun("parity", 1, 1, contract=planned, measurements=list(rows))


@pytest.fixture
def no_probes(monkeypatch):
    """The probes have tests of their own; here they would only cost time."""

    def skipped(checkpoint, model, report):
        return SuiteRun("stability", planned=1, executed=1)

    monkeypatch.setattr(megalodon_suites, "run_stability", skipped)


def test_a_healthy_night_passes_is_stored_and_summarised(tmp_path, monkeypatch):
    # Every probe has a test of its own; that all of them are called is `PROBES`.
    some = {name: probe for name, probe in PROBES.items() if name in ("survival", "what if")}
    monkeypatch.setattr(stability_suite, "PROBES", some)
    summary = tmp_path / "summary.md"
    summary.write_text("before\n", encoding="utf-8")
    result = run(
        "--out", tmp_path / "runs", "--case", "length_c", "--reference", "recorded",
        "--checkpoint", BYTE_LM, "--summary-md", summary,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert summary.read_text(encoding="utf-8").startswith("before\n## PASS")
    [folder] = stored_below(tmp_path / "runs")
    page = (folder / PAGE).read_text(encoding="utf-8")
    assert "PASS" in page
    assert "recorded" in page
    stored = read_run(folder)
    assert judge_stored(folder).decision.word is Word.PASS
    assert stored.manifest.environment.reference.kind == "recorded"
    assert {m.case for m in stored.measurements} == {"length_c"}
    probes = {f.probe for f in stored.findings}
    assert {"survival", "dtypes", "values"} <= probes
    assert stored.manifest.stability.keys() == {"what if"}


def test_a_case_of_any_suite_can_be_asked_for_alone(monkeypatch, tmp_path):
    rows = {"mla-moe moe": [measurement(case="mla-moe moe", edge="port32:port64")], "mxfp8": []}
    asked = {}

    def measured(part):
        def run_part(reference, report, only):
            asked[part] = set(only)
            return SuiteRun(part[1:-1], planned=1, executed=1, measurements=rows["mla-moe moe"])

        return run_part

    parts = {part: measured(part) for part in nightly_module.measured()}
    monkeypatch.setattr(nightly_module, "measured", lambda: parts)
    options = Options(tmp_path, cases=("mla-moe moe", "mxfp8"), reference="recorded")
    with pytest.raises(ValueError, match=r"no case 'mla-moe none'; there are .*mla-moe grouped"):
        nightly_module.select_cases(replace(options, cases=("mla-moe none",)))
    assert nightly_module.select_cases(options) == []
    outcome = nightly(options, quiet)
    assert asked == {"(products)": {"mxfp8"}, "(mla-moe)": {"mla-moe moe"}}
    suites = {suite.name for suite in outcome.run.manifest.suites}
    assert suites == {"products", "mla-moe"}, "no probes"


def test_what_recordings_cannot_answer_is_no_part_of_a_recorded_night(monkeypatch, tmp_path):
    def kind(name):
        monkeypatch.setattr(
            "parity.megalodon.suite.choose_reference", lambda _: SimpleNamespace(kind=name)
        )

    night = Options(tmp_path)
    kind("live")
    live = nightly_module.plan_of(night)
    assert nightly_module.plan_of(replace(night, cases=("port/plain",))) == ("(port)",)
    kind("recorded")
    assert [part for part in live if part not in nightly_module.plan_of(night)] == ["(port)"]
    with pytest.raises(ValueError, match=r"port/plain needs megalodon-hf itself.*make reference"):
        nightly_module.plan_of(replace(night, cases=("length_c", "port/plain")))


@pytest.mark.sweep
@pytest.mark.torch_ref
def test_megalodon_as_anybodys_port_is_a_suite_of_a_live_night():
    if reason := why_unavailable():
        pytest.skip(reason)
    lines = []
    suite = run_port(LiveReference(), lines.append)
    assert suite.result().status == "ran", suite.reason
    assert {m.case for m in suite.measurements} == {"port/plain"}
    gates = [m for m in suite.measurements if m.verdict is not Verdict.INFO]
    assert suite.passed == len(gates) and str(suite.passed) in lines[0]
    assert any(m.quantity.startswith("grad/") for m in gates)
    assert any(m.deterministic for m in gates)


def test_a_night_that_misses_a_control_is_incomplete(tmp_path, monkeypatch, no_probes):
    def run_parity(*_, **options):
        return measured_suite(measurement())

    def missed(reference, report):
        return SuiteRun("controls", planned=2, executed=1, reason="tf32 not found")

    monkeypatch.setattr(nightly_module, "measured", dict)
    monkeypatch.setattr(megalodon_suites, "run_parity", run_parity)
    monkeypatch.setattr(megalodon_suites, "run_controls", missed)
    outcome = nightly(Options(tmp_path / "all", reference="recorded"), quiet)
    assert outcome.decision.word is Word.INCOMPLETE
    assert "suite controls is incomplete (failed): 1 of 2 checks" in outcome.decision.sentence
    # A few cases are asked for to answer a question about those cases.
    outcome = nightly(Options(tmp_path / "one", ("length_c",), "recorded"), quiet)
    assert outcome.decision.word is Word.PASS
    # Of two shards, the one whose part they are runs them.
    shards = [Options(tmp_path / "two", reference="recorded", shard=Shard(k, 2)) for k in (1, 2)]
    suites = [nightly(options, quiet).run.manifest.suites for options in shards]
    assert sum(suite.name == "controls" for shard in suites for suite in shard) == 1


def test_products_are_a_suite_that_breaks_down_in_words(monkeypatch):
    rows = [measurement(case=name, edge=PRODUCTS) for name in BACKENDS]
    monkeypatch.setattr(megalodon_suites, "measure_products", lambda device: iter(rows))
    suite = megalodon_suites.run_products(RecordedReference(), quiet)
    assert suite.measurements == rows
    assert suite.result().status == "ran"

    def broken(device):
        yield rows[0]
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(megalodon_suites, "measure_products", broken)
    suite = megalodon_suites.run_products(RecordedReference(), quiet)
    assert suite.result().status == "failed"
    assert suite.reason == "RuntimeError: no such instruction"


def test_the_second_architecture_is_a_suite_that_breaks_down_in_words(monkeypatch):
    dense, moe = map(mla_moe.by_name, ("dense", "moe"))
    rows = [measurement(case=dense.title, edge="port32:original32")]
    result = SimpleNamespace(measurements=rows, report=double(Report, measurements=()))
    first = {"logits": (1e-7, 2e-7)}
    nothing = SimpleNamespace(measurements=(), responses={}, first=first)
    monkeypatch.setattr(mla_moe, "CASES", (dense, moe))
    monkeypatch.setattr(mla_moe, "pooled", lambda case, live, device: nothing)
    monkeypatch.setattr(mla_moe, "compare", lambda case, answer, ours, device: result)
    suite = run_mla_moe(RecordedReference(), quiet)
    assert [row.deterministic for row in suite.measurements] == [True, True]
    assert suite.result().status == "ran"
    assert [f.metric for f in suite.findings] == [LIVE_BUG]
    assert suite.responses[dense.title, "rel_l2"] == first

    def lost(case, which):
        raise RecordingError(f"{case.name} has no recording")

    monkeypatch.setattr(mla_moe, "answer", lost)
    suite = run_mla_moe(RecordedReference(), quiet)
    assert suite.measurements == []
    assert suite.result().status == "failed"
    assert suite.reason == "RecordingError: dense has no recording"


def test_a_known_difference_that_cannot_be_measured_is_not_what_it_was():
    class Silent(RecordedReference):
        def known_differences(self):
            raise RecordingError("no recording known_differences.safetensors")

    suite = megalodon_suites.run_known_differences(Silent(), quiet)
    assert suite.measurements == []
    assert suite.result().status == "failed"
    assert "no recording" in suite.reason


def test_known_differences_are_measured_and_told_with_their_reason(monkeypatch):
    lines = []
    measured = [_judged(d, KNOWN_DIFFERENCE_BOUNDS[d.id][0], "cpu") for d in KNOWN_DIFFERENCES]
    monkeypatch.setattr(megalodon_suites, "measure_known_differences", lambda *_: iter(measured))
    suite = megalodon_suites.run_known_differences(RecordedReference(), lines.append)
    assert suite.result().status == "ran"
    assert "5 of 5" in lines[-1]
    words = {entry["id"]: entry for entry in known_differences(suite.measurements)}
    assert words["untied-head"]["value"] == 0.0
    assert all(entry["holds"] and entry["measured"] and entry["reason"] for entry in words.values())
    grown = [replace(row, verdict=Verdict.FAIL) for row in suite.measurements]
    assert not any(entry["holds"] for entry in known_differences(grown))
    # JSON has no such numbers.
    for value in (math.inf, -math.inf, math.nan):
        broken = [replace(row, value=value) for row in grown]
        assert not any("value" in entry for entry in known_differences(broken))


def test_a_case_that_breaks_down_is_incomplete(tmp_path, no_probes, monkeypatch):
    def broken(self, case, floors):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(megalodon_suites.Suite, "case", broken)
    outcome = nightly(Options(tmp_path, ("length_c",), "recorded"), quiet)
    assert outcome.decision.word is Word.INCOMPLETE
    assert int(outcome.decision.exit_code) == 3
    assert "out of luck" in outcome.page.read_text(encoding="utf-8")


def run(*arguments):
    return cli("nightly", *map(str, arguments))


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of the committed checkpoint, to be spoiled."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for path in BYTE_LM.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def spoil_tensors(folder, change):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing model.norm.weight"),
        (lambda t: t.update(extra=t["model.norm.weight"]), "unexpected extra"),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"][:5]}),
            "model.norm.weight has shape (5,), expected (128,)",
        ),
    ],
    ids=["missing", "extra", "mis-shaped"],
)
def test_a_spoiled_checkpoint_is_refused_by_name(tmp_path, checkpoint, change, message):
    spoil_tensors(checkpoint, change)
    result = run("--out", tmp_path / "runs", "--checkpoint", checkpoint)
    assert result.exit_code == 2
    assert message in result.output
    assert not list((tmp_path / "runs").glob("*"))


def test_a_corrupt_file_is_refused_by_name(tmp_path, checkpoint):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    result = run("--out", tmp_path / "runs", "--checkpoint", checkpoint)
    assert result.exit_code == 2
    assert "not a readable safetensors file" in result.output


def test_a_config_that_contradicts_the_weights_is_refused(tmp_path, checkpoint):
    path = checkpoint / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"num_layers": 3}),
        encoding="utf-8",
    )
    result = run("--out", tmp_path / "runs", "--checkpoint", checkpoint)
    assert result.exit_code == 2
    assert "unexpected model.layers.3." in result.output


def test_an_output_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    result = run("--out", tmp_path / "file" / "runs")
    assert result.exit_code == 2
    assert "can be written" in result.output


def test_an_unknown_case_is_refused(tmp_path):
    result = run("--out", tmp_path, "--case", "plian")
    assert result.exit_code == 2
    assert "no case 'plian'" in result.output


def test_an_interrupted_night_writes_nothing(tmp_path, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(megalodon_suites, "run_parity", interrupted)
    result = run("--out", tmp_path / "runs", "--case", "length_c", "--reference", "recorded")
    assert result.exit_code == 3
    assert "interrupted: no run was written" in result.output
    assert not list((tmp_path / "runs").iterdir())


def test_a_bug_of_ours_is_an_internal_error(tmp_path, monkeypatch):
    def bug(*args):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(megalodon_suites, "run_parity", bug)
    result = run("--out", tmp_path / "runs", "--case", "length_c", "--reference", "recorded")
    assert result.exit_code == 6


def test_a_replay_repeats_where_it_gives_the_same_bits():
    rows = [measurement(quantity=name) for name in ("same", "moved", "lost", "nan")]
    rows[3] = replace(rows[3], value=float("nan"))
    again = [rows[0], replace(rows[1], value=rows[1].value * (1 + 1e-15)), rows[3]]
    words = {m.quantity: m.deterministic for m in mark_repeats(rows, again)}
    assert words == {"same": True, "moved": False, "lost": False, "nan": True}


def test_a_suite_ran_if_it_did_all_it_planned_and_nothing_broke_down():
    whole = SuiteRun("parity", planned=2, executed=2)
    assert whole.result().status == "ran"
    for partial in (replace(whole, executed=1), replace(whole, reason="broken")):
        assert partial.result().status == "failed"


def test_a_night_says_what_was_planted_in_it(tmp_path, monkeypatch, no_probes):
    """Else it would be a baseline, or an anchor, of nights without the fault."""
    suite = measured_suite(measurement())
    monkeypatch.setattr(megalodon_suites, "run_parity", lambda *_: suite)
    fault = SimpleNamespace(name="conjugate", planted=nullcontext)
    monkeypatch.setattr(nightly_module, "fault_by_name", {"conjugate": fault}.get)
    for planted in (None, "conjugate"):
        options = Options(tmp_path, ("length_c",), "recorded", fault=planted)
        assert nightly(options, quiet).run.manifest.fault == planted
