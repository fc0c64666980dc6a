"""The contract of the suite over meshes names what a comparison measures, before it does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from megalodon_jax import traced_checks
from parity.deepseek_v3.cases import BUFFER
from parity.engine.measure.contract import breaches, contract_of
from parity.engine.measure.measurement import Verdict
from parity.mesh import contract
from parity.mesh.step import MeshComparison
from parity.mesh.suite import CASES, WATCHED, measured


def step(x):
    """Marks with one name twice, one in a loop, logits, whole numbers and a bool."""
    a = checkpoint_name(x * 2, "hidden")
    b = checkpoint_name(a + 1, "hidden")
    total, _ = jax.lax.scan(lambda c, row: (checkpoint_name(c + row, "sum"), None), b[0], b)
    return {
        "logits": b,
        "total": total,
        "count": jnp.int32(x.shape[0]),
        "even": jnp.array(x.shape[0] % 2 == 0),
    }


def test_every_mark_and_result_is_planned_and_measured():
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    comparison = MeshComparison(step, (x,), P("data"), [{"data": 2}])
    with traced_checks(False):
        report = comparison.run(watched=WATCHED)
    assert report.holds, report.table()
    measured = {
        (m.edge, m.quantity, m.metric) for m in report.measurements if m.verdict is not Verdict.INFO
    }
    planned = {
        (edge, name, metric)
        for edge, name, value in contract.planned(comparison)
        for metric in contract.metrics_of(name, value)
    }
    assert planned == measured
    assert ("mesh64:one64", "hidden#1", "rel_l2") in planned
    assert ("mesh32:one32", "count", "unequal") in planned
    assert ("mesh64:one64", "logits", "top1_flips") in planned


def test_a_part_of_the_meshes_has_a_part_of_the_gates():
    case = "mesh mla-moe data=2 expert=4"
    gates = list(contract.gates([case]))
    assert {gate.case for gate in gates} == {case}
    # What is 0 by construction is no gate.
    assert not any(BUFFER in gate.quantity for gate in gates)
    assert {"grad", "params", "mu", "nu"} <= {p for g in gates for p in g.quantity.split("/")[:2]}


@pytest.mark.sweep
@pytest.mark.parametrize("case", ["mesh mla-moe data=8 expert=1", next(iter(CASES))])
def test_the_suite_measures_its_contract(case):
    """A gate that is planned and never measured would leave every night incomplete."""
    found = breaches(contract_of(contract.gates([case])), measured([case]).rows)
    assert not found, found.sentence()
