"""Of a stream that fails, the call, the stage and the line are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from megalodon_jax.layers import attention
from megalodon_jax.layers.complex_ema import ComplexEMA
from parity.engine.measure.localize import Stage
from parity.engine.programs.explanation import Explanation
from parity.engine.programs.source_lines import Line
from parity.faults import by_name as fault_by_name
from parity.megalodon import stream_lines
from parity.megalodon.account import Account
from parity.megalodon.cases import SMALL, Case, by_name
from parity.megalodon.explanation import explain
from parity.megalodon.stream_lines import Start, start
from tests.parity.megalodon.test_lines import edited
from tests.reports.nights import failing

C = SMALL["chunk_size"]
SHORT = replace(by_name("stream"), overrides={"num_layers": 1}, length=C + 8, cuts=(7, C - 2, 1, 2))
"""One layer; calls of several tokens, across the end of a chunk, of one token, and two more."""
SLIDING, UNBOUNDED = (
    replace(case, overrides={**case.overrides, "num_layers": 1})
    for case in map(by_name, ("stream_sliding", "stream_unbounded"))
)


def test_a_healthy_stream_has_no_start() -> None:
    assert start(SHORT) is None


FOUND = [
    ("cache_step_without_omega", SHORT, 2, "layers.0.cema", "complex_ema.py"),
    # The state is wrong when the call before returns it: the line is in that call.
    ("cache_ema_conjugated", SHORT, 1, "layers.0.cema", "caches.py"),
    ("cache_values_not_written", SHORT, 1, "layers.0.inner", "attention.py"),
    ("cache_final_norm_not_kept", SHORT, 1, "norm", "timestep_norm.py"),
    ("cache_window_one_short", SLIDING, 1, "layers.0.inner", "attention.py"),
    ("cache_bounded_anyway", UNBOUNDED, 0, "layers.0.inner", "attention.py"),
]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("fault", "case", "call", "stage", "file"),
    [FOUND[0], *(pytest.param(*row, marks=pytest.mark.sweep) for row in FOUND[1:])],
    ids=[row[0] for row in FOUND],
)
def test_call_stage_and_file_of_a_planted_bug(
    fault: str, case: Case, call: int, stage: str, file: str
) -> None:
    with fault_by_name(fault).planted():
        found = start(case)
    assert found is not None
    assert (found.call, found.stage) == (call, stage)
    end = int(np.cumsum(case.cuts)[call])
    assert found.tokens == (end - case.cuts[call], end)
    assert any(f"/{file}:" in line.place for line in found.lines)


@pytest.mark.sweep
def test_the_line_of_a_wrong_mask_is_not_cleared_by_calls_in_which_it_masks_nothing(
    tmp_path: Path,
) -> None:
    right = "(keys > queries[-1:] - window)"
    bug = right.replace(">", ">=")
    with edited(tmp_path, bug, right, "_visible", attention.ChunkedAttention) as (file, at):
        found = start(SLIDING)
    assert found is not None and (found.call, found.stage) == (1, "layers.0.inner")
    [line] = [line for line in found.lines if f"{file.name}:{at} (" in line.place]
    assert line.why == "makes a mask that the oracle does not have"


@pytest.mark.sweep
def test_of_a_filter_the_use_of_its_state_is_named_and_no_healthy_line_of_an_fft(
    tmp_path: Path,
) -> None:
    right = "response(gamma * self.q(dtype) * h_init"
    bug = "response(gamma * h_init"
    with edited(tmp_path, bug, right, "_filtered", ComplexEMA) as (file, at):
        found = start(SHORT)
    assert found is not None and (found.call, found.stage) == (1, "layers.0.cema")
    first = found.lines[0]
    assert f"{file.name}:{at} (" in f"{first.place} {first.why}"
    assert not any("pole_powers" in line.place for line in found.lines)


@pytest.mark.sweep
@pytest.mark.traced_checks
def test_a_stream_that_ends_with_an_error_is_explained(tmp_path: Path) -> None:
    """Of logits that are NaN no token can be chosen."""
    right = "h = self.q(u.dtype) * h + lost"
    bug = "h = (self.q(u.dtype) * h + lost) / jnp.zeros_like(h)"
    with edited(tmp_path, bug, right, "step", ComplexEMA) as (file, at):
        told = explain(SHORT)
    assert told.quantity == "layers.0.cema" and "In call 3 (token 21) stage" in told.meaning
    assert told.note.startswith("the stream ended with ")
    assert f"{file.name}:{at} (" in told.lines[0].place
    assert told.parameters == ("model.layers.0.attn.cema",)


def test_an_error_of_a_stream_whose_stages_are_right_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(case: Case) -> Any:
        raise RuntimeError("no token")

    monkeypatch.setattr("parity.megalodon.explanation.failure", fails)
    monkeypatch.setattr(stream_lines, "start", lambda case: None)
    with pytest.raises(RuntimeError, match="no token"):
        explain(SHORT)


def failed(monkeypatch: pytest.MonkeyPatch, quantity: str = "state/layers.0.ema") -> None:
    monkeypatch.setattr(
        "parity.megalodon.explanation.failure", lambda case: failing(quantity=quantity)
    )


def test_an_explanation_says_call_and_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    failed(monkeypatch)
    line = Line("megalodon_jax/layers/complex_ema.py:1 (f)", "why", "> 1")
    found = Start(2, (28, 29), "layers.0.cema", (line,))
    monkeypatch.setattr(stream_lines, "start", lambda case: found)
    told = explain(SHORT)
    assert told.quantity == "state/layers.0.ema" and told.lines == (line,)
    assert told.parameters == ("model.layers.0.attn.cema",)
    assert told.meaning == (
        "In call 3 (token 28) stage layers.0.cema is the first that is wrong, although every stage "
        "before it was given the oracle's values. The error is in that stage, or in the cache that "
        "call 2 wrote."
    )
    # Nothing was before the first call.
    assert replace(found, call=0, tokens=(0, 7)).describe() == (
        "In call 1 (tokens 0 to 6) stage layers.0.cema is the first that is wrong, although every "
        "stage before it was given the oracle's values."
    )


def no_search(case: Case) -> Any:
    raise AssertionError("looked for")


@pytest.mark.parametrize("name", ["stream_ragged", "stream_documents"])
def test_padded_rows_and_documents_are_not_searched(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed(monkeypatch)
    monkeypatch.setattr(stream_lines, "start", no_search)
    told = explain(by_name(name))
    assert told.quantity == "state/layers.0.ema" and not told.lines and not told.note


def test_what_another_case_names_is_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failed(monkeypatch)
    monkeypatch.setattr(stream_lines, "start", no_search)
    stage = Stage("layers.0.cema", 1.0, 1.0, 1e-11)
    other = Explanation("plain", "jax64:oracle", quantity=stage.name, stages=(stage,))
    line = Line("megalodon_jax/layers/complex_ema.py:1 (f)", "why", "> 1")
    told = explain(SHORT, [replace(other, lines=(line,))])
    assert told.note == "its lines were not searched: see those of case plain" and not told.lines
    # An account without lines is no reason, and a search that fails is said.
    monkeypatch.setattr(
        "parity.megalodon.explanation.failure", lambda case: failing(note="shapes differ")
    )
    told = explain(SHORT, [other])
    assert told.note == "shapes differ; the wrong call was not found: AssertionError: looked for"


def test_lines_of_a_stream_are_not_those_of_a_stage_of_the_same_name() -> None:
    stage = Stage("logits", 1.0, 1.0, 1e-11)
    line = Line("megalodon_jax/model.py:1 (f)", "why", "> 1")
    stream = Explanation("stream", "jax64:oracle", quantity="logits", lines=(line,))
    report = Account(by_name("plain"), "float64", (stage,), None)
    own = Line("megalodon_jax/model.py:2 (g)", "its own", "> 2")
    with (
        patch("parity.megalodon.explanation.account", return_value=report),
        patch("parity.megalodon.explanation.lines", return_value=(own,)),
    ):
        told = explain(by_name("plain"), [stream])
    assert told.lines == (own,) and not told.note
