"""Rows of the embedding: one that is zero is found by its token, and nothing else is said."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from megalodon_jax.weights import EMBEDDING, named_leaves, replace_leaves
from parity.faults import by_name
from parity.megalodon import runner
from parity.megalodon.cases import BYTE_LM
from stability import suite
from stability.core.findings import Severity
from stability.storage.diagnose import report
from stability.storage.embedding_rows import findings
from stability.suite import Checkpoint, ProbeResults
from tests.helpers import TINY, arrays, model_of

V = TINY.vocab_size


def with_rows(change):
    model = model_of(TINY)
    return replace_leaves(model, {EMBEDDING: change(named_leaves(model)[EMBEDDING])})


def test_rows_that_hold_anything_at_all_are_ok() -> None:
    (found,) = findings(model_of(TINY))
    assert (found.severity, found.value, found.remedy) == (Severity.OK, 0.0, "")
    # One element, and as small as float32 has them, is not nothing.
    almost = with_rows(lambda w: w.at[3].set(0.0).at[3, 0].set(np.finfo(np.float32).tiny))
    (found,) = findings(almost)
    assert found.severity is Severity.OK


def test_one_zero_row_is_a_warning_that_names_its_token() -> None:
    (found,) = findings(with_rows(lambda w: w.at[3].set(-0.0)))
    assert (found.severity, found.subject) == (Severity.WARNING, EMBEDDING)
    assert (found.value, found.threshold) == (1 / V, 0.0)
    assert f"1 of {V} rows are zero, by token: 3" in found.message
    assert "mean of the other rows" in found.remedy


def test_the_fault_that_zeroes_the_padding_row_is_found() -> None:
    with by_name("pad_row_zeroed").patch.applied():
        faulty = runner.build_model(TINY, arrays(TINY))
    (found,) = findings(faulty)
    assert (found.severity, found.value) == (Severity.WARNING, 1 / V)
    assert found.message.endswith(f"by token: {TINY.pad_token_id}")


def test_rows_are_judged_as_they_are_stored() -> None:
    """Negative control of a probe that reads float32: 1e-60 is zero there."""
    wide = {EMBEDDING: np.full((3, 2), 1e-60)}
    (found,) = findings(wide)
    assert found.severity is Severity.OK
    (found,) = findings({EMBEDDING: jnp.zeros((3, 2), jnp.bfloat16)})
    assert (found.severity, found.value) == (Severity.WARNING, 1.0)


def test_a_night_asks_it_and_is_quiet_about_the_committed_checkpoint() -> None:
    ask, checkpoint = suite.PROBES["embedding rows"], Checkpoint(BYTE_LM, BYTE_LM / "heldout.txt")
    (found,), _ = ask(checkpoint, checkpoint.load(), ProbeResults())
    assert found.severity is Severity.OK
    (found,), _ = ask(checkpoint, with_rows(jnp.zeros_like), ProbeResults())
    assert (found.severity, found.value) == (Severity.WARNING, 1.0)


def test_the_diagnosis_asks_it_too() -> None:
    rows = np.random.default_rng(0).normal(0, 0.02, (16, 8)).astype(np.float32)
    rows[5] = 0.0
    found = report({EMBEDDING: rows}, remedies=())
    assert [f.value for f in found.findings if f.probe == "embedding_rows"] == [1 / 16]
    assert "1 of 16 rows are zero" in found.text()


def test_a_source_without_an_embedding_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"no embedding here.*found w.*Megalodon"):
        findings({"w": np.ones(3)})
