"""The record of Megalodon. Importing it imports no JAX."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from parity.megalodon import COMMITTED, DIFFERENCES, GIVEN, SUITE
from parity.megalodon.edges import MegalodonEdge
from reports.subject import (
    CONTROLS_PART,
    PROBES_PART,
    Model,
    Padding,
    Part,
    Subject,
    Suites,
    Tables,
)

if TYPE_CHECKING:
    from parity.engine.measure.deviation import Deviation
    from parity.engine.measure.measurement import Measurement

KNOWN_DIFFERENCES = Part("(seams)", DIFFERENCES, "known difference", section="known-differences")
PRODUCTS = Part(
    "(products)",
    "products",
    "products",
    "low-precision products against float64",
    section="formats",
)
PROBES = Part(PROBES_PART, "stability")
PLANTED = Part(CONTROLS_PART, "controls")


def _suites() -> Suites:
    from megalodon_jax.quantization.products import BACKENDS
    from parity.megalodon import known_differences
    from reports.subjects.megalodon import suites

    differences = known_differences.KNOWN_DIFFERENCES
    return Suites(
        {
            KNOWN_DIFFERENCES.name: suites.run_known_differences,
            PRODUCTS.name: suites.run_products,
        },
        {KNOWN_DIFFERENCES.name: {each.id for each in differences}, PRODUCTS.name: {*BACKENDS}},
        {each.id: each.reason for each in differences},
    )


def _tables() -> Tables:
    from parity.megalodon.known_differences import KNOWN_DIFFERENCES
    from parity.megalodon.tolerance_table import TABLE

    return Tables(TABLE, KNOWN_DIFFERENCES)


def _model() -> Model:
    from functools import partial

    from megalodon_jax import traced_checks
    from parity.megalodon.cases import CASES
    from parity.megalodon.suite import choose_reference
    from reports.subjects.megalodon import checkpoint, suites

    return Model(
        cases=CASES,
        reference=choose_reference,
        open_checkpoint=checkpoint.open_checkpoint,
        with_checkpoint=checkpoint.with_checkpoint,
        case_info=checkpoint.case_info,
        measure=suites.run_parity,
        probe=suites.run_stability,
        control=suites.run_controls,
        unchecked=partial(traced_checks, False),
    )


def _former_suite(m: Measurement) -> str:
    from parity.engine.measure.measurement import Kind

    if m.edge == MegalodonEdge.PRODUCTS32_FLOAT64:
        return PRODUCTS.suite
    return DIFFERENCES if m.kind is Kind.KNOWN_DIFFERENCE else ""


def _section_of(m: Measurement) -> str:
    from parity.engine.measure.measurement import Kind

    if m.edge.startswith("jaxbf16"):
        return "precision"
    sections = {
        Kind.LOGITS: "logits",
        Kind.LOSS: "losses",
        Kind.GRADIENT: "gradients",
        Kind.STATE: "streaming",
        Kind.TOKENS: "streaming",
        Kind.TRAJECTORY: "trajectory",
        Kind.BLOCK: "heat",
    }
    return sections.get(m.kind, "records")


def _commands(case: str) -> tuple[str, ...]:
    # Imported only for a failed case, since this imports JAX, which takes a second.
    from parity.megalodon.cases import CASES

    known = next((entry for entry in CASES if entry.name == case), None)
    if known is None:
        return ()
    # A trajectory starts at a gradient or the optimiser, and `shrink` does not support it.
    return ("parity explain",) if known.steps else ("parity explain", "parity shrink")


def _hint(measured: Collection[str], broken: Collection[str]) -> str:
    """Say what to suspect if JAX and the oracle agree with each other, not with the reference."""
    agree = {MegalodonEdge.JAX64_ORACLE, MegalodonEdge.JAX32_ORACLE}
    apart = {MegalodonEdge.REFERENCE32_ORACLE, MegalodonEdge.JAX32_REFERENCE32}
    if not agree <= {*measured} - {*broken} or not apart <= {*broken}:
        return ""
    return (
        "JAX and the oracle agree with each other and not with the reference: suspect first what "
        "the two share, the configuration (eps, RoPE base, sizes, masks), weights and ids; then "
        "the reference."
    )


def _padding(rows: Iterable[Measurement], tensors: Sequence[Deviation]) -> Padding:
    from reports.subjects.megalodon.padding import padding

    return padding(rows, tensors)


MEGALODON = Subject(
    "Megalodon",
    (KNOWN_DIFFERENCES, PRODUCTS, PROBES, PLANTED),
    _suites,
    _tables,
    suite=SUITE,
    model=_model,
    committed=COMMITTED,
    given=GIVEN,
    module="megalodon",
    against="the float64 oracle and megalodon-hf",
    edges=frozenset(map(str, MegalodonEdge)),
    former_suite=_former_suite,
    section_of=_section_of,
    commands=_commands,
    hint=_hint,
    padding=_padding,
)
