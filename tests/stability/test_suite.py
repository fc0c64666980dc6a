"""The suite of a night: a probe that breaks down is named, and hides no other."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

from megalodon_jax import MegalodonForCausalLM
from parity.megalodon.cases import BYTE_LM
from stability import suite
from stability.core import documents
from stability.core.findings import Finding, Severity
from stability.dtype_audit import read_pinned
from stability.suite import Checkpoint, ProbeResults, run
from tests.helpers import double

CHECKPOINT = Checkpoint(BYTE_LM, BYTE_LM / "heldout.txt")
MODEL = double(MegalodonForCausalLM)


def says(*answer):
    return lambda checkpoint, model, said: answer


def breaks(checkpoint, model, said):
    raise RuntimeError("out of luck")


@pytest.mark.parametrize("broken", ["first", "second", "third"])
def test_a_probe_that_breaks_down_is_named_and_hides_no_other(monkeypatch, broken) -> None:
    probes = dict.fromkeys(("first", "second", "third"), says([], {"rows": 1}))
    monkeypatch.setattr(suite, "PROBES", probes | {broken: breaks})
    said = run(CHECKPOINT, MODEL)
    assert said.executed == 2
    assert said.failures == [f"{broken}: RuntimeError: out of luck"]
    assert broken not in said.shown


def test_a_probe_has_seconds_where_it_ran_alone(monkeypatch) -> None:
    def made(*names):
        return says([Finding(n, Severity.NOTE, "", "", 0.0, 0.0, "", "") for n in names], None)

    probes = {"first": made("a"), "second": made("b", "c"), "third": made("b"), "fourth": made("d")}
    monkeypatch.setattr(suite, "PROBES", probes)
    assert run(CHECKPOINT, MODEL).seconds.keys() == {"a", "d"}


def test_remedies_without_survival_are_a_failure(monkeypatch) -> None:
    probes = {"survival": breaks, "remedies": suite.PROBES["remedies"]}
    monkeypatch.setattr(suite, "PROBES", probes)
    said = run(CHECKPOINT, MODEL)
    assert said.executed == 0
    assert [f.partition(":")[0] for f in said.failures] == ["survival", "remedies"]


def test_a_document_is_no_probe() -> None:
    """What a command measured once must not count as executed by a night."""
    assert not {*documents.COMMANDS, "mla_moe"} & suite.PROBES.keys()


def pinned(monkeypatch, change=lambda rows: rows, reason=None):
    def audit(*, compiled):
        assert not compiled
        return change([r for r in read_pinned("float32").rows if r.view == "jaxpr"])

    def torch():
        return read_pinned("torch_autocast").rows

    monkeypatch.setattr(suite, "PROGRAMS", {"float32": audit, "torch_autocast": torch})
    monkeypatch.setattr(suite, "why_unavailable", lambda: reason)
    found, _ = suite.PROBES["dtypes against pinned rows"](CHECKPOINT, MODEL, ProbeResults())
    return found


def test_audits_equal_to_the_committed_ones_are_ok_and_say_what_is_left_out(monkeypatch) -> None:
    found = pinned(monkeypatch)
    assert {f.severity for f in found} == {Severity.OK, Severity.NOTE}
    assert [f.subject for f in found if f.metric == "not_compared"] == ["float32"]


def test_a_row_in_another_dtype_is_an_error_with_the_same_jax_only(monkeypatch) -> None:
    def narrowed(rows):
        return [replace(rows[0], output="bfloat16", inputs=("bfloat16",)), *rows[1:]]

    found = pinned(monkeypatch, narrowed)
    assert Severity.ERROR in {f.severity for f in found}
    monkeypatch.setattr(jax, "__version__", "0.0.1")
    found = pinned(monkeypatch, narrowed)
    assert {f.severity for f in found} == {Severity.WARNING, Severity.NOTE, Severity.OK}


def test_a_reference_that_is_not_there_is_said(monkeypatch) -> None:
    found = pinned(monkeypatch, reason="torch is not installed")
    told = [f.message for f in found if f.subject == "torch_autocast"]
    assert len(told) == 1
    assert "torch is not installed" in told[0]
