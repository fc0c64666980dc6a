"""A deliberate difference is measured; gone or grown, it is a failure."""

from __future__ import annotations

import numpy as np
import pytest

from parity.engine.measurement import Kind, Verdict
from parity.megalodon import known_differences
from parity.megalodon.known_differences import SEAMS, measure
from parity.megalodon.reference import LiveReference, why_unavailable
from parity.tolerances import SEAM_BOUNDS, SEAMS_RECORDED


class Facts:
    """A reference of our own making."""

    def __init__(self, facts):
        self._facts = facts

    def seams(self):
        return self._facts


@pytest.mark.torch_ref
def test_every_seam_is_what_it_was(reference, numerics):
    rows = numerics(measure(reference))
    assert [m.quantity for m in rows] == [seam.id for seam in SEAMS] == list(SEAM_BOUNDS)
    assert {m.verdict for m in rows} == {Verdict.PASS}
    assert {m.kind for m in rows} == {Kind.SEAM}


@pytest.mark.torch_ref
def test_recorded_seams_equal_the_live_reference():
    if reason := why_unavailable():
        pytest.skip(f"not run: {reason}")
    rows = [
        {m.quantity: m.value for m in measure(side)} for side in (LiveReference(), seams_recorded())
    ]
    assert rows[0] == pytest.approx(rows[1], rel=SEAMS_RECORDED)


def seams_recorded():
    from parity.megalodon.recordings import RecordedReference

    return RecordedReference()


@pytest.mark.torch_ref
@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.id)
def test_a_seam_that_closed_or_grew_fails(reference, seam):
    facts = dict(reference.seams())
    closed = {
        "ema-mask": lambda: known_differences.JaxSubject().taps(
            known_differences.by_name("left_padding")
        )["logits"],
        "loss-mask": lambda: known_differences.JaxSubject().run(
            known_differences.by_name("labels_at_padding")
        )["loss"],
        "empty-loss": lambda: np.float32(0.0),
        "untied-head": lambda: np.float32(0.3),
        "initialisation": lambda: np.float32(0.24),
    }
    facts[seam.id] = np.asarray(closed[seam.id]())
    verdicts = {m.quantity: m.verdict for m in measure(Facts(facts))}
    assert {name for name, verdict in verdicts.items() if verdict is Verdict.FAIL} == {seam.id}


@pytest.mark.torch_ref
def test_a_seam_the_reference_says_nothing_of_fails(reference):
    facts = {n: a for n, a in reference.seams().items() if n != "loss-mask"}
    failed = [m.quantity for m in measure(Facts(facts)) if m.verdict is Verdict.FAIL]
    assert failed == ["loss-mask"]


@pytest.mark.torch_ref
def test_what_stands_at_padding_is_no_part_of_a_seam(reference):
    """Masked positions mean something else on each side, however large they are."""
    [seam] = (seam for seam in SEAMS if seam.id == "ema-mask")
    theirs, valid = reference.seams()[seam.id], known_differences.by_name("left_padding").valid
    assert not valid.all()
    spoiled = np.where(valid[..., None], theirs, np.float32(1e6))
    assert seam.measure(spoiled) == seam.measure(theirs)
