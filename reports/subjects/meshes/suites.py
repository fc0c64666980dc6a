"""The suite that compares training on one device with training on meshes of several."""

from __future__ import annotations

from collections.abc import Collection

from parity.executors.executor import Log
from parity.megalodon.suite import Reference
from parity.mesh import contract as mesh_contract
from parity.mesh import suite as meshes
from parity.mesh.tolerance_table import MeshEdge
from reports.subjects.meshes.record import PART
from reports.suite_run import SuiteRun, breakdowns_named


def run_mesh(_: Reference, report: Log, only: Collection[str] = ()) -> SuiteRun:
    """Compare training on one device with training on meshes of eight devices.

    `only` selects models, such as `mesh megalodon`, or cases (a model on one mesh); empty selects
    all.
    """
    suite = SuiteRun(PART.suite, planned=meshes.planned(only))
    with breakdowns_named(suite):
        suite.contract = list(mesh_contract.gates(only))
        suite.measurements, responses = meshes.measure(only)
        # Only for float32: float64 errors are so small that a level counts them with the least
        # value, a fraction of the tolerance (`DRIFT_SHARE`), on any machine.
        suite.responses.update(
            {(case, "rel_l2", str(MeshEdge.MESH32_ONE32)): of for case, of in responses.items()}
        )
    suite.executed = len({row.case for row in suite.measurements})
    report(f"  mesh: {suite.passed} gates hold on {suite.executed} meshes ({suite.seconds:.1f} s)")
    return suite
