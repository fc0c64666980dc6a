"""The record of Megalodon as a user's port. Importing it imports no JAX."""

from __future__ import annotations

from reports.subject import Part, Subject, Suites

PART = Part(
    "(port)",
    "port",
    "port",
    "Megalodon and megalodon-hf compared as any two programs",
    live=True,
)


def _suites() -> Suites:
    from reports.subjects.port import suites

    return Suites({PART.name: suites.run_port}, {PART.name: {*suites.AS_A_PORT}})


PORT = Subject("Megalodon as a port", (PART,), _suites)
