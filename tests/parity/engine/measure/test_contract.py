"""The contract of a run: what a missing, doubled, exchanged or unplanned gate does to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parity.engine.measure.contract import Breaches, Gate, breaches, contract_of
from parity.engine.measure.measurement import Kind, Verdict
from tests.reports.nights import measurement

ROWS = [
    measurement(case=case, edge=edge, quantity=quantity, kind=kind)
    for case in ("one", "two")
    for edge in ("jax64:oracle", "jax32:oracle")
    for quantity, kind in (("embed", Kind.BLOCK), ("cema", Kind.BLOCK), ("loss", Kind.LOSS))
]
CONTRACT = contract_of(map(Gate.of, ROWS))


def test_a_run_that_measured_each_planned_gate_once_fits_in_any_order():
    assert len(CONTRACT) == 2 * 2 * 2
    assert sum(line.gates for line in CONTRACT) == len(ROWS)
    assert breaches(CONTRACT, reversed(ROWS)) == Breaches()
    fact = measurement(quantity="embed", metric="cosine", verdict=Verdict.INFO)
    assert not breaches(CONTRACT, [*ROWS, fact]), "what has no tolerance is no gate"


def test_a_contract_is_the_same_in_whatever_order_gates_are_planned():
    gates = [Gate.of(m) for m in ROWS]
    assert contract_of(gates[::-1]) == contract_of(gates) == tuple(sorted(CONTRACT))


def test_a_line_that_counts_other_gates_than_it_names_does_not_fit():
    first, *rest = CONTRACT
    for gates in (first.gates + 1, first.gates - 1):
        assert breaches([replace(first, gates=gates), *rest], ROWS)


@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.NOT_COMPARABLE])
def test_a_gate_that_does_not_hold_was_measured(verdict):
    rows = [replace(ROWS[0], verdict=verdict), *ROWS[1:]]
    assert not breaches(CONTRACT, rows)


@pytest.mark.parametrize("lost", range(len(ROWS)))
def test_each_gate_is_missed(lost):
    found = breaches(CONTRACT, ROWS[:lost] + ROWS[lost + 1 :])
    (line, measured), m = found.missing[0], ROWS[lost]
    assert line.group == (m.suite, m.case, m.edge, m.kind)
    assert measured == line.gates - 1
    assert f"case {m.case} ({m.edge})" in found.sentence()


@pytest.mark.parametrize(
    ("lost", "what"),
    [
        (lambda m: m.case == "one", "a case"),
        (lambda m: m.edge == "jax64:oracle", "an edge"),
        (lambda m: m.kind is Kind.LOSS, "a kind"),
        (lambda m: True, "everything"),
        (lambda m: m != ROWS[3], "all but one"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whole_groups_are_missed(lost, what):
    rows = [m for m in ROWS if not lost(m)]
    found = breaches(CONTRACT, rows)
    missed = sum(line.gates - measured for line, measured in found.missing)
    assert missed == len(ROWS) - len(rows), what


@pytest.mark.parametrize(
    "change", [{"quantity": "norm"}, {"metric": "cosine"}, {"case": "one "}, {"suite": "mesh"}]
)
def test_another_gate_does_not_stand_for_a_planned_one(change):
    found = breaches(CONTRACT, [replace(ROWS[0], **change), *ROWS[1:]])
    assert found.missing
    assert bool(found.unplanned) == ("quantity" not in change and "metric" not in change)


def test_a_gate_beyond_the_contract_and_one_that_is_there_twice_are_named():
    more = measurement(case="three", quantity="embed")
    found = breaches(CONTRACT, [*ROWS, more])
    assert found.unplanned == (Gate.of(more),)
    assert "not in the contract, first: embed (rel_l2) of case three" in found.sentence()
    found = breaches(CONTRACT, [*ROWS, ROWS[4]])
    assert found and found.doubled == (Gate.of(ROWS[4]),)
    assert "measured more than once, first: cema" in found.sentence()
    # In the order of the contract, whatever the order of the run is.
    found = breaches(CONTRACT, [*reversed(ROWS), *ROWS[3:6]])
    assert found.doubled == tuple(sorted(map(Gate.of, ROWS[3:6])))
    # The second one does not make up for another that is missing.
    assert breaches(CONTRACT, [*ROWS[1:], ROWS[1]]).missing


def test_every_gate_of_a_case_that_was_not_planned_is_named():
    more = [measurement(case="three", quantity=name) for name in ("cema", "embed", "norm")]
    found = breaches(CONTRACT, [*ROWS, *more])
    assert found.unplanned == tuple(map(Gate.of, more)) and not found.missing


def test_every_gate_of_a_group_with_more_than_planned_is_named():
    """Which of them is the one too many, a digest does not say."""
    more = replace(ROWS[0], quantity="aaa")
    group = [m for m in (more, *ROWS) if Gate.of(m).group == Gate.of(more).group]
    found = breaches(CONTRACT, [*ROWS, more])
    assert len(group) == 3 and found.unplanned == tuple(sorted(map(Gate.of, group)))
    assert not found.missing and not found.doubled


def test_a_gate_is_planned_once():
    with pytest.raises(ValueError, match="expected every gate to be planned once"):
        contract_of(map(Gate.of, [*ROWS, ROWS[0]]))
