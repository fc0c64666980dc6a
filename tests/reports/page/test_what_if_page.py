"""What formats would cost, in the terminal and on the page; and which path the doctor names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from parity.megalodon.cases import BYTE_LM
from reports.bench.figures import variant_timings
from reports.cli.doctor import examine
from reports.page.render import render
from reports.page.sections.speed import rows as speed_rows
from reports.user_text import first_tokens
from reports.verdict.decide import decide
from reports.verdict.history import History
from stability.products import what_if
from stability.products.what_if import LADDER, Products, costs
from tests.helpers import cli
from tests.reports.nights import bench, measurement, run


def products(wild: bool = False) -> Products:
    x, weight, dy = np.random.default_rng(0).standard_normal((3, 64, 64)).astype(np.float32)
    return Products(np.exp(4 * x) if wild else x, weight, dy)


HELD = {
    "model.layers.0.attn.wz": products(),
    "model.layers.0.ffn.fc1": products(),
    "model.layers.1.attn.wz": products(wild=True),
    "model.layers.1.ffn.fc1": products(),
}


def call(monkeypatch, *arguments):
    monkeypatch.setattr(what_if, "captured", lambda model, ids: HELD)
    return cli("stability", BYTE_LM, "--what-if", *arguments)


def test_the_command_prints_the_worst_of_each_kind_and_the_rules(monkeypatch) -> None:
    result = call(monkeypatch, "--text", str(BYTE_LM / "heldout.txt"))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split()[-1] for line in lines[1:7]].count("bfloat16") == 1
    assert lines[1].split()[:2] == ["attn.wz", "forward"]
    assert lines[1].endswith("nvfp4 or bfloat16")
    assert "('model.layers.1.attn.wz', 'default')," in result.stdout
    assert "('model.*', 'nvfp4')," in result.stdout
    assert "256 tokens of heldout.txt" in result.stderr


def test_json_has_every_cost_and_the_rules(monkeypatch) -> None:
    words = json.loads(call(monkeypatch, "--json", "--quiet").stdout)
    assert words["gemm_backend"] == [["model.layers.1.attn.wz", "default"], ["model.*", "nvfp4"]]
    assert len(words["costs"]) == len(HELD) * 3 * len(what_if.FORMATS)
    assert all(np.isfinite(row["fraction"]) for row in words["costs"])


@pytest.mark.parametrize("content", [None, b"short"])
def test_a_text_that_cannot_be_read_ends_in_words(monkeypatch, tmp_path, content) -> None:
    text = tmp_path / "text"
    if content is not None:
        text.write_bytes(content)
    result = call(monkeypatch, "--text", str(text))
    assert result.exit_code == 2
    assert ("no text at" if content is None else "at least 256 bytes") in result.output


def page(**stability: object) -> str:
    night = run(measurement(), stability=stability)
    text = render(night, decide(night, None), History())
    return text[text.index('<section id="formats"') : text.index('<section id="audits"')]


def test_the_page_maps_layers_and_modules_and_marks_what_is_beyond() -> None:
    text = page(**{"what if": what_if.rows(list(costs(HELD, LADDER)))})
    assert text.count('<svg class="heat"') == 6
    assert "layer 1" in text
    assert "attn.wz" in text
    assert text.count("✕") >= 2
    assert "11 of 12 products tolerate NVFP4" in text
    assert "not examined" in page()


def test_the_doctor_says_how_products_are_taken(tmp_path: Path) -> None:
    lines = {line.topic: line for line in examine(tmp_path)}
    assert lines["low-precision products"].value == "emulated"


def test_a_bench_shows_a_backend_against_the_default() -> None:
    shared = {"dtype": "float32", "device": "cpu", "identity": "same"}
    rounds = (1.0, 2.0, 3.0), (4.0, 4.0, 5.0)
    result = variant_timings("train_step on mxfp8", "default_ratio", *rounds, shared)
    assert [(t.metric, t.value) for t in result] == [("jax_seconds", 4.0), ("default_ratio", 0.5)]
    assert result[1].rounds == (0.25, 0.5, 0.6)
    past = bench()
    row = next(
        row
        for row in speed_rows([type(past)(past.manifest, timings=result)])
        if row["work"].startswith("train step on mxfp8")
    )
    assert (row["ratio"], row["jax"], row["reference"]) == ("0.50", "4.00 s", "–")


def test_ids_are_drawn_without_a_text() -> None:
    ids = first_tokens(None, 17)
    assert ids.shape == (2, 128)
    assert ids.max() < 17
