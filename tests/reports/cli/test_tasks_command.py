"""The command `tasks`: two models on a text, or one with itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import cli

TABLES = """
import numpy as np
from parity import LanguageModel

TABLE = np.random.default_rng(0).normal(size=(11, 11))
OTHER = TABLE + SHIFT * np.random.default_rng(1).normal(size=(11, 11))


def model(name, table):
    return LanguageModel(name, lambda ids: table[ids])


def ids():
    return np.random.default_rng(2).integers(0, 11, 400)
"""
TWO = "def models():\n    return model('ours', TABLE), model('theirs', OTHER)\n"
ONE = "def models():\n    return model('ours', TABLE)\n"
BATCH = """
def together(ids):
    # A scale that all rows of a batch share.
    return TABLE[ids] * (1 + SHIFT * (len(ids) > 1))


def models():
    return LanguageModel("ours", together)
"""
STEPS = "def stepwise(ids):\n    return np.stack([TABLE[i] for i in ids.T], 1) * (1 + SHIFT)\n"


@pytest.fixture
def file(tmp_path: Path):
    def written(*parts: str, shift: float = 0.0) -> str:
        path = tmp_path / "models.py"
        text = TABLES.replace("SHIFT", repr(shift)) + "\n\n".join(parts)
        path.write_text(text.replace("SHIFT", repr(shift)), encoding="utf-8")
        return str(path)

    return written


SMALL = ("--window", "20", "--rows", "4", "--new-tokens", "3")


@pytest.mark.parametrize(("shift", "code", "word"), [(1e-9, 0, "yes"), (0.5, 1, "no")])
def test_two_models_are_compared_by_perplexity_and_continuations(file, shift, code, word):
    done = cli("tasks", file(TWO, shift=shift), "--margin", "1e-3", "--prompts", "5", *SMALL)
    assert done.exit_code == code, done.output
    lines = done.output.splitlines()
    assert lines[0].startswith("perplexity of 380 tokens in 20 windows: ours ")
    assert any("of 5 prompts are continued alike for 3 tokens" in line for line in lines)
    assert lines[-1] == f"within 0.001 nats: {word}"


def test_prompts_may_be_left_out_and_never_outnumber_the_places_of_the_text(file):
    path = file(TWO, shift=1e-9)
    none = cli("tasks", path, "--margin", "1", "--prompts", "0", *SMALL)
    assert "continued" not in none.output
    # A prompt of 5 tokens has 396 places to begin.
    many = cli("tasks", path, "--margin", "1", "--prompts", "1000", *SMALL)
    assert "of 396 prompts" in many.output


def test_a_prompt_of_a_short_window_has_a_token(file):
    done = cli("tasks", file(TWO, shift=1e-9), "--margin", "1", "--window", "3", "--prompts", "2")
    assert done.exit_code == 0, done.output
    assert "of 2 prompts" in done.output


def test_without_a_margin_nothing_was_tested(file):
    done = cli("tasks", file(TWO, shift=1e-9), *SMALL)
    assert done.exit_code == 5
    assert done.output.splitlines()[-1] == "no --margin: nothing was tested"


@pytest.mark.parametrize(
    ("parts", "shift", "code"),
    [((ONE, STEPS), 0.0, 0), ((ONE, STEPS), 0.1, 1), ((BATCH,), 0.0, 0), ((BATCH,), 0.1, 1)],
    ids=["healthy steps", "other steps", "healthy batch", "other batch"],
)
def test_one_model_is_compared_with_itself(file, parts, shift, code):
    done = cli("tasks", file(*parts, shift=shift), "--margin", "1e-6", *SMALL)
    assert done.exit_code == code, done.output
    assert "ours, a row alone and in a batch of 4: " in done.output
    assert ("ours, whole and token by token: " in done.output) == (STEPS in parts)


@pytest.mark.parametrize("margin", ["0", "-1", "inf", "nan"])
def test_a_margin_that_accepts_or_refuses_everything_is_refused(file, margin):
    done = cli("tasks", file(ONE), "--margin", margin, *SMALL)
    assert done.exit_code == 2
    assert "expected a finite number above 0" in done.output


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((), "expected a function `models()`"),
        (("def models():\n    return ()\n",), "models.py, got 0"),
        (("def models():\n    return [model('a', TABLE)] * 3\n",), "got 3"),
        (("def models():\n    return None\n",), "expected LanguageModel"),
        ((ONE, "def ids():\n    return np.arange(50) % 11\n"), "expected at least 80 token ids"),
        ((ONE, "def ids():\n    return 7\n"), "expected token ids (N,) of integers from `ids()`"),
        ((ONE, "def ids():\n    return [0.5] * 100\n"), "got float64 of shape (100,)"),
        ((ONE, "def ids():\n    return [2**40] * 100\n"), "expected token ids that fit int32"),
        ((ONE, "def ids():\n    return [[1], [1, 2]]\n"), "ValueError"),
        (("def models():\n    raise KeyError('weights')\n",), "KeyError: 'weights'"),
    ],
)
def test_a_file_that_cannot_be_compared_is_refused_with_what_to_do(file, parts, message):
    done = cli("tasks", file(*parts), "--margin", "1", *SMALL)
    assert done.exit_code == 2, done.output
    assert message in done.output


def test_an_error_in_a_model_shows_the_user_s_line(file):
    broken = "def models():\n    return LanguageModel('ours', lambda ids: TABLE[ids + 100])\n"
    done = cli("tasks", file(broken), "--margin", "1", *SMALL)
    assert done.exit_code == 2
    assert "TABLE[ids + 100]" in done.output and "IndexError" in done.output
