"""Contract: the gates that the suite over meshes must report (`parity.mesh.suite`).

The gates follow from the names of all marks and results of the program. The names are found by
tracing the program on one device, without compiling or running. Source: docs/verdicts.md
"Contract".
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import jax
import jax.numpy as jnp

from megalodon_jax.checks import traced_checks
from parity.engine.measure.contract import Gate
from parity.engine.measure.measurement import Kind
from parity.mesh.comparison import EDGES, kind_of_mark, layouts, sizes_name
from parity.mesh.program import Program
from parity.mesh.step import MeshComparison, mesh_of
from parity.mesh.suite import SUBJECTS, SUITE, WATCHED, meshes_of


def gates(names: Collection[str] = ()) -> Iterator[Gate]:
    """Yield the gates of the subjects and cases called `names`; without names, of all subjects."""
    for subject, meshes in meshes_of(names or tuple(SUBJECTS)).items():
        comparison: MeshComparison = SUBJECTS[subject]().on(meshes)
        for edge, name, value in planned(comparison):
            for sizes in meshes:
                case = f"{subject} {sizes_name(sizes)}"
                for metric in metrics_of(name, value):
                    yield Gate(SUITE, case, edge, kind_of_mark(name).value, name, metric)


def planned(comparison: MeshComparison) -> Iterator[tuple[str, str, jax.ShapeDtypeStruct]]:
    """Yield edge, name, and shape with dtype of every mark and result compared on each mesh."""
    one = mesh_of(dict.fromkeys(comparison.meshes[0], 1), explicit=comparison.explicit)
    (layout,) = layouts(comparison.arguments, comparison.specs, [one])
    program = Program(comparison.function, comparison.arguments, layout, one)
    with traced_checks(False):
        for dtype in comparison.precisions:
            for name, value in program.planned(dtype, dtype in WATCHED).items():
                if name not in comparison.zeros:
                    yield str(EDGES[dtype]), name, value


def metrics_of(name: str, value: jax.ShapeDtypeStruct) -> Iterator[str]:
    """Yield the names of the metrics that have a tolerance for a mark or result."""
    yield "replicas"
    real = jnp.issubdtype(value.dtype, jnp.inexact)
    yield "rel_l2" if real else "unequal"
    if real and value.ndim and kind_of_mark(name) is Kind.LOGITS:
        yield "top1_flips"
