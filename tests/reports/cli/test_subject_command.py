"""`stability --subject` and `subject`, as a user meets them."""

from __future__ import annotations

import json
from dataclasses import replace

import jax.numpy as jnp
import pytest

from stability.moe import examine
from tests.helpers import cli
from tools.experiments.moe_defects import healthy


def run(*args: str):
    return cli("stability", *args)


def findings(intermediates: dict) -> list:
    return examine.forward_findings(
        replace(healthy(), intermediates={**healthy().intermediates, **intermediates})
    )


@pytest.mark.parametrize(("value", "code"), [(0.0, 0), (float("nan"), 1)])
def test_what_is_not_finite_is_an_error_and_exit_code_1(monkeypatch, value, code):
    asked = []

    def examined(*args):
        asked.extend(args)
        return examine.Examination("mla-moe small", findings({"embed": jnp.full(2, value)}), 0.0)

    monkeypatch.setattr(examine, "examine", examined)
    line = "--subject mla-moe --size small --batch-size 2 --block-size 128 --fp8-params false"
    text = run(*line.split(), "--quiet")
    assert text.exit_code == code, text.output
    assert ("ERROR embed" in text.output) == bool(code)
    assert asked[:5] == ["small", 2, 128, False, None]
    document = json.loads(run(*line.split(), "--json", "--quiet").stdout)
    assert [f["severity"] for f in document["findings"]] == ["error" if code else "ok", "ok"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--size", "huge"), "unknown size 'huge'"),
        (("--batch-size", "0"), "batch size 0"),
        (("--block-size", "3"), "block size 3"),
        (("parity/data/byte_lm", "--size", "xl"), "checkpoint of None"),
        (("nowhere",), "config.json not found"),
    ],
)
def test_bad_input_is_told_in_words_with_exit_code_2(args, words):
    text = run("--subject", "mla-moe", *args)
    assert text.exit_code == 2
    assert words in text.output
    assert "Traceback" not in text.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("somewhere", "--fp8-params", "true"), "--fp8-params goes with --subject only"),
        (("--subject", "mla-moe", "--what-if"), "--what-if does not go with --subject"),
        (("--subject", "mla-moe", "--lr", "1", "--text", "x"), "--lr, --text does not go with"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(args, words):
    text = run(*args)
    assert text.exit_code == 2
    assert words in text.output


def test_without_a_path_or_a_subject_it_asks_for_one():
    text = run()
    assert text.exit_code == 2
    assert "give a checkpoint PATH, or an architecture with --subject" in text.output


def test_a_size_beyond_the_memory_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(examine, "COPIES", 1e12)
    text = run("--subject", "mla-moe")
    assert text.exit_code == 2
    assert "needs about" in text.output and "this machine has" in text.output
