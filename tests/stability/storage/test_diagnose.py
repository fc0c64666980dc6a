"""From a checkpoint to a ranked list of what is wrong, what helps, and by how much."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from megalodon_jax.convert import save_safetensors
from megalodon_jax.weights import named_leaves, replace_leaves
from stability.core.findings import Finding, Severity
from stability.storage.diagnose import kind_of, ranked, report
from stability.storage.remedies import NOTHING, REMEDIES, try_remedies
from stability.storage.update_rules import AdamW
from tests.helpers import ROOT, TINY, model_of, tiny
from tools.experiments import founding
from tools.experiments.chart import line_chart
from tools.experiments.founding import BEGIN, END, VARIANTS, Size, train

LR = 3e-4
NORM = "layers.0.norm.weight"
TREE = {
    NORM: np.ones(64, np.float32),
    "layers.0.fc.weight": np.random.default_rng(0).normal(0, 0.02, (16, 8)).astype(np.float32),
}
"""Leaves so short that every probe of this file runs the same few programs."""


@cache
def trials():
    found = try_remedies(TREE, AdamW(LR), steps=300)
    return {name: {t.remedy.name: t for t in rows} for name, rows in found.items()}


def test_every_remedy_is_tried_on_the_norm_and_those_for_norms_on_it_alone() -> None:
    names = {r.name for r in (NOTHING, *REMEDIES)}
    assert trials()[NORM].keys() == names
    assert names - trials()["layers.0.fc.weight"].keys() == {"zero-centred", "smaller init"}


def test_what_the_remedies_do_to_a_frozen_norm() -> None:
    norm = trials()[NORM]
    assert (norm["nothing"].survival.frozen, norm["nothing"].survival.fidelity) == (1.0, 0.0)
    assert {n for n, t in norm.items() if t.works} >= {
        *("float32 parameters", "float32 master", "Kahan, float32", "cast, then restore")
    }
    assert not norm["larger lr"].works
    assert norm["smaller init"].survival.fidelity > norm["nothing"].survival.fidelity
    assert norm["zero-centred"].survival.frozen == 0.0
    expected = {"nothing": 2, "float32 parameters": 4, "float32 master": 6, "Kahan, bfloat16": 4}
    assert {n: norm[n].bytes for n in expected} == expected


def test_findings_are_sorted_by_severity_then_elements_and_unused_rows_come_last() -> None:
    def found(subject: str, metric: str, value: float, severity: Severity) -> Finding:
        return Finding("survival", severity, subject, metric, value, 0.5, "", "")

    idle = found("table", "idle_row_fraction", 1.0, Severity.WARNING)
    few = found("norm", "frozen_fraction", 1.0, Severity.WARNING)
    many = found("matrix", "frozen_fraction", 0.6, Severity.WARNING)
    bad = found("norm", "values", math.nan, Severity.ERROR)
    sizes = {"table": 1000, "matrix": 100, "norm": 10}
    assert ranked([idle, few, many, bad], sizes) == [bad, many, few, idle]


def test_ranking_puts_what_works_first_and_the_cheapest_of_it_before_the_rest() -> None:
    rows = list(trials()[NORM].values())
    works = [t.works for t in rows]
    assert works == sorted(works, reverse=True)
    cheap = [t.bytes for t in rows if t.works]
    assert cheap == sorted(cheap)
    misses = [t.miss for t in rows if not t.works]
    assert misses == sorted(misses)


def test_the_report_names_the_frozen_norm_first_with_its_measured_fix() -> None:
    found = report(TREE, AdamW(LR))
    assert found.worst() is Severity.WARNING
    first = found.findings[0]
    assert (first.subject, first.metric, first.value) == (NORM, "frozen_fraction", 1.0)
    assert "100% of its 64 elements never move at lr 0.0003 (predicted 100%)" in first.message
    assert "fidelity" in first.remedy
    assert "bytes per parameter" in first.remedy
    text = found.text()
    assert text.startswith(f"WARNING {NORM}: if it were stored in bfloat16")
    assert "    fix: " in text
    assert "d a fixed random sign" in text
    assert found.predictions[NORM].keys() == {
        *("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    }


def test_a_healthy_tree_is_called_healthy() -> None:
    found = report({"w": np.full(64, 1e-3, np.float32)}, AdamW(LR))
    assert found.worst() in (Severity.OK, Severity.NOTE)
    assert found.text().startswith("Nothing found")


@pytest.mark.sweep
def test_a_checkpoint_of_a_megalodon_is_checked_by_its_config(tmp_path: Path) -> None:
    config = tiny(vocab_size=16)  # of its leaves none is longer than those above
    save_safetensors(model_of(config), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    found = report(tmp_path, "lion", remedies=(NOTHING,))
    assert {f.probe for f in found.findings} >= {"survival", "poles"}
    assert any("Lion" in line for line in found.basis)
    (tmp_path / "config.json").write_text(
        json.dumps(config.to_dict() | {"num_layers": 3}), encoding="utf-8"
    )
    with pytest.raises(ValueError, match=r"not the weights of a Megalodon.*missing"):
        report(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="not readable JSON"):
        report(tmp_path)


def test_leaves_that_cannot_be_probed_are_named_and_the_rest_is_probed() -> None:
    bad = np.array([np.nan, 1.0], np.float32)
    found = report(TREE | {"bad": bad, "steps": np.arange(3)}, remedies=())
    (bad,) = [f for f in found.findings if f.subject == "bad"]
    (steps,) = [f for f in found.findings if f.subject == "steps"]
    assert (bad.severity, bad.value) == (Severity.ERROR, 1.0)
    assert "1 of 2 values are NaN or infinite" in bad.message
    assert found.findings[0] is bad, "errors come first"
    assert steps.severity is Severity.NOTE
    assert "int64: not a floating-point parameter" in steps.message


def test_bad_input_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"one tensor of integers, steps \(int64\)"):
        report({"steps": np.arange(3)})
    with pytest.raises(ValueError, match="no parameters"):
        report({})
    with pytest.raises(ValueError, match="unknown optimiser 'adagrad'"):
        report(TREE, "adagrad")
    with pytest.raises(ValueError, match="not the weights of a Megalodon"):
        report(torch.nn.Linear(2, 2).state_dict(), config=TINY)
    with pytest.raises(ValueError, match="expected a loss"):
        report(TREE, batches=np.zeros((1, 1)))


def test_an_optimiser_state_is_audited_too() -> None:
    state = optax.adamw(LR).init({"w": jnp.ones(2, jnp.bfloat16)})
    found = [f for f in report(TREE, state=state, remedies=()).findings if f.probe == "optimiser"]
    assert any(f.severity is Severity.WARNING for f in found)


def test_kinds_gather_layers() -> None:
    assert kind_of("model.layers.11.ffn.norm.weight") == "model.layers.*.ffn.norm.weight"
    assert kind_of("model.embed.weight") == "model.embed.weight"


SMALL = Size(width=32, layers=1, batch=32, steps=60, every=20)


@cache
def variant(name: str):
    (chosen,) = [v for v in VARIANTS if v.name == name]
    return train(chosen, SMALL)


def test_the_founding_case_freezes_and_its_remedies_thaw_it() -> None:
    bug, amp = variant("to(bfloat16)"), variant("float32 parameters, bfloat16 compute (AMP)")
    assert (bug.norms.frozen, bug.norms.fidelity, bug.drift) == (1.0, 0.0, 0.0)
    assert amp.norms.frozen == 0.0
    assert amp.drift > 0.0
    random = variant("stochastic rounding")
    # Each of n weights walks with the variance of its coins, at most displacement times gap.
    n = SMALL.width * (SMALL.layers + 1)
    spread = np.sqrt(amp.drift * 2.0**-7 / n) / amp.drift
    assert abs(random.norms.fidelity - 1.0) < 5 * spread
    assert (bug.bytes, round(amp.bytes), round(random.bytes)) == (
        *(pytest.approx(6, abs=0.1), 12, 10),
    )
    assert bug.curve[-1] == (SMALL.steps, 0.0)


def test_the_document_is_rewritten_between_its_markers(tmp_path: Path) -> None:
    results = [variant("to(bfloat16)")]
    doc = tmp_path / "doc.md"
    doc.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    founding.write(doc, results)
    text = doc.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{BEGIN}\n| storage |")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert (tmp_path / "founding-case.svg").read_text(encoding="utf-8").startswith("<svg")
    doc.write_text("no markers", encoding="utf-8")
    with pytest.raises(ValueError, match="needs the markers"):
        founding.write(doc, results)


def test_the_committed_document_names_every_variant() -> None:
    text = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    table = text.split(BEGIN)[1].split(END)[0]
    assert all(f"| {v.name} | {v.option} |" in table for v in VARIANTS)


def test_a_chart_needs_points_and_escapes_names() -> None:
    assert "&lt;b&gt;" in line_chart("t", "x", {"<b>": [(0.0, 0.0), (1.0, 2.0)]})
    with pytest.raises(ValueError, match="no points"):
        line_chart("t", "x", {})


def test_a_spoiled_model_is_not_trained_but_named() -> None:
    from stability.storage.survival import probe

    model = model_of(TINY)
    name = "model.layers.0.ffn.fc1.weight"
    spoiled = replace_leaves(model, {name: named_leaves(model)[name].at[0, 0].set(jnp.nan)})
    (found,) = probe(spoiled, np.ones((1, 1, 4), np.int32), AdamW(LR))
    assert (found.subject, found.severity) == (name, Severity.ERROR)
    assert "not measured: 1 of" in found.message
