"""The engine without Megalodon: a port that holds, and ports with a bug."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from parity.port import OUTPUT, check, watched
from tests.helpers import ROOT
from tests.megalodon_jax.test_guide_snippets import blocks

DOCUMENT = ROOT / "docs" / "your-own-port.md"
RNG = np.random.default_rng(0)
MODEL = {"up": RNG.normal(size=(24, 16)), "down": RNG.normal(size=(8, 24))}
MODEL = {name: w.astype(np.float32) for name, w in MODEL.items()}
X = RNG.normal(size=(5, 16)).astype(np.float32)


def port(model, x):
    x = checkpoint_name(x @ model["up"].T, "up")
    x = checkpoint_name(jnp.tanh(x), "act")
    return x @ model["down"].T


def original(act=np.tanh, scale=1.0):
    """What another library computes in float32."""
    up = X @ MODEL["up"].T
    middle = act(up)
    return {"up": up, "act": middle, OUTPUT: np.float32(scale) * (middle @ MODEL["down"].T)}


def test_a_right_port_holds():
    report = check(port, MODEL, (X,), original())
    assert report.holds
    assert report.culprit is None
    assert [stage.name for stage in report.stages] == ["up", "act", OUTPUT]


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (original(act=lambda x: np.float32(1.0001) * np.tanh(x)), "act"),
        (original(scale=1.0001), OUTPUT),
    ],
    ids=["act", "output"],
)
def test_a_wrong_port_is_named_where_it_starts(wrong, where):
    report = check(port, MODEL, (X,), wrong)
    assert not report.holds
    assert report.culprit is not None
    assert report.culprit.name == where


@pytest.mark.parametrize(
    "spoil",
    [
        lambda a: {n: x for n, x in a.items() if n != "act"},
        lambda a: a | {"more": X},
        lambda a: a | {"act": np.full_like(a["act"], np.nan)},
        lambda a: a | {"act": a["act"].astype(np.float64)},
        lambda a: a | {"act": a["act"][:1]},
    ],
    ids=["missing", "extra", "nan", "dtype", "shape"],
)
def test_what_cannot_be_compared_does_not_hold(spoil):
    assert not check(port, MODEL, (X,), spoil(original())).holds


@pytest.mark.parametrize(
    ("names", "suite"), [({"name": "mlp"}, "mlp"), ({"name": "mlp wide", "suite": "mlp"}, "mlp")]
)
def test_a_port_is_filed_under_its_own_name(names, suite):
    rows = check(port, MODEL, (X,), original(), **names, forced=False).measurements
    assert {(m.case, m.suite) for m in rows} == {(names["name"], suite)}


def test_parameters_must_be_float32():
    with pytest.raises(ValueError, match=r"expected float32 parameters, got .*'up'.* bfloat16"):
        check(port, MODEL | {"up": jnp.zeros((24, 16), jnp.bfloat16)}, (X,), original())


def test_a_path_that_leads_nowhere_is_named():
    import torch

    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with (
        pytest.raises(ValueError, match="no submodule '1'; there are '', '0'"),
        watched(module, {"up": "1"}),
    ):
        pass


def test_the_document_runs_and_says_what_it_prints(capsys):
    text, namespace = DOCUMENT.read_text(encoding="utf-8"), {}
    with jax.numpy_dtype_promotion("standard"):
        for line, block in blocks(text):
            exec(compile("\n" * line + block, str(DOCUMENT), "exec"), namespace)
    printed = [line for line in capsys.readouterr().out.splitlines() if line]
    shown = re.findall(r"```\n\n```text\n(.*?)```", text, re.DOTALL)
    expected = [line for line in "".join(shown).splitlines() if line]
    # Rounding differs from machine to machine; what is said does not.
    assert [words_of(line) for line in printed] == [words_of(line) for line in expected]
    assert printed[-1] == expected[-1] == "it starts at gelu"


def words_of(line: str) -> tuple[str, bool]:
    """What a line says: its first word, wherever the file lies, and whether it starts there."""
    word = re.sub(r"\S+\.(py|md):\d+", "FILE:LINE", line.split()[0])
    return "[...]" if word.startswith("[") else word, "<- here" in line
