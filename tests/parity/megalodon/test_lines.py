"""A night's account names the line of the JAX model that makes a stage wrong, and the elements."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import jax
import numpy as np
import pytest

from megalodon_jax.layers import attention
from megalodon_jax.layers.complex_ema import ComplexEMA
from parity.faults import by_name as fault_by_name
from parity.megalodon import oracle_operations
from parity.megalodon.account import Account, account
from parity.megalodon.cases import SMALL, by_name
from parity.megalodon.explanation import explain
from parity.megalodon.lines import ENTERS, UNREAD
from parity.megalodon.noise_floors import forward_truth

C = SMALL["chunk_size"]
PADDED = replace(by_name("right_padding"), overrides={"num_layers": 1}, length=C + 5)
"""A chunk and a tail of five, of which row 0 pads the last four."""
MASK = "tail = None if mask is None else mask[:, whole:]"


@contextmanager
def edited(
    folder: Path,
    bug: str,
    line: str = MASK,
    method: str = "_block_diagonal",
    layer: type = attention.ChunkedAttention,
) -> Iterator[tuple[Path, int]]:
    """Put a method of an edited layer in its place; gives the file and the line."""
    source = Path(inspect.getfile(layer)).read_text(encoding="utf-8")
    assert source.count(line) == 1
    file = folder / "layer_edited.py"
    file.write_text(source.replace(line, bug), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    with patch.dict(sys.modules, {file.stem: module}):
        spec.loader.exec_module(module)
    number = source[: source.index(line)].count("\n") + 1
    wrong = getattr(getattr(module, layer.__name__), method)
    jax.clear_caches()
    try:
        with patch.object(layer, method, wrong):
            yield file, number
    finally:
        jax.clear_caches()


def test_a_mask_that_is_off_in_the_tail_of_a_chunk_is_named_by_its_line(tmp_path: Path) -> None:
    with edited(tmp_path, "tail = None if mask is None else mask[:, whole - 1 : -1]") as (file, at):
        told = explain(PADDED)
    assert told.quantity == "layers.0.inner"
    assert told.where == (
        "row 0, positions 17-20, all channels: all padding, in chunk 1, the tail of 5"
    )
    first = told.lines[0]
    assert f"{file.name}:{at} (" in first.place
    assert first.why == "makes a mask that the oracle does not have"
    assert f"> {at}" in first.excerpt and "mask[:, whole - 1 : -1]" in first.excerpt


@pytest.mark.sweep
def test_a_line_is_not_cleared_by_a_use_in_which_nothing_is_masked(tmp_path: Path) -> None:
    """The tail of a chunk runs the same line, but no token of it is padding on the left."""
    case = replace(by_name("left_padding"), overrides={"num_layers": 1}, length=C + 5)
    right = "mask[:, :L].reshape(B, chunks, 1, size)"
    bug = "jnp.roll(mask[:, :L], 1, axis=1).reshape(B, chunks, 1, size)"
    with edited(tmp_path, bug, right, "_chunks") as (file, at):
        told = explain(case)
    assert told.quantity == "layers.0.inner"
    first, second = told.lines[:2]
    assert f"{file.name}:{at} (" in first.place
    assert first.why.endswith("; correct elsewhere, where there is nothing to mask")
    # The call comes second: that it passes a wrong mask is not excluded.
    assert "_block_diagonal" in second.place and "right when called elsewhere" in second.why


ZEROED = "u = jnp.where(mask[:, None, :], u, 0.0)"
READ = "mask = mask if self.config.mask_ema else None"


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("bug", "line", "layer", "named", "why"),
    [
        # A line that is gone cannot be named: the next one that reads the mask is.
        ("u = u", ZEROED, ComplexEMA, "jnp.cumsum(mask", ENTERS),
        pytest.param(
            ZEROED.replace("mask[", "jnp.roll(mask, 1, 1)["),
            *(ZEROED, ComplexEMA, "jnp.roll(mask", ENTERS),
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            *("mask = None", READ, attention.MegalodonAttention),
            *("c, ema = self._filtered(", UNREAD),
            marks=pytest.mark.sweep,
        ),
    ],
    ids=["no mask", "another mask", "mask not passed"],
)
def test_padding_that_the_filter_misreads_is_named_and_no_healthy_line_of_an_fft(
    tmp_path: Path, bug: str, line: str, layer: type, named: str, why: str
) -> None:
    case = replace(by_name("left_padding"), overrides={"num_layers": 1}, length=C + 5)
    with edited(tmp_path, bug, line, "_filtered", layer):
        told = explain(case)
    assert told.quantity == "layers.0.cema"
    [marked] = [x for x in told.lines[0].excerpt.splitlines() if x.lstrip().startswith(">")]
    assert told.lines[0].why == why and named in marked


@pytest.mark.sweep
def test_padding_is_not_blamed_for_a_stage_that_is_wrong_without_it() -> None:
    case = replace(by_name("left_padding"), overrides={"num_layers": 1}, length=C + 5)
    with fault_by_name("cema_gamma_over_n").planted():
        told = explain(case)
    assert told.quantity == "layers.0.cema"
    assert told.lines and not {line.why for line in told.lines} & {ENTERS, UNREAD}


@pytest.mark.sweep
def test_a_mask_that_is_missing_is_named_by_the_call_that_lacks_it(tmp_path: Path) -> None:
    with edited(tmp_path, "tail = None") as (file, at):
        told = explain(PADDED)
    assert "row 0, positions 17-20" in told.where
    assert file.name in told.lines[0].place
    assert "right when called elsewhere" in told.lines[0].why
    assert "tail = None" in told.lines[0].excerpt and f" {at}  " in told.lines[0].excerpt


@pytest.mark.sweep
def test_another_bug_names_another_line_and_a_healthy_model_none() -> None:
    """Negative controls. A gain of 1 that is left out is wrong in every element."""
    case = replace(PADDED, padding="none")
    with fault_by_name("rmsnorm_plus_one_dropped").planted():
        told = explain(case)
    assert told.quantity == "layers.0.rmsnorm"
    assert told.where == "everywhere"
    assert "megalodon_jax/layers/norms.py:" in told.lines[0].place
    # What another case has named is not looked for again.
    report = Account(case, "float64", told.stages, told.worst, told.where)
    with patch("parity.megalodon.explanation.account", return_value=report):
        again = explain(case, [told])
    assert again.lines == told.lines
    assert again.note == f"source lines are those found for case {case.name}"
    assert account(case).culprit is None, "and of a healthy model there is nothing to name"


def test_a_search_that_fails_leaves_the_account(monkeypatch) -> None:
    case = replace(PADDED, padding="none")

    def fails(*args: object) -> None:
        raise RuntimeError("no lines today")

    monkeypatch.setattr("parity.megalodon.explanation.lines", fails)
    with fault_by_name("rmsnorm_plus_one_dropped").planted():
        told = explain(case)
    assert told.quantity == "layers.0.rmsnorm" and told.lines == ()
    assert told.note == "source lines were not found: RuntimeError: no lines today"


def test_the_oracle_s_operations_end_at_the_stage_and_hold_its_numbers() -> None:
    exact = forward_truth(PADDED)
    results = oracle_operations.results(PADDED, "layers.0.inner")
    shape = exact["layers.0.inner"].shape

    def has(stage: str) -> bool:
        value = exact[stage].reshape(-1)
        return any(np.array_equal(np.ravel(x), value) for x in results if np.size(x) == value.size)

    assert has("layers.0.inner") and has("layers.0.v")
    # Negative control: what comes behind the stage is not among them.
    assert not has("layers.0.gate") and not has("logits")
    assert shape == (*PADDED.valid.shape, PADDED.config.value_dim)
