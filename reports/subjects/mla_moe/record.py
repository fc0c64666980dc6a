"""The record of the second architecture. Importing it imports no JAX."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from parity.deepseek_v3 import SUBJECT
from reports.subject import Part, Section, Subject, Suites, Tables

if TYPE_CHECKING:
    from parity.engine.measure.measurement import Measurement
    from reports.store.runs import Run

PART = Part("(mla-moe)", SUBJECT, "MLA + MoE", section="architectures")


def _suites() -> Suites:
    from parity.deepseek_v3.comparison import CASES
    from reports.subjects.mla_moe.suites import run_mla_moe

    whys = {case.title: case.why for case in CASES}
    return Suites({PART.name: run_mla_moe}, {PART.name: {*whys}}, whys)


def _tables() -> Tables:
    from parity.port_tolerances import PORTS

    return Tables(PORTS)


def _former_suite(m: Measurement) -> str:
    from parity.port_tolerances import PortEdge

    # Before measurements stored their suite, there was only this one port.
    return SUBJECT if m.edge in set(PortEdge) else ""


def _data(run: Run) -> dict[str, Any] | None:
    from reports.subjects.mla_moe.section import architectures

    return architectures(run)


MLA_MOE = Subject(
    "MLA + MoE",
    (PART,),
    _suites,
    _tables,
    former_suite=_former_suite,
    section=Section(
        "architectures",
        "Architectures",
        Path(__file__).with_name("architectures.html.j2"),
        _data,
    ),
)
