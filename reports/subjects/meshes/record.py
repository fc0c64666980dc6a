"""The record of training on meshes of devices. Importing it imports no JAX."""

from __future__ import annotations

from reports.subject import Part, Subject, Suites, Tables

PART = Part(
    "(mesh)",
    "mesh",
    "mesh",
    "training on one device against the same on a mesh",
    section="meshes",
)


def _suites() -> Suites:
    from parity.mesh import suite
    from reports.subjects.meshes.suites import run_mesh

    return Suites({PART.name: run_mesh}, {PART.name: {*suite.SUBJECTS, *suite.CASES}})


def _tables() -> Tables:
    from parity.mesh.tolerance_table import MESHES

    return Tables(MESHES)


MESHES = Subject("meshes", (PART,), _suites, _tables)
