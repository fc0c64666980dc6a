"""Negative controls: two bugs planted in every nightly run, which the run must find.

One is visible only in float64, the other only in float32. A suite that by mistake compared the
oracle, or one dtype, with itself would pass every gate. So each control must be found at its stage
and on its edge (pair of compared sides).
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
"""Case in which both bugs are planted, the cheapest one."""


@dataclass(frozen=True, slots=True)
class Control:
    """A planted bug, and the only edge (pair of compared sides) that shows it."""

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
                # Rounding by `reduce_precision`: on a GPU, XLA drops a conversion to float32 and
                # back.
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
"""The two controls. Neither bug changes results on the edge where the other is found, so both are
planted at once and each dtype is compiled only once."""


def missed(suite: Suite, floors: NoiseFloors) -> Iterator[tuple[Control, str]]:
    """Yield every control and a message, which is "" if the suite found the control's bug.

    The bugs of both controls are planted in one run of `CASE`. JAX's compiled programs are
    discarded before and after.

    Args:
        suite: the suite to test.
        floors: noise floors; they must include those of `CASE`.
    """
    rows = []
    with contextlib.ExitStack() as planted:
        for control in CONTROLS:
            planted.enter_context(control.fault.planted())
        for row in suite.case(CASE, floors):
            rows.append(row)
            # Later measurements concern megalodon-hf, in which no bug is planted.
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
            f"the bug {control.fault.name} was planted at {control.fault.stage}, but {where} "
            f"reported ({control.edge})",
        )
