"""Bugs planted in Flax models of Transformers are found where they are, and what is none is not.

A few of one model are in every run, all of them in a sweep.
docs/tables/ports-detection.md has the table.
"""

from __future__ import annotations

import pytest

try:
    from tests.parity.ports.faults import CONTROLS, FAULTS
    from tests.parity.ports.faults.bench import run
except ImportError:  # what is missing is told by the marker
    CONTROLS, FAULTS = (), ()

QUICK = {
    "llama_rms_epsilon",
    "llama_silu",
    "llama_groups_in_turn",
    "llama_sees_the_next",
    "llama_norm_not_converted",
    "llama_keys_scaled",
}
"""Of one pair, made once: a number, a function, an order, a mask, a parameter, and what is none."""
MISPLACED = {
    "bart_norm_over_positions": "model.shared",
    "bart_no_offset": "model.shared",
    "bert_query_is_key": "bert.encoder.layer.1.attention.self[0]",
    "llama_gate_is_up": "model.layers.1.mlp.down_proj",
}
"""What is found elsewhere than it is; docs/tables/ports-detection.md says why."""
pytestmark = [
    pytest.mark.flax_models,
    # Transformers tells of its own deprecations, and of the end of its Flax models.
    pytest.mark.filterwarnings("ignore"),
]


def each(faults):
    return [
        pytest.param(fault, id=fault.name, marks=() if fault.name in QUICK else pytest.mark.sweep)
        for fault in faults
    ]


@pytest.mark.parametrize("fault", each(FAULTS))
def test_a_bug_is_found_where_it_is(fault):
    report, finding = run(fault)
    assert finding.found
    where = MISPLACED.get(fault.name, fault.stage)
    assert finding.stage_right or finding.stage == where, report.text()


@pytest.mark.parametrize("control", each(CONTROLS))
def test_a_change_that_changes_nothing_holds(control):
    report, finding = run(control)
    assert not finding.found, report.text()


def test_names_are_unique_and_quick_ones_are_among_them():
    names = [fault.name for fault in (*FAULTS, *CONTROLS)]
    assert len(names) == len(set(names))
    assert {*names} >= QUICK
