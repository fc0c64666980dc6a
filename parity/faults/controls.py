"""Controls: two bugs planted every night, one visible only in float64 and one only in float32.

A suite that compared the oracle or one dtype with itself would pass every gate. A night must
therefore find both controls, each at its stage and on its edge.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import jax.numpy as jnp

from megalodon_jax.layers import linear
from megalodon_jax.layers.attention import MegalodonAttention
from parity.engine.measure.localize import first_divergence
from parity.engine.measure.measurement import Verdict
from parity.engine.measure.quantity import WEIGHTS
from parity.faults.fault import Family, Fault, Patch, Plant, marked, rounded
from parity.megalodon.cases import by_name
from parity.megalodon.edges import MegalodonEdge
from parity.megalodon.suite import Suite
from parity.megalodon.tolerance_table import NoiseFloors

CASE = by_name("length_c")
"""The cheapest case of the matrix."""


@dataclass(frozen=True, slots=True)
class Control:
    """A bug, and the only edge of the triangle that shows it."""

    fault: Fault
    edge: MegalodonEdge


def _short_float32_products(bits: int) -> Plant:
    def plant(matmul):
        def faulty(x, weight, *rest):
            if x.dtype == jnp.float32:
                x, weight = rounded(x, bits), rounded(weight, bits)
            return matmul(x, weight, *rest)

        return faulty

    return plant


CONTROLS = (
    Control(
        Fault(
            Family.RUNTIME,
            "values_through_float32",
            "a constant of float32 dtype in a float64 program: nothing in float32",
            "layers.0.v",
            Patch(
                MegalodonAttention,
                "__call__",
                # XLA drops a conversion to float32 and back on a GPU, but not this.
                marked(lambda v, self, x: rounded(v, 23), "v"),
            ),
        ),
        MegalodonEdge.JAX64_ORACLE,
    ),
    Control(
        Fault(
            Family.RUNTIME,
            "float32_products_in_tf32",
            "an accelerator allowed to shorten float32 products: nothing in float64",
            "layers.0.q",
            Patch(linear, "matmul", _short_float32_products(10)),
        ),
        MegalodonEdge.JAX32_ORACLE,
    ),
)
"""Each has no effect on the other's edge, so both are planted at once: one program per dtype."""


def missed(suite: Suite, floors: NoiseFloors) -> Iterator[tuple[Control, str]]:
    """Yield every control with a message if `suite` did not find it, or with an empty one.

    Compiled programs are discarded before and after.
    """
    rows = []
    with contextlib.ExitStack() as planted:
        for control in CONTROLS:
            planted.enter_context(control.fault.planted())
        for row in suite.case(CASE, floors):
            rows.append(row)
            # The remaining rows concern the reference, in which no bug is planted.
            if row.quantity == WEIGHTS:
                break
    for control in CONTROLS:
        found = first_divergence(row for row in rows if row.edge == control.edge)
        if found is not None and (found.quantity, found.verdict) == (
            control.fault.stage,
            Verdict.FAIL,
        ):
            yield control, ""
            continue
        where = "nothing was" if found is None else f"{found.quantity} was"
        yield (
            control,
            f"{control.fault.name} was planted at {control.fault.stage} and {where} reported "
            f"({control.edge})",
        )
