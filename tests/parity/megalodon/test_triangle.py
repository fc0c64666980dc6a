"""Every case on every edge of the triangle, and what the reference alone can answer."""

from __future__ import annotations

import contextlib
import dataclasses
from unittest.mock import patch

import jax
import pytest

from megalodon_jax.layers import attention, contraction, linear
from parity.engine.measure.compare import Comparison
from parity.engine.measure.contract import breaches, contract_of
from parity.engine.measure.measurement import Verdict
from parity.engine.measure.quantity import LOGITS, LOSS
from parity.faults.fault import rounded
from parity.megalodon import low_precision
from parity.megalodon.cases import CASES, by_name
from parity.megalodon.contract import gates, quantities
from parity.megalodon.edges import MegalodonEdge
from parity.megalodon.noise_floors import truth
from parity.megalodon.recordings import RecordedReference
from parity.megalodon.reference import LiveReference, why_unavailable
from parity.megalodon.runner import JaxSubject
from parity.megalodon.suite import Suite
from parity.tolerances import NoiseFloors

FLOORS = NoiseFloors.load()
TRUTH = {"jax64:oracle", "jax32:oracle"}
REFERENCE = {"reference32:oracle", "jax32:reference32"}
NARROW = {low_precision.OURS, *low_precision.MODES}
QUICK = (
    "plain",
    "right_padding",
    "pad_inside",
    "slow_decay",
    "large_mean",
    "stream_tokens",
    "left_padding",
)
"""One case for each kind of program: options, mask, stream, known difference; some share one and
are cheap."""
LIVE = ("plain", "stream", "adamw")
"""One recording of each kind is compared with the live reference."""


def swept(cases, quick):
    """The cases as parameters; those that are not in `quick` are a sweep."""
    return [c if c.name in quick else pytest.param(c, marks=pytest.mark.sweep) for c in cases]


every_case = pytest.mark.parametrize("case", swept(CASES, QUICK), ids=lambda case: case.name)
every_answer = pytest.mark.parametrize(
    "case", swept([c for c in CASES if c.has_reference], LIVE), ids=lambda case: case.name
)


def broken(rows):
    bad = [m for m in rows if m.verdict not in (Verdict.PASS, Verdict.INFO)]
    return [f"{m.edge} {m.quantity} {m.metric} {m.value} > {m.tolerance} {m.note}" for m in bad]


@pytest.mark.few(3)
@pytest.mark.torch_ref
@every_case
def test_triangle(case, reference, numerics):
    rows = numerics(Suite(reference).case(case, FLOORS))
    assert not broken(rows)
    edges = TRUTH | REFERENCE if case.has_reference else TRUTH
    assert {m.edge for m in rows} == edges | (NARROW if case.name in low_precision.CASES else set())
    found = breaches(contract_of(gates(case, reference)), rows)
    assert not found, found.sentence()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_contract_names_what_the_oracle_was_calibrated_for(case):
    """Noise floors were measured from the oracle's answers: their names are not ours to derive."""
    calibrated = set(FLOORS.responses(case.work))
    assert calibrated <= set(quantities(case))
    assert set(quantities(case)) - calibrated <= {"generated"}


@pytest.mark.torch_ref
@every_answer
def test_recordings_equal_the_live_reference(case, numerics):
    if reason := why_unavailable():
        pytest.skip(f"not run: {reason}")
    comparison = Comparison(case.work, MegalodonEdge.RECORDED32_LIVE32, FLOORS, "float32")
    recorded = RecordedReference()
    live = {n: a for n, a in LiveReference().run(case).items() if recorded.gives(n)}
    assert not broken(numerics(comparison.run(recorded.run(case), live)))


ON_GPU = ("plain", "slow_decay", "right_padding", "byte_lm")


@pytest.mark.parametrize(
    ("name", "platform"),
    [(ON_GPU[0], "cpu"), *(pytest.param(n, "gpu", marks=pytest.mark.cuda) for n in ON_GPU)],
)
def test_float32_on_each_device_is_as_close_to_the_oracle_as_on_the_cpu(name, platform, numerics):
    case, kind = by_name(name), {"gpu": "cuda"}.get(platform, platform)
    with jax.default_device(jax.devices(platform)[0]):
        ours = JaxSubject("float32").run(case)
    comparison = Comparison(case.work, MegalodonEdge.JAX32_ORACLE, FLOORS, "float32", kind)
    rows = numerics(comparison.run(ours, truth(case)))
    assert not broken(rows)


@contextlib.contextmanager
def shortened(bits):
    """A context in which the model's products round their operands to `bits` bits of mantissa."""

    def contract(equation, a, b, config):
        return contraction.contract(equation, rounded(a, bits), rounded(b, bits), config)

    jax.clear_caches()  # what is compiled ignores a patch, and must not keep it
    both = patch.object(linear, "contract", contract), patch.object(attention, "contract", contract)
    try:
        with both[0], both[1]:
            yield
    finally:
        jax.clear_caches()


def tf32_rows(case, bits, kind):
    with shortened(bits) if bits else contextlib.nullcontext():
        ours = JaxSubject(products="default").run(case)
    # The loss is a single number, whose error may be near 0 by chance.
    exact = {n: a for n, a in truth(case).items() if n != LOSS}
    ours = {n: a for n, a in ours.items() if n != LOSS}
    comparison = Comparison(case.work, MegalodonEdge.JAXTF32_ORACLE, FLOORS, "float32", kind)
    return [m for m in comparison.run(ours, exact) if m.metric == "rel_l2"]


# A processor has no TF32: there, operands are rounded to its 10 bits of mantissa.
@pytest.mark.parametrize(
    ("name", "platform"),
    [(ON_GPU[0], "cpu"), *(pytest.param(n, "gpu", marks=pytest.mark.cuda) for n in ON_GPU)],
)
def test_tf32_products_round_their_operands_and_nothing_else(name, platform, numerics):
    case, kind, bits = by_name(name), *{"gpu": ("cuda", 0)}.get(platform, (platform, 10))
    device = jax.devices(platform)[0]
    if not bits and float(device.compute_capability) < 8:
        pytest.skip(f"not run: TF32 begins with compute capability 8, {device} has less")
    with jax.default_device(device):
        rows = numerics(tf32_rows(case, bits, kind))
    assert not broken(rows)
    logits = next(m for m in rows if m.quantity == LOGITS)
    # Not float32 by mistake: TF32 rounds 2^12 times as much.
    assert logits.value > 2**6 * FLOORS.floor(case.work, LOGITS)


def test_products_of_nine_bits_are_no_tf32():
    rows = tf32_rows(by_name("plain"), 9, "cpu")
    assert LOGITS in {m.quantity for m in rows if m.verdict is Verdict.FAIL}


def test_a_case_that_changed_loses_its_tolerances():
    changed = dataclasses.replace(by_name("length_c"), batch_size=1)
    comparison = Comparison(changed.work, MegalodonEdge.JAX32_ORACLE, FLOORS, "float32")
    exact = truth(changed)
    narrow = {name: a.astype("float32") for name, a in exact.items()}
    verdicts = {m.verdict for m in comparison.run(narrow, exact) if m.metric == "rel_l2"}
    assert verdicts == {Verdict.NOT_COMPARABLE}
