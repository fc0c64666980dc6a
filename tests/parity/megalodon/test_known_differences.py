"""A deliberate difference is measured; gone or grown, it is a failure."""

from __future__ import annotations

import numpy as np
import pytest

from parity.engine.measure.measurement import Kind, Verdict
from parity.megalodon import known_differences
from parity.megalodon.known_differences import KNOWN_DIFFERENCES, measure
from parity.megalodon.reference import LiveReference, why_unavailable
from parity.tolerances import KNOWN_DIFFERENCE_BOUNDS, KNOWN_DIFFERENCES_RECORDED


class Facts:
    """A reference of our own making."""

    def __init__(self, facts):
        self._facts = facts

    def known_differences(self):
        return self._facts


@pytest.mark.torch_ref
def test_every_known_difference_is_what_it_was(reference, numerics):
    rows = numerics(measure(reference))
    assert (
        [m.quantity for m in rows]
        == [difference.id for difference in KNOWN_DIFFERENCES]
        == list(KNOWN_DIFFERENCE_BOUNDS)
    )
    assert {m.verdict for m in rows} == {Verdict.PASS}
    assert {m.kind for m in rows} == {Kind.KNOWN_DIFFERENCE}


@pytest.mark.torch_ref
def test_recorded_known_differences_equal_the_live_reference():
    if reason := why_unavailable():
        pytest.skip(f"not run: {reason}")
    rows = [
        {m.quantity: m.value for m in measure(side)}
        for side in (LiveReference(), known_differences_recorded())
    ]
    assert rows[0] == pytest.approx(rows[1], rel=KNOWN_DIFFERENCES_RECORDED)


def known_differences_recorded():
    from parity.megalodon.recordings import RecordedReference

    return RecordedReference()


@pytest.mark.torch_ref
@pytest.mark.parametrize("difference", KNOWN_DIFFERENCES, ids=lambda difference: difference.id)
def test_a_known_difference_that_closed_or_grew_fails(reference, difference):
    facts = dict(reference.known_differences())
    closed = {
        "ema-mask": lambda: known_differences.JaxSubject().intermediates(
            known_differences.by_name("left_padding")
        )["logits"],
        "loss-mask": lambda: known_differences.JaxSubject().run(
            known_differences.by_name("labels_at_padding")
        )["loss"],
        "empty-loss": lambda: np.float32(0.0),
        "untied-head": lambda: np.float32(0.3),
        "initialisation": lambda: np.float32(0.24),
    }
    facts[difference.id] = np.asarray(closed[difference.id]())
    verdicts = {m.quantity: m.verdict for m in measure(Facts(facts))}
    assert {name for name, verdict in verdicts.items() if verdict is Verdict.FAIL} == {
        difference.id
    }


@pytest.mark.torch_ref
def test_a_known_difference_the_reference_says_nothing_of_fails(reference):
    facts = {n: a for n, a in reference.known_differences().items() if n != "loss-mask"}
    failed = [m.quantity for m in measure(Facts(facts)) if m.verdict is Verdict.FAIL]
    assert failed == ["loss-mask"]


@pytest.mark.torch_ref
def test_what_stands_at_padding_is_no_part_of_a_known_difference(reference):
    """Masked positions mean something else on each side, however large they are."""
    [difference] = (d for d in KNOWN_DIFFERENCES if d.id == "ema-mask")
    theirs, valid = (
        reference.known_differences()[difference.id],
        known_differences.by_name("left_padding").valid,
    )
    assert not valid.all()
    spoiled = np.where(valid[..., None], theirs, np.float32(1e6))
    assert difference.measure(spoiled) == difference.measure(theirs)
