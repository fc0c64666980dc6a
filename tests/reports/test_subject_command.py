"""`stability --subject` and `subject`, as a user meets them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from reports.cli import main
from stability.subjects.mla_moe import examine
from stability.subjects.mla_moe.parity import TINY


def run(*args: str):
    return CliRunner().invoke(main, ["stability", *args])


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A model of one sparse layer in the place of the small size."""
    config = replace(TINY, vocab_size=256, num_hidden_layers=1, min_moe_layer=0)
    known = examine.by_size
    monkeypatch.setattr(examine, "by_size", lambda n: config if n == "small" else known(n))


def test_the_one_line_of_the_guide_runs_everything():
    said = run("--subject", "mla-moe", "--size", "small", "--batch-size", "2", "--json", "--quiet")
    assert said.exit_code == 0, said.output
    document = json.loads(said.stdout)
    probes = {f["probe"] for f in document["findings"]}
    assert probes == {"forward", "generation", "router", "latent attention", "fixed bugs"}
    assert not [f for f in document["findings"] if f["severity"] == "error"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--size", "huge"), "unknown size 'huge'"),
        (("--batch-size", "0"), "batch size 0"),
        (("--block-size", "3"), "block size 3"),
        (("nowhere",), "config.json not found"),
        (("parity/data/byte_lm",), "checkpoint of None"),
    ],
)
def test_bad_input_is_told_in_words_with_exit_code_2(args, words):
    said = run("--subject", "mla-moe", *args)
    assert said.exit_code == 2
    assert words in said.output
    assert "Traceback" not in said.output


def test_without_a_path_or_a_subject_it_asks_for_one():
    said = run()
    assert said.exit_code == 2
    assert "name a checkpoint PATH, or an architecture with --subject" in said.output


def test_a_size_beyond_the_memory_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(examine, "COPIES", 1e12)
    said = run("--subject", "mla-moe")
    assert said.exit_code == 2
    assert "needs about" in said.output and "this machine has" in said.output
