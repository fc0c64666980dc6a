"""MLA + MoE against Transformers: what was recorded, what runs live, and a port that is wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import equinox as eqx
import numpy as np
import pytest

from parity import recordings
from parity.deepseek_v3 import cases, comparison, contract, reference
from parity.deepseek_v3.recordings import FOLDER, OF_LOSS
from parity.engine.measure.compare import Work
from parity.engine.measure.contract import breaches, contract_of
from parity.engine.measure.measurement import Kind
from parity.engine.measure.metrics import POOLED, relative_l2
from parity.engine.measure.quantity import kind_of
from parity.megalodon.edges import MegalodonEdge
from parity.sides.side import Precision, Run, SideError
from parity.tolerances import MLA_MOE_LOGITS, NoiseFloors, rule
from stability.moe.fixed_bugs import reference_scatter

FULL = comparison.by_name("grouped")
"""The case with everything in it: the one whose gradients are compared here."""


def swept(names):
    """Names as parameters: that of everything, and of what it leaves out; others are a sweep."""
    quick = (FULL.name, "tied")
    return [n if n in quick else pytest.param(n, marks=pytest.mark.sweep) for n in names]


@cache
def live(name: str) -> comparison.Answer:
    return comparison.live(comparison.by_name(name))


def run(weights):
    """What Transformers computes of the case with other weights, by our names."""
    side = reference.side(FULL.config.to_hf(), weights, FULL.ids)
    found = side.run()
    return {name: found.stages[theirs] for name, theirs in reference.stages(side).items()}


def holds(found: comparison.Found) -> None:
    assert found.broken == ()
    for edge in ("port32:original32", "port64:original64"):
        assert found.worst("logits", edge) <= MLA_MOE_LOGITS


@pytest.mark.parametrize("name", swept(c.name for c in comparison.CASES if c is not FULL))
def test_logits_and_blocks_are_those_of_transformers(name):
    case = comparison.by_name(name)
    found = comparison.compare(case, comparison.recorded(case), gradients=False)
    holds(found)
    quantities = {m.quantity for m in found.measurements}
    assert {"logits", "output", "layers.1.block", "layers.1.kv_latent"} <= quantities
    assert ("layers.1.chosen" in quantities) == case.config.is_moe(1)


@pytest.mark.sweep
def test_gradients_too_live_and_in_float64():
    found = comparison.compare(FULL, live(FULL.name))
    holds(found)
    planned = contract.gates(FULL, live(FULL.name), comparison.side(FULL))
    differs = breaches(contract_of(g for g in planned if g.metric != POOLED), found.measurements)
    assert not differs, differs.sentence()
    wide = [m for m in found.measurements if m.edge == "port64:original64" and m.metric == "rel_l2"]
    kinds = {m.kind for m in wide}
    assert {Kind.GRADIENT, Kind.BLOCK, Kind.LOGITS} <= kinds
    assert (
        max(m.value for m in wide if m.kind is Kind.GRADIENT)
        <= rule("port64:original64", Kind.GRADIENT).absolute
    )
    assert "grad/model.layers.1.mlp.experts.up_proj.weight" in {m.quantity for m in wide}
    # No table of either side is float32 in float64, which would be allowed for.
    for m in wide:
        assert m.tolerance == rule("port64:original64", m.kind).absolute


def test_a_wrong_port_is_found():
    """A router that is off by a thousandth is named, and what comes before it is not."""
    model = FULL.model()
    at = lambda m: m.model.layers[1].mlp.gate  # noqa: E731
    biased = eqx.tree_at(at, model, replace(at(model), weight=at(model).weight * np.float32(1.001)))
    found = comparison.compare(FULL, comparison.recorded(FULL), comparison.side(FULL, biased))
    assert "layers.1.router_logits" in {m.quantity for m in found.broken}
    assert "layers.1.attn" not in {m.quantity for m in found.broken}


def test_float64_that_is_recorded_is_a_gate():
    """A recording has no float64 run, only logits and loss of one: they are held to, and fail."""
    said = comparison.recorded(FULL)
    off = said.float64["logits"] * (1 + 1e-9)
    spoiled = replace(said, float64=said.float64 | {"logits": off})
    ours = comparison.side(FULL)
    for answer, wrong in ((said, set()), (spoiled, {("port64:original64", "logits")})):
        found = comparison.compare(FULL, answer, ours, gradients=False)
        assert {(m.edge, m.quantity) for m in found.broken} == wrong
        wide = {m.quantity for m in found.gates if m.edge == "port64:original64"}
        assert wide == {"logits", "output"}


def test_rows_are_of_the_same_work_live_and_recorded():
    """Histories follow a gate by its identity, whatever the reference answers from."""
    ours = comparison.side(FULL)
    answers = (comparison.recorded(FULL), live(FULL.name))
    recorded, alive = (
        {
            (m.edge, m.quantity, m.metric): m.identity
            for m in comparison.compare(FULL, said, ours, gradients=False).gates
        }
        for said in answers
    )
    shared = recorded.keys() & alive.keys()
    assert {"port32:port64", "port32:original32"} <= {edge for edge, *_ in shared}
    assert all(recorded[key] == alive[key] for key in shared)
    other = replace(FULL, draw=1)
    moved = comparison._work(other, comparison.side(other), ("output",), gradients=False)
    assert moved.hash != comparison._work(FULL, ours, ("output",), gradients=False).hash


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (Run(Precision.FLOAT64), "a float32 run"),
        (Run(forced={"logits": np.zeros(1)}), "a float32 run"),
        (Run(cotangents={"logits": np.ones(1)}), "derivatives of the loss"),
    ],
    ids=["float64", "forced", "cotangents"],
)
def test_a_recording_answers_nothing_but_what_was_recorded(how, why):
    side = comparison.recorded(FULL).side
    assert side.run(Run(cotangents=OF_LOSS)).gradients.keys() <= FULL.weights.keys()
    with pytest.raises(SideError, match=why):
        side.run(how)


@cache
def noise(name: str) -> NoiseFloors:
    """The floors of a case, from its first draw."""
    case = comparison.by_name(name)
    pool = comparison.pooled(case, live=False)
    return NoiseFloors({name: {"hash": case.hash, "responses": pool.first}})


@pytest.mark.few(1)
@pytest.mark.parametrize("name", swept(c.name for c in comparison.CASES))
def test_recordings_are_what_the_live_reference_says(name):
    """Another processor, or another torch, adds in another order: that is all that may differ."""
    case, said = comparison.by_name(name), live(name)
    kept, work = comparison.recorded(case), Work(name, case.hash, ())
    assert kept.float32.keys() == said.float32.keys()
    shares = {
        n: relative_l2(kept.float32[n], a)
        / noise(name).bound(MegalodonEdge.RECORDED32_LIVE32, kind_of(n), work, n)
        for n, a in said.float32.items()
    }
    assert max(shares.values()) <= 1.0, max(shares, key=shares.__getitem__)
    assert kept.refusal == said.refusal


def test_a_recording_of_other_numbers_is_noticed():
    """The negative control: one weight moved by 1e-5 is no rounding."""
    said, moved = live(FULL.name), dict(FULL.weights)
    moved["model.embed_tokens.weight"] = moved["model.embed_tokens.weight"] * np.float32(1 + 1e-5)
    other = run(moved)
    bound = noise(FULL.name).bound(
        MegalodonEdge.RECORDED32_LIVE32, Kind.BLOCK, Work(FULL.name, FULL.hash, ()), "embed"
    )
    assert relative_l2(other["embed"], said.float32["embed"]) > bound


def test_the_refusal_of_float64_is_named_as_the_fourth_bug():
    found = reference_scatter(live(FULL.name).refusal, "4.57")
    assert "index_add_" in found.message and "fourth bug" in found.message
    assert live("dense").refusal == "" and reference_scatter("", "4.57").value == 0.0


def test_an_expert_that_flips_without_a_margin_counts_and_a_tie_does_not():
    ours, theirs = np.array([[0, 1], [2, 3]]), np.array([[1, 0], [2, 4]])
    logits = np.ones((2, 5), np.float32)
    clear, tie = np.array([1.0, 1.0]), np.array([1.0, 1e-9])
    assert comparison.expert_flips(ours, theirs, clear, logits, 1e-6) == 1
    assert comparison.expert_flips(ours, theirs, tie, logits, 1e-6) == 0


def test_recordings_of_other_work_or_another_version_are_refused(tmp_path):
    made = {"versions": {"transformers": "4.57.6", "torch": "2"}, "refusal": ""}
    recordings.write("dense", "other", {}, made, tmp_path)
    case = comparison.by_name("dense")
    with pytest.raises(recordings.RecordingError, match="recorded from other work"):
        comparison.recorded(case, tmp_path)
    made["versions"]["transformers"] = "5.0.0"
    recordings.write("dense", case.hash, {}, made, tmp_path)
    with pytest.raises(recordings.RecordingError, match=r"transformers 5\.0\.0, expected 4\.57"):
        comparison.recorded(case, tmp_path)


def test_another_transformers_cannot_answer_live(monkeypatch):
    monkeypatch.setattr(reference.metadata, "version", lambda name: "5.1.0")
    assert "5.1.0 is installed" in (reference.why_unavailable() or "")


def test_recordings_stay_small():
    assert sum(p.stat().st_size for p in FOLDER.glob("*")) < 400 * 1024


def test_the_one_meant_difference_is_there_and_only_where_a_score_and_its_bias_are_negative():
    """A closed group's experts count as 0 in Transformers, which is above a negative score."""
    bias, name = f"model.layers.1.mlp.gate.{cases.BUFFER}", "layers.1.router_logits"
    for lowered, differs in ((0.0, False), (-3.0, True)):
        weights = {n: w + np.float32(lowered * (n == bias)) for n, w in FULL.weights.items()}
        said = run(weights)
        ours, _ = comparison.chosen(said[name], weights[bias], FULL.config)
        theirs = np.sort(said["layers.1.chosen"], -1)
        assert (np.sort(ours, -1) != theirs).any() == differs
